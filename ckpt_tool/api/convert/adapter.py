"""An adapter put beside its base model: one folder, one index, both sides' tensors under their own names.

Nothing is added up: which weight a pair of factors belongs to is told from names and sizes, and only to refuse an
adapter of another model. PEFT's files: ``adapter_model.safetensors`` and ``adapter_config.json`` (peft 0.21,
``PeftModel.save_pretrained``).
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.errors import LayoutError, Unsupported, UsageError
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.safetensors.index_file import READER
from ckpt_tool.layout.names import Spelling, spellings
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.sizes import counted, shell_word
from ckpt_tool.storage.virtual.beside import Beside, beside

__all__ = ["with_adapter"]

_BASES = frozenset({"safetensors", "safetensors-index"})


def with_adapter(base: Checkpoint, adapter: Checkpoint, memory_budget_bytes: int) -> tuple[Checkpoint, tuple[str, ...]]:
    """``(both as one checkpoint, notes)``; of files that both have, the base's.

    Raises:
        Unsupported: one of them is no folder of safetensors files.
        UsageError: the second is no adapter, or both have a tensor or a file of tensors of the same name.
        LayoutError: the adapter is one of another model: a weight is not there, or has other sizes.
    """
    _check_kinds(base, adapter)
    pairs = _check_fit(base.manifest, adapter.manifest)
    held = set(adapter.manifest.files.paths)
    both = held & set(base.source.listing.sizes)
    if both:
        raise UsageError(f"both have a file {min(both)!r}", where=adapter.url, hint="rename one of them")
    here, there = base.source.listing, adapter.source.listing
    indexes = {path for path in (base.manifest.info.get("index"), adapter.manifest.info.get("index")) if path}
    own = {path: n for path, n in here.sizes.items() if path not in indexes}
    strays = [path for path in own if path.endswith(".safetensors") and path not in base.manifest.files.index]
    guests = {path: n for path, n in there.sizes.items() if path not in indexes and path not in own}
    sizes = {path: n for path, n in (own | guests).items() if path not in strays}
    listing = beside(here, there, frozenset(guests), sizes)
    store = Beside(base.source.store, adapter.source.store, frozenset(guests), listing)
    source = Source(store, listing)
    said = dict.fromkeys((*base.manifest.notes, *adapter.manifest.notes))
    manifest = READER.read_together(source, (*base.manifest.files.paths, *adapter.manifest.files.paths)).replace(
        notes=tuple(said)
    )
    joined = Checkpoint(base.url, source, READER, manifest, memory_budget_bytes)
    twice = sorted(path for path in there.sizes if path in own)
    notes = [
        (
            f"{adapter.url}: {counted(len(held), 'file')} of tensors put beside those of {base.url}, {pairs}; nothing "
            "is added up"
        )
    ]
    if twice:
        notes.append(f"{', '.join(twice)} of the adapter: left out, the base has files of these names")
    if strays:
        notes.append(f"{', '.join(strays)}: left out, no tensor is taken from there")
    return joined, tuple(notes)


def _check_kinds(base: Checkpoint, adapter: Checkpoint) -> None:
    for each, what in ((base, "SRC"), (adapter, "the adapter")):
        if each.format not in _BASES:
            raise Unsupported(
                f"{what} is {each.format}, expected a folder of safetensors files",
                where=each.url,
                hint=f"ckpt export {shell_word(each.url)} OUT writes one",
            )
        if each.source.listing.entry is not None:
            folder = each.url.rpartition("/")[0] or "."
            raise UsageError(f"{what} is a single file", where=each.url, hint=f"name its folder: {folder}")
        missing = each.manifest.info.get("missing_files")
        if missing:
            raise UsageError(f"{missing[0]} is missing", where=each.url, hint=f"ckpt verify {shell_word(each.url)}")
    if not isinstance(adapter.manifest.info.get("adapter"), dict):
        raise UsageError(
            "no adapter: there is no adapter_config.json", where=adapter.url, hint="name the folder that PEFT saved"
        )
    names = base.manifest.tensors.index
    doubled = next((fqn for fqn in adapter.manifest.tensors.fqns if fqn in names), None)
    if doubled is not None:
        raise UsageError(
            f"both have a tensor {doubled!r}",
            where=adapter.url,
            hint=f"ckpt edit {shell_word(adapter.url)} OUT --rename 'RE=TEXT' gives the adapter's other names",
        )


def _check_fit(base: Manifest, adapter: Manifest) -> str:
    """What was found of the adapter's tensors in the base, in words."""
    n_factors = n_saved = 0
    for row, fqn in enumerate(adapter.tensors.fqns):
        shape = adapter.tensors.shape_of(row)
        found = next(_places(base, fqn), None)
        if found is None:
            if any(spelling.adapter for spelling in spellings(fqn, {})):
                raise LayoutError(
                    f"{fqn!r} adapts a weight that {base.where} does not have",
                    where=adapter.where,
                    hint="the adapter is one of another model; ckpt inspect shows the names of both",
                )
            continue
        spelling, weight = found
        sizes = base.tensors.shape_of(weight)
        name = base.tensors.fqns[weight]
        if spelling.adapter in ("A", "B"):
            n_factors += 1
            own = max(shape[1:], default=1) if spelling.adapter == "A" else shape[0] if shape else 1
            if len(shape) == 2 and len(sizes) == 2 and own not in sizes:
                raise LayoutError(
                    f"{fqn!r} is {list(shape)} and adapts {name!r}, which is {list(sizes)}: no side of it is {own:,}",
                    where=adapter.where,
                    hint="the adapter is one of another model",
                )
        elif spelling.adapter is None:
            n_saved += 1
            if shape != sizes:
                raise LayoutError(
                    f"{fqn!r} is {list(shape)} in place of {name!r}, which is {list(sizes)}", where=adapter.where
                )
    if not n_factors + n_saved:
        raise LayoutError(f"none of its tensors adapts one of {base.where}", where=adapter.where)
    return f"{counted(n_factors, 'factor')} of weights and {counted(n_saved, 'weight')} in their place"


def _places(base: Manifest, fqn: str) -> Iterator[tuple[Spelling, int]]:
    """The base's weight that a tensor of the adapter speaks of, with how its name was read; the longest name first."""
    for spelling in spellings(fqn, {}):
        row = base.tensors.index.get(spelling.parameter)
        if row is not None:
            yield spelling, row
