"""Tensors that each rank saved under one name without a placement, put one behind another on request.

Nothing in the files says that they join like this: the caller does. Chunks keep their bytes and move in the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckpt_tool.errors import CoverageError, UsageError
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.manifest.model import KeyPath, Manifest, TensorMeta
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.manifest.tables import IntArray, TensorTable
from ckpt_tool.records import dataclass

__all__ = [
    "concatenate_ranks",
    "first_of_ranks",
    "fqn_without_rank",
    "names_of_ranks",
    "path_without_rank",
    "split_ranks",
]

_OF_RANK = re.compile(r"(.+)@rank(\d+)")


def names_of_ranks(fqns: Sequence[str]) -> dict[str, dict[int, str]]:
    """Names of the form ``name@rank3``, by name and rank.

    >>> names_of_ranks(["w@rank1", "w@rank0", "b"])
    {'w': {1: 'w@rank1', 0: 'w@rank0'}}
    """
    found: dict[str, dict[int, str]] = {}
    for fqn in fqns:
        match = _OF_RANK.fullmatch(fqn)
        if match:
            found.setdefault(match[1], {})[int(match[2])] = fqn
    return found


def fqn_without_rank(fqn: str) -> str:
    """The name of which ``fqn`` is one rank's.

    >>> fqn_without_rank("w@rank1")
    'w'
    """
    match = _OF_RANK.fullmatch(fqn)
    return match[1] if match else fqn


def path_without_rank(path: KeyPath) -> KeyPath:
    """The path of the tensor of which the one at ``path`` is one rank's."""
    last = fqn_without_rank(str(path[-1])) if path else ""
    return (*path[:-1], last) if path and last != str(path[-1]) else path


def split_ranks(manifest: Manifest, fqns: Collection[str]) -> Manifest:
    """``manifest`` with a tensor ``name@rank<r>`` for what each rank has of each of ``fqns``, where the tensor was.

    One that ranks have apart already stays so.
    """
    wanted = {*fqns}
    metas: list[TensorMeta] = []
    owner = manifest.chunks.tensor.copy()
    for row, meta in enumerate(manifest.tensors):
        chunks = manifest.chunks.rows_of(row)
        if meta.fqn not in wanted:
            owner[chunks] = len(metas)
            metas.append(meta)
            continue
        for chunk in chunks[np.argsort(manifest.chunks.rank[chunks], kind="stable")].tolist():
            label = f"@rank{int(manifest.chunks.rank[chunk])}"
            path = (*meta.path[:-1], f"{meta.path[-1]}{label}")
            owner[chunk] = len(metas)
            metas.append(replace(meta, fqn=f"{meta.fqn}{label}", path=path))
    tensors = TensorTable.from_records(metas)
    return manifest.replace(tensors=tensors, chunks=manifest.chunks.replace(tensor=owner))


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank holds: the row of its tensor, and its chunks."""

    rank: int
    tensor: int
    chunks: IntArray


def concatenate_ranks(manifest: Manifest, dims: Mapping[str, int]) -> Manifest:
    """``manifest`` with the tensors in ``dims`` (fqn to dimension) joined along that dimension, in order of rank.

    A tensor of which each rank has a copy by assumption (``info["replicated_by_assumption"]``) grows by as much as its
    ranks hold; tensors ``name@rank<r>`` become the tensor ``name``, where the first of them was.

    Raises:
        UsageError: no such dimension, or what the ranks hold does not fit together beside it.
        CoverageError: the rank of a part is unknown, or ranks are missing between others.
    """
    apart = names_of_ranks(manifest.tensors.fqns)
    shape, offsets = manifest.tensors.shape.copy(), manifest.chunks.offsets.copy()
    owner = manifest.chunks.tensor.copy()
    fqns, paths = list(manifest.tensors.fqns), list(manifest.tensors.paths or ((fqn,) for fqn in manifest.tensors.fqns))
    absorbed: set[int] = set()
    for fqn, dim in dims.items():
        parts = _parts(manifest, fqn, apart.get(fqn, {}))
        _check(manifest, fqn, dim, parts)
        first, at = parts[0].tensor, 0
        for part in parts:
            offsets[part.chunks, dim] += at
            owner[part.chunks] = first
            at += int(manifest.tensors.shape[part.tensor, dim])
        shape[first, dim] = at
        fqns[first], paths[first] = fqn, path_without_rank(paths[first])
        absorbed |= {part.tensor for part in parts if part.tensor != first}
    joined = manifest.replace(
        tensors=replace(manifest.tensors, fqns=tuple(fqns), shape=shape, paths=tuple(paths)),
        chunks=manifest.chunks.replace(tensor=owner, offsets=offsets),
        info={
            **manifest.info,
            **{
                key: [fqn for fqn in manifest.info.get(key, ()) if fqn not in dims]
                for key in ("replicated_by_assumption", "kept_apart")
            },
        },
    )
    return only_tensors(joined, [row for row in range(len(fqns)) if row not in absorbed])


def first_of_ranks(manifest: Manifest, fqns: Sequence[str]) -> Manifest:
    """``manifest`` with only the first rank's of tensors ``name@rank<r>``, called ``name``, for each of ``fqns``."""
    apart = names_of_ranks(manifest.tensors.fqns)
    names, paths = (
        list(manifest.tensors.fqns),
        list(manifest.tensors.paths or ((fqn,) for fqn in manifest.tensors.fqns)),
    )
    gone: set[int] = set()
    for fqn in fqns:
        first, *others = (manifest.tensor_id(name) for _, name in sorted(apart[fqn].items()))
        names[first], paths[first] = fqn, path_without_rank(paths[first])
        gone.update(others)
    info = {**manifest.info, "kept_apart": [fqn for fqn in manifest.info.get("kept_apart", ()) if fqn not in fqns]}
    tensors = replace(manifest.tensors, fqns=tuple(names), paths=tuple(paths))
    taken = manifest.replace(tensors=tensors, info=info)
    return only_tensors(taken, [row for row in range(len(names)) if row not in gone])


def _parts(manifest: Manifest, fqn: str, apart: Mapping[int, str]) -> list[_Part]:
    """What each rank has of a tensor, in order of rank."""
    rows_of, tensor_id = manifest.chunks.rows_of, manifest.tensor_id
    if apart:
        rows = {rank: tensor_id(name) for rank, name in sorted(apart.items())}
        parts = [_Part(rank, row, rows_of(row)) for rank, row in rows.items()]
    else:
        row = tensor_id(fqn)
        chunks = rows_of(row)
        ranks = manifest.chunks.rank[chunks]
        parts = [_Part(int(rank), row, chunks[ranks == rank]) for rank in distinct(ranks)]
    found = [part.rank for part in parts]
    if found != list(range(len(found))):
        raise CoverageError(
            f"{fqn!r} cannot be concatenated: it is there for ranks {found}, expected 0 to {max(found)} without a gap",
            where=manifest.where,
        )
    return parts


def _check(manifest: Manifest, fqn: str, dim: int, parts: Sequence[_Part]) -> None:
    tensors = manifest.tensors
    shapes = [tensors.shape_of(part.tensor) for part in parts]
    if not 0 <= dim < len(shapes[0]):
        raise UsageError(f"{fqn!r} has shape {list(shapes[0])}: there is no dimension {dim} to concatenate along")
    beside = {(*shape[:dim], -1, *shape[dim + 1 :]) for shape in shapes}
    kinds = {tensors.dtypes[part.tensor].name for part in parts}
    if len(beside) > 1 or len(kinds) > 1:
        held = ", ".join(f"{tensors.dtypes[p.tensor].name} {list(s)}" for p, s in zip(parts[:4], shapes, strict=False))
        raise UsageError(
            f"what ranks hold of {fqn!r} does not fit together along dimension {dim}: {held}",
            where=manifest.where,
            hint="take another dimension, or leave it out with --exclude",
        )
