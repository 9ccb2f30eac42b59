"""An inspection is what a checkpoint's metadata says of it, selected and added up; no tensor payload is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_tool.api.checkpoint import Checkpoint, open_checkpoint
from ckpt_tool.api.megatron_run import run_facts
from ckpt_tool.geometry.columns import distinct, one_of_each
from ckpt_tool.manifest.codec import to_json
from ckpt_tool.manifest.model import Blob, Manifest, MeshInfo
from ckpt_tool.manifest.optimizer import OptimizerView, optimizer_views
from ckpt_tool.manifest.select import select
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.manifest.tables import SECTIONS, IntArray
from ckpt_tool.records import dataclass
from ckpt_tool.storage.urls import is_local, local_path

__all__ = [
    "FileRow",
    "Inspection",
    "RankRow",
    "SectionTotal",
    "TensorRow",
    "inspect",
    "save_parquet",
]

_STEP_KEYS = frozenset({"step", "global_step", "iteration", "iter", "train_step", "global_steps"})


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor as it is listed."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    section: str
    n_chunks: int
    """Stored boxes, replicas counted."""
    parts: tuple[int, ...]
    """Number of different offsets along each dimension: (4, 1) is four bands of rows."""
    n_copies: int
    """How often each box is stored; 0 where boxes differ in that, or none is stored."""


@dataclass(frozen=True, slots=True)
class SectionTotal:
    """Tensors of one section and element type."""

    section: str
    dtype: str
    n_tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileRow:
    """One file and what lies in it."""

    path: str
    nbytes: int
    """Size; -1 where unknown."""
    n_chunks: int
    n_tensors: int
    payload_nbytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank and what it wrote; rank -1 stands for chunks whose writer the format does not tell."""

    rank: int
    n_chunks: int
    n_tensors: int
    payload_nbytes: int
    n_files: int


@dataclass(frozen=True)
class Inspection:
    """A checkpoint's facts, and the columns of the tensors that were asked for."""

    url: str
    manifest: Manifest
    """Only the selected tensors; chunks are exact when shards were asked for."""
    n_tensors_in_all: int
    step: int | None
    world_size: int | None
    has_shards: bool
    """Whether exact positions of chunks were asked for."""

    @property
    def format(self) -> str:
        """Name of the format."""
        return self.manifest.format

    @property
    def mesh(self) -> MeshInfo | None:
        """The mesh that wrote it, as far as the files tell."""
        return self.manifest.mesh

    @property
    def run_facts(self) -> list[tuple[str, str]]:
        """Label and text of what a checkpoint of Megatron tells of its run; none for others."""
        return run_facts(self.manifest)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know."""
        return self.manifest.notes

    @property
    def objects(self) -> tuple[Blob, ...]:
        """Everything that is not a tensor."""
        return self.manifest.blobs

    @cached_property
    def stored_nbytes(self) -> int:
        """Bytes of all stored boxes, replicas counted."""
        return int(self._chunk_nbytes.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, each counted once."""
        return int(self.manifest.tensors.nbytes.sum())

    @cached_property
    def optimizers(self) -> tuple[OptimizerView, ...]:
        """Optimizers in one normal form; hyperparameters are there when objects were asked for."""
        return optimizer_views(self.manifest, with_stateless=True)

    @cached_property
    def totals(self) -> tuple[SectionTotal, ...]:
        """Number and bytes of tensors by section and element type; sections in order, larger types first."""
        added: dict[tuple[int, str], list[int]] = {}
        tensors = self.manifest.tensors
        for section, dtype, nbytes in zip(
            tensors.section.tolist(), tensors.dtypes, tensors.nbytes.tolist(), strict=True
        ):
            entry = added.setdefault((section, dtype.name), [0, 0])
            entry[0] += 1
            entry[1] += nbytes
        order = sorted(added.items(), key=lambda item: (item[0][0], -item[1][1], item[0][1]))
        return tuple(SectionTotal(SECTIONS[section], dtype, *counts) for (section, dtype), counts in order)

    @cached_property
    def rows(self) -> tuple[TensorRow, ...]:
        """The tensors, in the checkpoint's order."""
        tensors = self.manifest.tensors
        n_chunks = np.bincount(self.manifest.chunks.tensor, minlength=len(tensors)).tolist()
        parts, n_copies = self._parts()
        return tuple(
            TensorRow(
                fqn, tensors.dtypes[at].name, tensors.shapes[at], nbytes, SECTIONS[section], n_chunks[at],
                tuple(parts[at, : tensors.ndim[at]].tolist()), n_copies[at],
            )
            for at, (fqn, nbytes, section) in enumerate(
                zip(tensors.fqns, tensors.nbytes.tolist(), tensors.section.tolist(), strict=True)
            )
        )  # fmt: skip

    @cached_property
    def files(self) -> tuple[FileRow, ...]:
        """Files that hold chunks or objects, in the manifest's order."""
        chunks = self.manifest.chunks
        return tuple(
            FileRow(
                entry.path,
                entry.nbytes,
                len(rows),
                len(distinct(chunks.tensor[rows])),
                int(self._chunk_nbytes[rows].sum()),
                tuple(rank for rank in distinct(chunks.rank[rows]).tolist() if rank >= 0),
            )
            for entry, rows in zip(self.manifest.files, _groups(chunks.file, len(self.manifest.files)), strict=True)
        )

    @cached_property
    def ranks(self) -> tuple[RankRow, ...]:
        """Ranks that wrote chunks, and those up to the world size that wrote none."""
        chunks = self.manifest.chunks
        n_ranks = max(int(chunks.rank.max(initial=-1)) + 1, self.world_size or 0)
        found = _groups(chunks.rank + 1, n_ranks + 1)
        first = 0 if len(found[0]) else 1
        return tuple(
            RankRow(
                at - 1,
                len(rows),
                len(distinct(chunks.tensor[rows])),
                int(self._chunk_nbytes[rows].sum()),
                len(distinct(chunks.file[rows])),
            )
            for at, rows in enumerate(found)
            if at >= first
        )

    @cached_property
    def _chunk_nbytes(self) -> IntArray:
        chunks = self.manifest.chunks
        nbytes: IntArray = (chunks.volume * self.manifest.tensors.bits[chunks.tensor] + 7) // 8
        return nbytes

    def _parts(self) -> tuple[IntArray, list[int]]:
        """int64[n_tensors, D] different offsets along each dimension of boxes that hold something; copies of a box."""
        chunks, n = self.manifest.chunks, len(self.manifest.tensors)
        full = np.flatnonzero(chunks.volume > 0)
        parts: IntArray = np.ones_like(self.manifest.tensors.shape)
        tensor = chunks.tensor[full].astype(np.int64)
        for dim in range(min(parts.shape[1], chunks.offsets.shape[1])):  # a table without chunks has no dimensions
            rows = one_of_each(tensor, chunks.offsets[full, dim])
            parts[:, dim] = np.maximum(np.bincount(tensor[rows], minlength=n), 1)
        boxes = np.concatenate([tensor[:, None], chunks.offsets[full], chunks.sizes[full]], axis=1)
        places, counts = np.unique(boxes, axis=0, return_counts=True)
        least, most = np.full(n, np.iinfo(np.int64).max), np.zeros(n, dtype=np.int64)
        np.minimum.at(least, places[:, 0], counts)
        np.maximum.at(most, places[:, 0], counts)
        return parts, np.where(least == most, most, 0).tolist()

    def to_json(self) -> dict[str, Any]:
        """The inspection as a JSON-able document: a manifest (``manifest.codec``) with more keys.

        Schema ``ckpt-tool/manifest/1``, and besides ``format root mesh info notes tensors files blobs chunks?``::

            url            where it was opened
            step           number or null
            world_size     number of ranks, or null
            nbytes         bytes of the listed tensors, each counted once
            stored_nbytes  bytes of their boxes, replicas counted
            totals         [{section, dtype, n_tensors, nbytes}]
            by_file        [{path, nbytes, n_chunks, n_tensors, payload_nbytes, ranks}]
            by_rank        [{rank, n_chunks, n_tensors, payload_nbytes, n_files}], rank -1 for unknown

        ``chunks`` are there when shards were asked for. When objects were, ``blobs`` have a ``value`` or, where an
        object holds stand-ins of classes that JSON cannot say, a ``text``.
        """
        document = to_json(self.manifest, shards=self.has_shards)
        for found, blob in zip(document["blobs"], self.objects, strict=True):
            if blob.is_loaded and "value" not in found:
                found["text"] = repr(blob.value)
        return {
            **document,
            "url": self.url,
            "step": self.step,
            "world_size": self.world_size,
            "nbytes": self.nbytes,
            "stored_nbytes": self.stored_nbytes,
            "totals": [asdict(row) for row in self.totals],
            "by_file": [asdict(row) for row in self.files],
            "by_rank": [asdict(row) for row in self.ranks],
        }


def inspect(
    checkpoint: Checkpoint | str | os.PathLike[str],
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    section: str | None = None,
    shards: bool = False,
    objects: bool = False,
) -> Inspection:
    """What the checkpoint's metadata says.

    Args:
        checkpoint: an open checkpoint (it stays open), or where one is.
        include: globs or ``re:`` patterns of tensors to list, all when empty.
        exclude: globs or ``re:`` patterns of tensors to leave out.
        section: only ``model``, ``optimizer`` or ``other``.
        shards: find the exact place of each chunk, which costs some formats a request per chunk.
        objects: read the values of objects that are not tensors.

    Raises:
        NotFound: no checkpoint, or no tensor matches.
        FormatError: a file contradicts its format.
    """
    opened = nullcontext(checkpoint) if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    with opened as found:
        everything = found.manifest
        rows = list(range(len(everything.tensors)))
        if include or exclude or section is not None:
            sections = () if section is None else (section,)
            rows = select(everything, include=include, exclude=exclude, sections=sections).tolist()
        if shards:
            everything = found.resolve([everything.tensors.fqns[row] for row in rows])
        step = _step(found)
        if objects:
            everything = everything.replace(blobs=found.load_blobs())
        stated = everything.info.get("world_size")
        return Inspection(
            url=found.url,
            manifest=only_tensors(everything, rows),
            n_tensors_in_all=len(everything.tensors),
            step=step,
            world_size=stated if isinstance(stated, int) else _writers(everything),
            has_shards=shards,
        )


def _groups(column: np.ndarray[Any, Any], n: int) -> list[IntArray]:
    """Rows of each value ``0 ... n - 1`` of a column."""
    order = np.argsort(column, kind="stable")
    bounds = np.searchsorted(column[order], np.arange(n + 1))
    return [order[low:high] for low, high in pairwise(bounds.tolist())]


def _writers(manifest: Manifest) -> int | None:
    """Number of ranks by the highest that wrote something; None where the format does not tell."""
    highest = int(manifest.chunks.rank.max(initial=-1))
    return None if highest < 0 else highest + 1


def _step(checkpoint: Checkpoint) -> int | None:
    """The training step, as the format says, or an object or a number called so does; one request at most."""
    stated = checkpoint.manifest.info.get("step")
    if isinstance(stated, int):
        return stated
    candidates: list[tuple[int, int]] = []
    for row, blob in enumerate(checkpoint.manifest.blobs):
        keys = _keys(blob.path, blob.fqn)
        if keys[-1] in _STEP_KEYS and not keys[0].startswith("optim"):
            candidates.append((len(keys), row))
    if candidates:
        row = min(candidates)[1]
        found = _whole(checkpoint.load_blobs([row])[row].value)
        if found is not None:
            return found
    numbers = [
        meta.fqn
        for meta in checkpoint.manifest.tensors
        if meta.section == "other" and meta.numel == 1 and _keys(meta.path, meta.fqn)[-1] in _STEP_KEYS
    ]
    return _whole(checkpoint[numbers[0]].numpy().reshape(-1)[0]) if numbers else None


def _keys(path: tuple[str | int, ...], fqn: str) -> list[str]:
    return [str(key) for key in path] if len(path) > 1 else fqn.split(".")


def _whole(value: Any) -> int | None:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return int(value) if is_number and float(value).is_integer() else None


def save_parquet(found: Inspection, path: str | os.PathLike[str]) -> None:
    """Write the listed boxes as a Parquet file, a row each; ``manifest.arrow`` documents and reads it.

    Raises:
        StorageError: it cannot be written.
        UsageError: a file of that name is here, and it is no table.
    """
    from ckpt_tool.api.manifest_file import check_replaceable  # few calls write a file
    from ckpt_tool.manifest.arrow import to_parquet
    from ckpt_tool.storage.side_file import put_side_file, unwritable

    mark, what = b"PAR1", "Parquet file"
    if not is_local(path):
        put_side_file(os.fspath(path), to_parquet(found.manifest), mark=mark, what=what)
        return
    check_replaceable(path, mark, what)
    path = local_path(path)
    try:
        Path(path).write_bytes(to_parquet(found.manifest))
    except OSError as error:
        raise unwritable(error, path) from error
