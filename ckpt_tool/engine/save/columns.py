"""What one rank holds, as columns that travel once: names and shapes of its tensors, boxes, names of its objects.

A held state knows nothing of memory; rows are boxes in the order of the rank's state.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ckpt_tool.dtypes import DType, dtype
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.records import dataclass

__all__ = ["HeldState", "Names", "fqn_of"]


def fqn_of(path: KeyPath) -> str:
    """Keys joined by dots, as DCP names flattened entries."""
    return ".".join(map(str, path))


@dataclass(frozen=True, eq=False)
class Names:
    """Tensors and objects by name; the same on all ranks of most jobs, so that it travels once for all of them."""

    paths: tuple[KeyPath, ...]
    """One per tensor."""
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Global shapes."""
    objects: tuple[KeyPath, ...]

    def encoded(self) -> bytes:
        """As bytes, equal for equal names."""
        document = [self.paths, self.dtypes, self.shapes, self.objects]
        return zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 1)

    @classmethod
    def decoded(cls, data: bytes) -> Names:
        """What ``encoded`` gave."""
        paths, dtypes, shapes, objects = json.loads(zlib.decompress(data))
        return cls(tuple(map(tuple, paths)), tuple(dtypes), tuple(map(tuple, shapes)), tuple(map(tuple, objects)))

    @cached_property
    def width(self) -> int:
        """Most dimensions of any tensor."""
        return max(map(len, self.shapes), default=0)

    @cached_property
    def kinds(self) -> tuple[DType, ...]:
        """Element types."""
        return tuple(map(dtype, self.dtypes))


@dataclass(frozen=True, eq=False)
class HeldState:
    """What one rank holds."""

    names: Names
    tensor: IntArray  # int64[n], row of names.paths
    offsets: IntArray  # int64[n, D], global coordinates
    sizes: IntArray  # int64[n, D]

    def __len__(self) -> int:
        """Number of boxes."""
        return len(self.tensor)

    @cached_property
    def nbytes(self) -> IntArray:
        """int64[n]: packed bytes of each box."""
        bits = np.array([kind.bits for kind in self.names.kinds], dtype=np.int64)
        volume: IntArray = np.prod(self.sizes, axis=1, dtype=np.int64)
        return volume * bits[self.tensor] // 8 if len(self) else volume

    def take(self, rows: IntArray) -> HeldState:
        """Some of the boxes."""
        return HeldState(self.names, self.tensor[rows], self.offsets[rows], self.sizes[rows])

    def encoded(self) -> bytes:
        """The boxes as bytes; names travel by themselves."""
        rows = np.concatenate([self.tensor[:, None], self.offsets, self.sizes], axis=1)
        return np.ascontiguousarray(rows, dtype="<i8").tobytes()

    @classmethod
    def decoded(cls, names: Names, data: bytes) -> HeldState:
        """What ``encoded`` gave."""
        width = names.width
        rows = np.frombuffer(data, dtype="<i8").reshape(-1, 1 + 2 * width)
        return cls(names, rows[:, 0], rows[:, 1 : 1 + width], rows[:, 1 + width :])

    @classmethod
    def of(cls, names: Names, tensor: Sequence[int], boxes: Sequence[tuple[KeyPath, KeyPath]]) -> HeldState:
        """Columns of ``boxes``, (offsets, sizes) of the tensors in ``tensor``."""
        width = names.width
        n = len(tensor)
        offsets: IntArray = np.zeros((n, width), dtype=np.int64)
        sizes: IntArray = np.ones((n, width), dtype=np.int64)
        for row, (start, extent) in enumerate(boxes):
            offsets[row, : len(start)] = start
            sizes[row, : len(extent)] = extent
        return cls(names, np.array(tensor, dtype=np.int64), offsets, sizes)
