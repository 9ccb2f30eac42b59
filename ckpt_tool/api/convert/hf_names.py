"""Names of Hugging Face's models for a checkpoint of Megatron or torchtitan: which naming, with which facts.

Facts are numbers that shapes alone do not tell (how many heads). They come from what the checkpoint itself records, or
from the user; each is reported with where it is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.convert.conversion import Dropped
from ckpt_tool.errors import LayoutError, UsageError
from ckpt_tool.layout.naming_match import NamingMatch, choose_naming, match_names
from ckpt_tool.layout.naming_rules import Naming, load_naming
from ckpt_tool.layout.naming_sizes import Fact
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

if TYPE_CHECKING:
    from ckpt_tool.layout.model_config import Translated
    from ckpt_tool.layout.views import View

__all__ = ["HfNames", "NamesOptions", "names_options", "with_hf_names"]

# Fact: its name among Megatron's arguments, and in a Hugging Face config.
_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight")
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


@dataclass(frozen=True, slots=True)
class NamesOptions:
    """What the user says of names."""

    family: str = "auto"
    """``auto``, ``none``, or the family whose names are wanted."""
    naming: tuple[str, str] | None = None
    """A file of rules that go before the family's: its path and its text."""
    facts: Mapping[str, int] | None = None
    true_vocab: int | None = None


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


def names_options(
    family: str, naming: str | os.PathLike[str] | None, facts: Mapping[str, int] | None, true_vocab: int | None
) -> NamesOptions:
    """Options as commands take them; ``naming`` is the path of a local file.

    Raises:
        UsageError: it cannot be read.
    """
    if naming is None:
        return NamesOptions(family, None, facts, true_vocab)
    path = os.fspath(naming)
    try:
        with open(path, encoding="utf-8") as file:
            return NamesOptions(family, (path, file.read()), facts, true_vocab)
    except OSError as error:
        raise UsageError(f"the rules file cannot be read: {error.strerror}", where=path) from error


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
    model = SECTIONS.index("model")
    is_model = (manifest.tensors.section == model).tolist()
    fqns = [fqn for fqn, wanted in zip(manifest.tensors.fqns, is_model, strict=True) if wanted]
    # Of all names, so that a part of the model is known for what it is.
    everywhere = checkpoint.manifest.tensors
    in_model = [fqn for row, fqn in enumerate(everywhere.fqns) if everywhere.section[row] == model]
    found = _naming(in_model, options)
    if found is None:
        _refuse_unused(options)
        return None
    # 4 ms of start-up that others do without, whose names need no rules.
    from ckpt_tool.api.convert.vocabulary import true_vocabulary
    from ckpt_tool.layout.naming import rename
    from ckpt_tool.layout.origins import renaming_views
    from ckpt_tool.layout.views import apply_views

    matches = match_names(found.naming, fqns)
    facts = dict(_facts(checkpoint.manifest, options.facts or {}))
    tables = [m.fqn for m in matches if m.rule.rows == "vocab"]
    vocab, vocab_notes = (None, ()) if "vocab" in facts else true_vocabulary(checkpoint, tables, options.true_vocab)
    if vocab is not None:
        facts["vocab"] = vocab
    shapes = {fqn: everywhere.shape_of(row) for row, fqn in enumerate(everywhere.fqns)}
    renaming = rename(found.naming, matches, shapes, facts, is_whole=is_whole)
    kept = [fqn for fqn, wanted in zip(manifest.tensors.fqns, is_model, strict=True) if not wanted]
    result = apply_views(manifest, renaming.views, keep=kept)
    if result.tensors.paths is not None:
        roots = tuple((view.fqn,) for view in renaming.views)
        paths = (*roots, *result.tensors.paths[len(roots) :])
        result = result.replace(tensors=replace(result.tensors, paths=paths))
    views = (*renaming.views, *renaming_views(manifest, [(fqn, fqn) for fqn in kept]))
    notes = [
        f"{counted(len(fqns), 'tensor', 'become')} {len(renaming.views):,}: {found.evidence}",
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


def _naming(fqns: Sequence[str], options: NamesOptions) -> NamingMatch | None:
    """The naming of the family, behind the user's own rules."""
    own_text = options.naming
    found = None
    if options.family != "none":
        found = choose_naming(fqns, family=None if options.family == "auto" else options.family)
    if own_text is None:
        return found
    own = load_naming(own_text[1], source=own_text[0], base=None if found is None else found.naming)
    return NamingMatch(own, f"rules of {own_text[0]}" + (f", then {found.evidence}" if found else ""))


def _refuse_unused(options: NamesOptions) -> None:
    given = [f"--fact {name}={value}" for name, value in (options.facts or {}).items()]
    given += [] if options.true_vocab is None else [f"--true-vocab {options.true_vocab}"]
    if given:
        raise UsageError(
            f"{given[0]} says something of a family's names, and none is known to fit",
            hint="name the family with --family, or give rules with --naming FILE",
        )


def _facts(manifest: Manifest, given: Mapping[str, int]) -> Iterator[tuple[str, Fact]]:
    """What the checkpoint records, overruled by what the user gives."""
    args, config = manifest.info.get("args"), manifest.info.get("config")
    args = args if isinstance(args, Mapping) else {}
    config = config if isinstance(config, Mapping) else {}
    for name, (in_args, in_config) in _RECORDED.items():
        for table, key, where in ((args, in_args, "args"), (config, in_config, "config")):
            value = table.get(key) if key is not None else None
            if isinstance(value, int) and value >= 0:
                yield name, Fact(int(value), f"{where}.{key} of the checkpoint")
                break
    # Megatron ignores num_query_groups (1 by default) without group_query_attention: every head is a group then.
    has_no_groups = args.get("group_query_attention") is False or ("num_query_groups" not in args and args)
    if has_no_groups and isinstance(args.get("num_attention_heads"), int):
        yield "kv_heads", Fact(args["num_attention_heads"], "args of the checkpoint: no grouped queries")
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
