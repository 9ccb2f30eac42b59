"""Columns of a manifest under construction: tensors by name, files by path, chunks as arrays appended at once.

Knows no format. Readers whose metadata lists boxes as arrays add many chunks in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import FormatError
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.model import FileEntry, KeyPath, TensorMeta
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable
from ckpt_tool.records import dataclass, field

__all__ = ["Columns"]

_FIELDS = ("tensor", "file", "offset", "length", "rank", "flags")


@dataclass(slots=True)
class Columns:
    """Ids that the methods return are rows of the finished tables."""

    metas: list[TensorMeta] = field(default_factory=list)
    entries: list[FileEntry] = field(default_factory=list)
    _tensors: dict[str, int] = field(default_factory=dict)
    _files: dict[str, int] = field(default_factory=dict)
    _parts: list[dict[str, npt.NDArray[Any]]] = field(default_factory=list)

    def __contains__(self, fqn: object) -> bool:
        """Whether a tensor of that name was added."""
        return fqn in self._tensors

    def add_tensor(
        self, fqn: str, dtype: DType, shape: Sequence[int], *, path: KeyPath = (), section: str | None = None
    ) -> int:
        """Id of a tensor, new or known; ``section`` None to tell it from the names.

        Raises:
            FormatError: it is known with another dtype or shape.
        """
        known = self._tensors.setdefault(fqn, len(self.metas))
        if known < len(self.metas):
            meta = self.metas[known]
            if (meta.dtype, meta.shape) != (dtype, tuple(shape)):
                raise FormatError(
                    f"{dtype.name}{list(shape)} in one place, {meta.dtype.name}{list(meta.shape)} in another", where=fqn
                )
            return known
        self.metas.append(TensorMeta(fqn, dtype, tuple(shape), section or section_of(path, fqn), path or (fqn,)))
        return known

    def add_file(self, entry: FileEntry) -> int:
        """Id of a file, new or known by its path."""
        row = self._files.setdefault(entry.path, len(self.entries))
        if row == len(self.entries):
            self.entries.append(entry)
        return row

    def add_chunks(  # noqa: PLR0913 - the columns are what a table is
        self,
        tensor: int,
        *,
        offsets: npt.ArrayLike,
        sizes: npt.ArrayLike,
        file: npt.ArrayLike,
        offset: npt.ArrayLike,
        length: npt.ArrayLike,
        rank: npt.ArrayLike = -1,
        flags: npt.ArrayLike = 0,
        strides: npt.ArrayLike | None = None,
    ) -> None:
        """Boxes of one tensor; arguments as in ``ChunkTable``, boxes ``[m, ndim]``, the rest ``[m]`` or one value.

        Boxes without elements are left out. ``strides`` None for packed row-major ones.
        """
        ndim = len(self.metas[tensor].shape)
        box_sizes = np.asarray(sizes, dtype=np.int64).reshape(-1, ndim) if ndim else np.zeros((_rows(offset), 0), int)
        n = len(box_sizes)
        part: dict[str, npt.NDArray[Any]] = {
            "offsets": np.asarray(offsets, dtype=np.int64).reshape(n, ndim),
            "sizes": box_sizes,
        }
        for name, values in zip(_FIELDS, (tensor, file, offset, length, rank, flags), strict=True):
            part[name] = np.broadcast_to(np.asarray(values, dtype=np.int64), (n,))
        if strides is not None:
            part["strides"] = np.asarray(strides, dtype=np.int64).reshape(n, ndim)
        is_full = box_sizes.all(axis=1)
        self._parts.append(part if is_full.all() else {name: column[is_full] for name, column in part.items()})

    def add_whole(self, tensor: int, file: int, offset: int, *, flags: int = 0, rank: int = -1) -> None:
        """The whole tensor, packed in row-major order, from ``offset``."""
        meta = self.metas[tensor]
        self.add_chunks(
            tensor,
            offsets=[(0,) * len(meta.shape)],
            sizes=[meta.shape],
            file=[file],
            offset=[offset],
            length=[meta.nbytes],
            rank=rank,
            flags=flags,
        )

    def tables(self) -> tuple[TensorTable, ChunkTable, FileTable]:
        """The finished columns."""
        tensors = TensorTable.from_records(self.metas)
        width = tensors.shape.shape[1]
        parts = self._parts
        columns: dict[str, Any] = {
            name: np.concatenate([part[name] for part in parts]) if parts else [] for name in _FIELDS
        }
        columns["offsets"] = _stacked([part["offsets"] for part in parts], width, 0)
        columns["sizes"] = _stacked([part["sizes"] for part in parts], width, 1)
        if any("strides" in part for part in parts):
            found = [part.get("strides", contiguous_strides_columns(part["sizes"])) for part in parts]
            columns["strides"] = _stacked(found, width, 1)
        return tensors, ChunkTable.from_columns(**columns), FileTable(tuple(self.entries))


def _rows(values: npt.ArrayLike) -> int:
    return int(np.asarray(values).size)


def _stacked(parts: Sequence[npt.NDArray[Any]], width: int, fill: int) -> npt.NDArray[Any]:
    """The rows of all parts, filled behind to ``width``."""
    rows = np.full((sum(len(part) for part in parts), width), fill, dtype=np.int64)
    at = 0
    for part in parts:
        rows[at : at + len(part), : part.shape[1]] = part
        at += len(part)
    return rows
