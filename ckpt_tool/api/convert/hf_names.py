"""Names of Hugging Face's models for a checkpoint of Megatron or torchtitan: which naming, with which facts.

Facts are numbers that shapes alone do not tell (how many heads). They come from what the checkpoint itself records, or
from the user; each is reported with where it is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.convert.conversion import Dropped
from ckpt_tool.api.convert.names_options import NamesOptions, check_used
from ckpt_tool.errors import LayoutError, UsageError
from ckpt_tool.layout.naming_match import Matched, NamingMatch, choose_naming, match_names
from ckpt_tool.layout.naming_rules import Naming, load_naming
from ckpt_tool.layout.naming_sizes import Fact
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

if TYPE_CHECKING:
    from ckpt_tool.layout.model_config import Translated
    from ckpt_tool.layout.views import View

__all__ = [
    "HfNames",
    "apply_naming",
    "facts_of",
    "naming_of",
    "of_model",
    "with_hf_names",
]

# Fact: its name among Megatron's arguments, and in a Hugging Face config.
_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight")
_RECORDED = {
    "heads": ("num_attention_heads", "num_attention_heads"),
    "kv_heads": ("num_query_groups", "num_key_value_heads"),
    "head_dim": ("kv_channels", "head_dim"),
    "layers": ("num_layers", "num_hidden_layers"),
    "experts": ("num_experts", None),
    "tp": ("tensor_model_parallel_size", None),
    "rotary_interleaved": ("rotary_interleaved", None),
    "apply_layernorm_1p": ("apply_layernorm_1p", None),
    "swiglu": ("swiglu", None),
}


@dataclass(frozen=True)
class HfNames:
    """A manifest under other names, and what was done for it."""

    manifest: Manifest
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]
    views: tuple[View, ...]
    """What each tensor is made of."""
    config: Mapping[str, Any]
    """What belongs into the model's ``config.json``, as far as the source tells; empty where it does not."""


def with_hf_names(
    checkpoint: Checkpoint, manifest: Manifest, options: NamesOptions, *, is_whole: bool, has_config: bool = True
) -> HfNames | None:
    """The model's tensors under Hugging Face's names; other tensors as they are. None when no naming fits.

    Args:
        checkpoint: the source.
        manifest: the tensors to rename, resolved.
        options: what the user says.
        is_whole: no part of the model was left out on purpose, so that a missing layer is an error.
        has_config: the target has a place for ``config.json``.

    Raises:
        LayoutError: see ``layout.naming``; a tensor without a name, a fact that is missing or contradicts a shape.
        UsageError: facts were given, and no naming takes them.
    """
    found = naming_of(checkpoint.manifest, options)
    if found is None:
        check_used(options)
        return None
    matches = match_names(found.naming, of_model(manifest))
    facts = facts_of(checkpoint.manifest, options.facts or {})
    return apply_naming(
        checkpoint, manifest, found, matches, facts, true_vocab=options.true_vocab, is_whole=is_whole,
        has_config=has_config,
    )  # fmt: skip


def apply_naming(
    checkpoint: Checkpoint,
    manifest: Manifest,
    found: NamingMatch,
    matches: Sequence[Matched],
    facts: Mapping[str, Fact],
    *,
    true_vocab: int | None,
    is_whole: bool,
    has_config: bool,
) -> HfNames:
    """The tensors that matched a naming under the names that it gives them; other tensors as they are.

    Args:
        checkpoint: the source.
        manifest: the tensors to rename, resolved.
        found: the naming.
        matches: tensors of the manifest, and its rules for them.
        facts: numbers that are known.
        true_vocab: rows of the vocabulary, where the user says how many.
        is_whole: see ``with_hf_names``.
        has_config: see ``with_hf_names``.

    Raises:
        LayoutError: see ``layout.naming``; a fact that is missing or contradicts a shape.
    """
    # 4 ms of start-up that others do without, whose names need no rules.
    from ckpt_tool.api.convert.vocabulary import true_vocabulary
    from ckpt_tool.layout.naming import rename
    from ckpt_tool.layout.origins import renaming_views
    from ckpt_tool.layout.views import apply_views

    everywhere, facts = checkpoint.manifest.tensors, dict(facts)
    tables = [m.fqn for m in matches if m.rule.rows == "vocab"]
    vocab, vocab_notes = (None, ()) if "vocab" in facts else true_vocabulary(checkpoint, tables, true_vocab)
    if vocab is not None:
        facts["vocab"] = vocab
    shapes = dict(zip(everywhere.fqns, everywhere.shapes, strict=True))
    renaming = rename(found.naming, matches, shapes, facts, is_whole=is_whole)
    named = {matched.fqn for matched in matches}
    kept = [fqn for fqn in manifest.tensors.fqns if fqn not in named]
    result = apply_views(manifest, renaming.views, keep=kept)
    if result.tensors.paths is not None:
        roots = tuple((view.fqn,) for view in renaming.views)
        paths = (*roots, *result.tensors.paths[len(roots) :])
        result = result.replace(tensors=replace(result.tensors, paths=paths))
    views = (*renaming.views, *renaming_views(manifest, [(fqn, fqn) for fqn in kept]))
    notes = [
        f"{counted(len(matches), 'tensor', 'become')} {len(renaming.views):,}: {found.evidence}",
        *renaming.notes,
        *vocab_notes,
    ]
    notes += _output_layer_notes(checkpoint.manifest, {view.fqn for view in renaming.views}, is_whole=is_whole)
    written = _config(checkpoint, found.naming, renaming.views, is_whole=is_whole and has_config)
    notes += written.notes
    dropped = tuple(Dropped(fqn, why) for fqn, why in renaming.dropped)
    return HfNames(result, dropped, tuple(notes), views, written.values)


def _config(checkpoint: Checkpoint, naming: Naming, views: Sequence[View], *, is_whole: bool) -> Translated:
    """``config.json`` of a model of Megatron's: what its arguments tell of it."""
    from ckpt_tool.layout.model_config import Translated, config_of

    if not is_whole or not isinstance(checkpoint.manifest.info.get("args"), Mapping):
        return Translated({}, ())
    rows = [row for row, blob in enumerate(checkpoint.manifest.blobs) if blob.fqn == "args"]
    states = [getattr(checkpoint.load_blobs(rows)[row].value, "state", None) for row in rows]
    args = {**checkpoint.manifest.info["args"], **(states[0] if states and isinstance(states[0], dict) else {})}
    embeddings = [view.shape[0] for view in views if view.fqn.endswith(_EMBEDDINGS)]
    return config_of(args, naming.model_types, n_tokens=embeddings[0] if embeddings else None)


def of_model(manifest: Manifest) -> list[str]:
    """Names of the model's tensors."""
    is_model = (manifest.tensors.section == SECTIONS.index("model")).tolist()
    return [fqn for fqn, wanted in zip(manifest.tensors.fqns, is_model, strict=True) if wanted]


def naming_of(manifest: Manifest, options: NamesOptions, *, must_fit: bool = True) -> NamingMatch | None:
    """The naming of the family, behind the user's own rules; None when none fits.

    Args:
        manifest: all of the source, so that a part of the model is known for what it is.
        options: what the user says.
        must_fit: a family that is named has to fit.

    Raises:
        UsageError: no naming is called so.
        LayoutError: the one that is does not fit, or several fit equally well.
    """
    own_text = options.naming
    found = None
    if options.family != "none":
        family = None if options.family == "auto" else options.family
        found = choose_naming(of_model(manifest), family=family, must_fit=must_fit)
    if own_text is None:
        return found
    own = load_naming(own_text[1], source=own_text[0], base=None if found is None else found.naming)
    return NamingMatch(own, f"rules of {own_text[0]}" + (f", then {found.evidence}" if found else ""))


def facts_of(manifest: Manifest, given: Mapping[str, int], *, whose: str = "the checkpoint") -> dict[str, Fact]:
    """What a checkpoint records, overruled by what the user gives.

    Args:
        manifest: the checkpoint.
        given: what the user gives.
        whose: what the evidence calls the checkpoint.

    Raises:
        UsageError: a number is not above 0.
    """
    return dict(_facts(manifest, given, whose))


def _facts(manifest: Manifest, given: Mapping[str, int], whose: str) -> Iterator[tuple[str, Fact]]:
    args, config = manifest.info.get("args"), manifest.info.get("config")
    args = args if isinstance(args, Mapping) else {}
    config = config if isinstance(config, Mapping) else {}
    for name, (in_args, in_config) in _RECORDED.items():
        for table, key, where in ((args, in_args, "args"), (config, in_config, "config")):
            value = table.get(key) if key is not None else None
            if isinstance(value, int) and value >= 0:
                yield name, Fact(int(value), f"{where}.{key} of {whose}")
                break
    # Megatron ignores num_query_groups (1 by default) without group_query_attention: every head is a group then.
    has_no_groups = args.get("group_query_attention") is False or ("num_query_groups" not in args and args)
    if has_no_groups and isinstance(args.get("num_attention_heads"), int):
        yield "kv_heads", Fact(args["num_attention_heads"], f"args of {whose}: no grouped queries")
    for name, value in given.items():
        if value < 1:
            raise UsageError(f"--fact {name}={value} is no number above 0")
        yield name, Fact(value, f"--fact {name}={value}")


def _output_layer_notes(manifest: Manifest, names: set[str], *, is_whole: bool) -> Iterator[str]:
    """Where the output layer is.

    Raises:
        LayoutError: the run had one of its own, and it is not there.
    """
    if not is_whole or "lm_head.weight" in names or "model.embed_tokens.weight" not in names:
        return
    args = manifest.info.get("args")
    if isinstance(args, Mapping) and args.get("untie_embeddings_and_output_weights") is True:
        raise LayoutError(
            "the output layer is not there, though args say that it is not tied to the embedding",
            where=manifest.where,
            hint='"ckpt verify" tells what is missing',
        )
    yield "no output layer is stored: it is tied to the embedding (tie_word_embeddings in the config)"
