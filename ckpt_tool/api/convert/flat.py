"""A table of flat parameters says what FSDP1's vectors hold, for checkpoints that do not record it.

It is TOML, or the same in JSON::

    [[flat]]
    name = "layers.*._flat_param"  # as ckpt inspect lists it, or without the keys in front; a glob or re: pattern
    parameters = [["weight", [64, 32]], ["bias", [64]]]  # in order; names count from the module that has the vector

    [[flat]]
    name = "_flat_param"
    parameters = [["norm.bias", [5], 0], ["norm.weight", [5], 8]]  # where each begins, with padding between them

    [[flat]]
    name = "head.weight"  # one parameter, which ranks hold parts of
    shape = [16, 8]

FSDP1 knows all of it as ``_fqns``, ``_shapes`` and ``_numels_with_padding`` of each ``FlatParameter``
(torch/distributed/fsdp/_flat_param.py).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

from ckpt_tool.api.arguments import read_option_file
from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.rules import check_keys, parsed_rules
from ckpt_tool.manifest.concatenate import names_of_ranks
from ckpt_tool.manifest.flat_optimizers import flat_optimizers, unflatten_all
from ckpt_tool.manifest.flat_parameters import FlatParameter, Segment, Vector
from ckpt_tool.manifest.model import KeyPath, Manifest
from ckpt_tool.manifest.select import matching
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, some_of

__all__ = ["FlatEntry", "load_flat_table", "with_flat_table"]

_OF_RANKS = frozenset({"replicated_by_assumption", "kept_apart"})
_KEYS = {"name", "parameters", "shape"}


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """One entry of a table."""

    pattern: str
    parameters: tuple[tuple[str, tuple[int, ...], int], ...]
    """Names, relative to the module of the vector (empty for the vector's own), shapes, and first elements, rising."""

    @property
    def is_dense(self) -> bool:
        """Whether nothing lies between the parameters; FSDP1 pads a vector's end only where it pads these."""
        ends = accumulate(prod(shape) for _, shape, _ in self.parameters)
        return [start for _, _, start in self.parameters] == [0, *ends][:-1]

    def vector(self, path: KeyPath) -> Vector:
        """What the vector at ``path`` holds."""
        module, _, _ = str(path[-1]).rpartition(".")
        segments = []
        for name, shape, start in self.parameters:
            fqn = str(path[-1]) if not name else f"{module}.{name}" if module else name
            segments.append(Segment(fqn, shape, start))
        return Vector(FlatParameter(max((s.stop for s in segments), default=0), tuple(segments)), path[:-1])


def load_flat_table(text: str, source: str) -> tuple[FlatEntry, ...]:
    """The entries of a table; ``source`` is named in errors: a path, usually.

    Raises:
        LayoutError: neither TOML nor JSON, or an entry that is not as described.
    """
    document = parsed_rules(text, source)
    check_keys(document, {"flat"}, source)
    return tuple(_entry(table, f"{source}: flat {number}") for number, table in enumerate(document.get("flat", ()), 1))


def _entry(table: Mapping[str, Any], where: str) -> FlatEntry:
    check_keys(table, _KEYS, where)
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise LayoutError("an entry needs name, a pattern over names of vectors", where=where)
    if ("shape" in table) == ("parameters" in table):
        raise LayoutError("an entry has either parameters or a shape", where=where)
    if "shape" in table:
        return FlatEntry(name, (("", _shape(table["shape"], where), 0),))
    listed = table["parameters"]
    if not isinstance(listed, list) or not all(map(_is_parameter, listed)):
        hint = "where there are gaps between them, a third item is the element at which each begins"
        said = 'parameters are a list of names with shapes: [["weight", [64, 32]], ...]'
        raise LayoutError(said, where=where, hint=hint)
    parameters, end = [], 0
    for fqn, sizes, *given in listed:
        shape, start = _shape(sizes, where), given[0] if given else end
        if start < end:
            raise LayoutError(f"{fqn!r} begins at {start}, before the end of the one in front, {end}", where=where)
        parameters.append((fqn, shape, start))
        end = start + prod(shape)
    return FlatEntry(name, tuple(parameters))


def _is_parameter(value: object) -> bool:
    """Whether it is a name, something that may be a shape, and perhaps a first element."""
    if not isinstance(value, list) or len(value) not in (2, 3) or not isinstance(value[0], str) or not value[0]:
        return False
    return len(value) == 2 or (type(value[2]) is int and value[2] >= 0)


def _shape(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < 1 << 62 for size in value):
        raise LayoutError(f"a shape is a list of sizes, got {value!r}", where=where)
    return tuple(value)


def with_flat_table(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint with parameters in place of the vectors that a table's file describes.

    Raises:
        UsageError: the file cannot be read.
        LayoutError: it is no table, fits no tensor, or describes more or less than a vector holds.
        CoverageError: ranks of a vector are missing.
    """
    source = os.fspath(path)
    manifest = checkpoint.manifest
    vectors = _vectors(manifest, load_flat_table(read_option_file(path, "flat parameters"), source), source)
    optimizers = flat_optimizers(manifest, list(vectors.values()))
    ranks = names_of_ranks(manifest.tensors.fqns)
    needed = [*vectors, *(fqn for optimizer in optimizers for fqn in optimizer.vectors)]
    resolved = checkpoint.resolve([name for fqn in needed for name in ranks.get(fqn, {0: fqn}).values()])
    names = {".".join(map(str, (*v.before, s.fqn))) for v in vectors.values() for s in v.flat.segments} - {*vectors}
    pieces = {fqn for fqn in (*resolved.tensors.fqns, *ranks) if fqn in names}
    cut = unflatten_all(_without(resolved, pieces), vectors, optimizers)
    n_held = sum(len(vector.flat.segments) for vector in vectors.values())
    said = f"{counted(len(vectors), 'flat parameter', 'are')} {counted(n_held, 'parameter')}, as {source} says"
    if pieces:
        said += f"; what ranks have of {some_of(sorted(pieces))} by itself is left out, which is part of them"
    notes = (said, *(known for known in cut.notes if "cannot unflatten" not in known))
    return checkpoint.shown_as(cut.replace(notes=notes))


def _without(manifest: Manifest, fqns: Collection[str]) -> Manifest:
    """``manifest`` without tensors of these names, nor what single ranks have of them.

    With ``use_orig_params=True`` FSDP1 saves each rank's views of a vector beside it.
    """
    of_ranks = names_of_ranks(manifest.tensors.fqns)
    gone = {*fqns, *(name for fqn in fqns for name in of_ranks.get(fqn, {}).values())}
    kept = [row for row, fqn in enumerate(manifest.tensors.fqns) if fqn not in gone]
    info = {
        key: [fqn for fqn in value if fqn not in fqns] if key in _OF_RANKS else value
        for key, value in manifest.info.items()
    }
    return only_tensors(manifest, kept).replace(info=info)


def _vectors(manifest: Manifest, table: Sequence[FlatEntry], source: str) -> dict[str, Vector]:
    """What is in each tensor that the table describes, in the order of the checkpoint, by name without a rank.

    The last entry that fits counts.
    """
    held = dict(_held(manifest))
    names = list(held)
    last = [str(path[-1]) for path, *_ in held.values()]
    found: dict[str, Vector] = {}
    for number, entry in enumerate(table, 1):
        where = f"{source}: flat {number}"
        fits = matching(entry.pattern, names) or matching(entry.pattern, last)
        if not fits:
            flat = manifest.info.get("flat_parameters", ())
            hint = f"flat parameters here: {some_of(flat)}" if flat else "ckpt inspect lists the tensors"
            raise LayoutError(f"no tensor is called {entry.pattern!r}", where=where, hint=hint)
        for row in fits:
            path, shape, is_placed, n_parts = held[names[row]]
            vector = entry.vector(path)
            _check(names[row], vector.flat.numel, shape, 1 if is_placed and entry.is_dense else n_parts, where)
            found[names[row]] = vector
    return {name: found[name] for name in names if name in found}


def _held(manifest: Manifest) -> Iterator[tuple[str, tuple[KeyPath, tuple[int, ...], bool, int]]]:
    """Each tensor, ranks' parts as one: path, shape of all parts together, whether files place them, their number."""
    assumed = frozenset(manifest.info.get("replicated_by_assumption", ()))
    ranks = names_of_ranks(manifest.tensors.fqns)
    of_ranks = {name for names in ranks.values() for name in names.values()}
    for row, fqn in enumerate(manifest.tensors.fqns):
        if fqn in of_ranks:
            continue
        shape = manifest.tensors.shape_of(row)
        n_chunks = len(manifest.chunks.rows_of(row))
        if fqn in assumed and len(shape) == 1:
            shape = (shape[0] * n_chunks,)
        yield fqn, (manifest.tensors.record(row).path, shape, fqn not in assumed, n_chunks)
    for fqn, names in ranks.items():
        metas = [manifest.tensor(name) for name in names.values()]
        path = metas[0].path
        shape = (sum(meta.numel for meta in metas),) if all(len(meta.shape) == 1 for meta in metas) else metas[0].shape
        yield fqn, ((*path[:-1], str(path[-1]).rpartition("@rank")[0]), shape, False, len(metas))


def _check(fqn: str, numel: int, shape: tuple[int, ...], n_parts: int, where: str) -> None:
    """The parameters fill the vector but for what rounds it up to ``n_parts`` equal ones."""
    if len(shape) != 1:
        raise LayoutError(f"{fqn!r} has shape {list(shape)}, a flat parameter has one dimension", where=where)
    if not numel <= shape[0] < numel + max(n_parts, 1):
        raise LayoutError(
            f"the parameters have {counted(numel, 'element')}, {fqn!r} has {shape[0]:,}",
            where=where,
            hint="parameters are listed in the order of the module, all of them, with what FSDP1 pads between them",
        )
