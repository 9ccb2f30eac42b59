"""Export: whole tensors, usually the weights alone, in a format that other programs load."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ckpt_tool.api.arguments import check_arguments
from ckpt_tool.api.checkpoint import Checkpoint, open_checkpoint
from ckpt_tool.api.convert.casts import cast_model, cast_notes, wanted_dtype
from ckpt_tool.api.convert.conversion import (
    Conversion,
    ConversionResult,
    build_conversion,
    whole_boxes,
)
from ckpt_tool.api.convert.hf_names import HfNames, of_model, with_hf_names
from ckpt_tool.api.convert.names import beside_model_notes, module_names, renamed
from ckpt_tool.api.convert.names_options import NamesOptions, check_asked, names_options
from ckpt_tool.api.convert.published import published_names, unpublished_note
from ckpt_tool.api.convert.rank_state import by_name
from ckpt_tool.api.convert.running import Running, execution_of
from ckpt_tool.api.convert.selection import no_tensors, select_tensors, unflattened
from ckpt_tool.api.convert.tied import without_tied
from ckpt_tool.engine.base import Progress
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.base import PlacingWriter, WriterOptions
from ckpt_tool.formats.registry import writer as writer_named
from ckpt_tool.layout.naming_match import nearest_naming
from ckpt_tool.layout.origins import origins_of, renaming_views
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.storage.apart import check_apart

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["export", "prepare_export"]

_HAS_CONFIG = frozenset({"safetensors"})
_CONFIG = "config.json"
_CARRIED = (_CONFIG, "generation_config.json")
_HOLDS_OBJECTS = frozenset(
    {
        "dcp",
        "torch-save",
        "lightning",
        "rank-files",
        "torch-ranks",
        "bytecheckpoint",
        "vescale",
        "torch-checkpointing",
        "torchsnapshot",
        "orbax",
        "gguf",
    }
)
_SPLITS = frozenset({"safetensors"})
"""Formats of several files that end where a size says."""
_WHOLE_ON_ONE_RANK = frozenset({"consolidated"})
"""Layouts of ranks that programs load as one file too."""
_BY_SUFFIX = {".npz": "npz", ".gguf": "gguf", **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch-save")}


def prepare_export(  # noqa: PLR0913 - one argument per option of the command
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str | None = None,
    everything: bool = False,
    names: Literal["source", "hf"] = "hf",
    family: str = "auto",
    naming: str | os.PathLike[str] | None = None,
    facts: Mapping[str, int] | None = None,
    true_vocab: int | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    dtype: str | None = None,
    masters: bool = False,
    tied: Literal["keep", "drop", "auto"] = "auto",
    unequal: str | Sequence[str] | None = None,
    flat: str | os.PathLike[str] | None = None,
    max_shard_nbytes: int | None = None,
    share_blocks: bool = False,
    **running: Unpack[Running],
) -> Conversion:
    """Plan an export; nothing is written yet.

    Args:
        source: checkpoint of any readable format.
        target: folder, or a file where the name ends like one (``out.safetensors``, ``out.pt``).
        to: name of the target format; None to tell it from the target's name (``.npz``, ``.pt``, ``.pth``, ``.bin``,
            ``.ckpt``), ``safetensors`` where that tells nothing.
        everything: all sections and objects, not the model's tensors alone.
        names: ``source`` keeps full names; ``hf`` gives those of transformers where ``family`` knows them, else takes
            off the trainer's outer key and wrapper prefixes.
        family: whose names Megatron's and torchtitan's become (``llama``, ``qwen_moe`` ...), ``auto`` to tell it from
            the names, ``none`` for no other names.
        naming: path of a TOML file with rules that go before the family's.
        facts: numbers that such rules need and the checkpoint does not record (``heads``, ``kv_heads``).
        true_vocab: rows of the vocabulary that are no padding.
        include: globs or ``re:`` patterns of tensors to take.
        exclude: globs or ``re:`` patterns of tensors and objects to leave.
        dtype: cast the model's floating tensors; each cast is reported.
        masters: fp32 masters of the optimizer in place of the weights, which are roundings of them.
        tied: tensors that share bytes: ``keep`` writes each, ``drop`` the first only, ``auto`` drops when the source's
            config says that embeddings are tied.
        unequal: rules for tensors that differ between ranks though no file says how they join (``first``, ``concat:0``,
            ``rules`` of the model's family, ``rules:FILE``, ``GLOB=concat:0``); None to stop.
        flat: path of a table of what FSDP1's flat parameters hold, see ``convert.flat``.
        max_shard_nbytes: start a new file before this many bytes.
        share_blocks: pad headers of safetensors so that most tensors have the place within a block that they have in
            the source's files; XFS and Btrfs then share the blocks, as they do where places agree by chance.
        **running: memory, threads, overwriting and the like, see ``Running``.

    Raises:
        CkptError: see ``errors``; anything that would be lost silently is refused instead.
    """
    execution = execution_of(target, running, "prepare_export")
    check_arguments(
        names=(names, ("source", "hf")), tied=(tied, ("keep", "drop", "auto")), true_vocab=(true_vocab, 1),
        max_shard_nbytes=(max_shard_nbytes, 1),
    )  # fmt: skip
    writer = writer_named(to or _by_suffix(target))
    to = writer.name
    if writer.per_rank and to not in _WHOLE_ON_ONE_RANK:
        raise UsageError(f"{to} stores what each rank holds; an export writes whole tensors", hint="use ckpt reshard")
    if isinstance(writer, PlacingWriter):
        raise UsageError(f"{to} stores a whole training state; an export writes tensors", hint="use ckpt reshard")
    if share_blocks and to != "safetensors":
        raise UsageError(f"{to} has no header that can be padded", hint="leave out --share-blocks")
    if max_shard_nbytes is not None and to not in _SPLITS:
        splits = " or ".join(f"--to {name}" for name in sorted(_SPLITS))
        raise UsageError(f"{to} has no shards of a size to choose", hint=f"leave out --max-shard-size, or use {splits}")
    options = names_options(family, naming, facts, true_vocab)
    check_asked(options, is_asked=names == "hf")
    check_apart(source, target)
    checkpoint = open_checkpoint(source, memory_budget_bytes=execution.memory_budget_bytes)
    with ExitStack() as opened:
        opened.push(checkpoint)
        checkpoint = unflattened(checkpoint, flat)
        selection = select_tensors(
            checkpoint,
            include=include,
            exclude=exclude,
            sections=None if everything or include or masters else ("model",),
            unequal=unequal,
        )
        manifest, dropped, notes = selection.manifest, list(selection.dropped), list(selection.notes)
        if masters:
            from ckpt_tool.api.convert.masters import of_masters

            manifest, masters_dropped, masters_notes = of_masters(checkpoint, manifest)
            dropped += masters_dropped
            notes += masters_notes
        manifest, tied_dropped, tied_notes = without_tied(checkpoint, manifest, tied)
        is_whole = not include and not exclude
        named = HfNames(manifest, (), (), (), {})
        if names == "hf":
            named = _with_names(checkpoint, manifest, options, is_whole=is_whole)
        dropped += [*tied_dropped, *named.dropped]
        notes += [*tied_notes, *named.notes]
        blobs: tuple[Blob, ...] = ()
        if everything and to in _HOLDS_OBJECTS:
            blobs = by_name(selection.load_objects(checkpoint))
        elif everything:
            dropped += no_tensors(selection.load_objects(checkpoint), named.manifest)
        else:
            dropped += no_tensors(selection.look_into_objects(checkpoint), named.manifest)
        tensors = cast_model(named.manifest.tensors, wanted_dtype(dtype))
        companions: dict[str, bytes] = {}
        if to in _HAS_CONFIG and named.config:
            companions = {_CONFIG: _config_text(named.config, tensors)}
        elif to in _HAS_CONFIG and is_whole:
            companions = _carried(checkpoint, tensors)
        conversion = build_conversion(
            checkpoint,
            named.manifest,
            target,
            writer=writer,
            tensors=tensors,
            boxes=whole_boxes(tensors),
            mesh=None,
            blobs=blobs,
            dropped=dropped,
            notes=[*notes, *cast_notes(named.manifest, wanted_dtype(dtype))],
            options=WriterOptions(
                max_shard_nbytes=max_shard_nbytes, origins=_first_bytes(named.manifest) if share_blocks else {}
            ),
            execution=execution,
            origins=origins_of(manifest, named.views) if named.views and not masters else None,
            companions=companions,
        )
        opened.pop_all()  # it stays open for the run
        return conversion


def _with_names(checkpoint: Checkpoint, manifest: Manifest, wanted: NamesOptions, *, is_whole: bool) -> HfNames:
    """Names of transformers where a family has them; else those of the module, without what trainers put around it."""
    paths = manifest.tensors.paths or tuple((fqn,) for fqn in manifest.tensors.fqns)
    # A tensor that is all there is has no keys to be named by.
    names = [(fqn, name or fqn) for fqn, name in zip(manifest.tensors.fqns, module_names(paths), strict=True)]
    notes, info = beside_model_notes(paths), checkpoint.manifest.info
    # State of an optimizer would no longer be that of the weights by name.
    is_model = len(of_model(manifest)) == len(manifest.tensors)
    published = published_names(manifest, names, info, wanted) if is_model else None
    if published is not None:
        return replace(published, notes=(*notes, *published.notes))
    found = with_hf_names(checkpoint, manifest, wanted, is_whole=is_whole)
    if found is not None:
        return found
    views = renaming_views(manifest, names) if any(old != new for old, new in names) else ()
    notes = (*notes, *_kept_names(checkpoint.manifest, [name for _, name in names], wanted))
    return HfNames(renamed(manifest, dict(names)), (), notes, views, {})


def _kept_names(manifest: Manifest, names: Sequence[str], wanted: NamesOptions) -> Iterator[str]:
    """That names are not those of transformers, where the user may well think so: it was looked for, and not found."""
    if wanted.family == "none":
        return
    note = unpublished_note(names, manifest.info, wanted)
    if note is not None:
        yield note
    nearest = nearest_naming(of_model(manifest))
    if nearest is not None or manifest.format.startswith("megatron"):
        because = "" if nearest is None else f" ({nearest})"
        yield f"names are kept as they are, as they fit no family{because}; --naming FILE gives them others"


def _first_bytes(manifest: Manifest) -> dict[str, int]:
    """By fqn, where in its file a tensor begins that is one chunk; one that is not stored as a run shares nothing."""
    chunks = manifest.chunks
    single = np.bincount(chunks.tensor, minlength=len(manifest.tensors)) == 1
    rows = np.flatnonzero(single[chunks.tensor])
    names = manifest.tensors.fqns
    return {names[t]: at for t, at in zip(chunks.tensor[rows].tolist(), chunks.offset[rows].tolist(), strict=True)}


def _carried(checkpoint: Checkpoint, tensors: TensorTable) -> dict[str, bytes]:
    """What says how to run a model of Hugging Face's, as it lies beside it; the config with the type after casts."""
    source, info = checkpoint.source, checkpoint.manifest.info
    config, folder = info.get("config"), info.get("config_folder", "")
    if not isinstance(config, dict) or source.listing.entry is not None or folder + _CONFIG not in source.listing:
        return {}
    before = _most_common_type(checkpoint.manifest.tensors)
    found = {name: source.read_whole(folder + name) for name in _CARRIED if folder + name in source.listing}
    after = _most_common_type(tensors)
    if after is not None and before != after:
        key = "dtype" if "dtype" in config else "torch_dtype"
        found[_CONFIG] = (json.dumps({**config, key: after}, indent=2) + "\n").encode()
    return found


def _most_common_type(tensors: TensorTable) -> str | None:
    names = Counter(one.name for one in tensors.dtypes if one.kind == "float")
    return names.most_common(1)[0][0] if names else None


def _config_text(config: Mapping[str, Any], tensors: TensorTable) -> bytes:
    """``config.json`` with the type that most weights have."""
    most = _most_common_type(tensors)
    stated = {} if most is None else {"torch_dtype": most}
    return (json.dumps({**config, **stated}, indent=2, sort_keys=True) + "\n").encode()


def _by_suffix(target: str | os.PathLike[str]) -> str:
    """The format that a target's name asks for."""
    suffix = os.path.splitext(os.fspath(target))[1].lower()
    return _BY_SUFFIX.get(suffix, "safetensors")


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> ConversionResult:
    """Write whole tensors in a format that other programs load; ``ckpt_tool.plan_export`` alone shows it before.

    Args:
        source: checkpoint of any readable format, a path or URL.
        target: file or folder to write, a path or URL.
        progress: called now and then with the payload bytes that are written, and all there are.
        **options: all others of ``ckpt_tool.plan_export``, by the same names.

    Returns:
        What was written, dropped and noted; ``nbytes`` counts the target's files, headers included.

    Raises:
        CkptError: see ``ckpt_tool.plan_export``.
        TargetExists: something is at the target, and neither ``overwrite`` nor ``resume`` was given.
        StorageError: no space, or the storage failed; ``resume=True`` goes on.
    """
    conversion = prepare_export(source, target, **options)
    with conversion.checkpoint:
        return conversion.run(progress)
