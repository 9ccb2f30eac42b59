"""An open checkpoint is a lazy mapping from names to tensors: nothing is read before it is asked for."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import BadIndex
from ckpt_tool.formats.base import PartReader, Reader, Source
from ckpt_tool.formats.detect import detect
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.select import slice_box
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.plan.limits import PlanLimits
from ckpt_tool.sizes import counted
from ckpt_tool.storage.open import open_store
from ckpt_tool.storage.store import Listing, Store
from ckpt_tool.storage.urls import shown

__all__ = ["DEFAULT_MEMORY_BYTES", "Checkpoint", "TensorView", "open_checkpoint", "plan_limits"]

DEFAULT_MEMORY_BYTES = 1 << 30
_TILE_BYTES = 2 << 20  # fits the second-level caches; larger buffers are slower
_MAX_TILES = 100_000  # beyond that the plan itself costs more than slower buffers do
_UNIT_BYTES = 64 << 20
_MIN_UNIT_BYTES = 1 << 16
_MIN_UNITS = 16  # so that several processes have something to share


def plan_limits(
    memory_budget_bytes: int, n_workers: int, payload_nbytes: int = 0, *, tile_bytes: int = _TILE_BYTES
) -> PlanLimits:
    """Buffer sizes that keep ``n_workers`` workers within the budget.

    Tiles are of ``tile_bytes``, where that does not make too many of them. A worker holds a tile, a packed copy of it
    and a cast of it; a strided span besides when a tensor is stored oddly.
    """
    per_worker = memory_budget_bytes // max(n_workers, 1)
    tile_bytes = max(tile_bytes, payload_nbytes // _MAX_TILES)
    unit_bytes = max(_UNIT_BYTES, tile_bytes)
    if payload_nbytes:
        unit_bytes = max(min(unit_bytes, payload_nbytes // _MIN_UNITS), _MIN_UNIT_BYTES)
    return PlanLimits(
        max_tile_bytes=max(min(tile_bytes, per_worker // 8), 4096),
        max_odd_tile_bytes=max(per_worker // 6, 4096),
        unit_bytes=unit_bytes,
    )


class TensorView:
    """One tensor of a checkpoint; indexing it with numpy slices reads just those bytes.

    ``shape``, ``ndim``, ``size``, ``nbytes`` and ``len`` cost nothing; ``numpy()``, ``torch()`` and ``np.asarray`` read
    all of it.
    """

    def __init__(self, checkpoint: Checkpoint, fqn: str) -> None:
        self._checkpoint = checkpoint = checkpoint.part_of([fqn])
        meta = checkpoint.manifest.tensor(fqn)
        self.fqn: str = fqn
        self.dtype: DType = meta.dtype
        self.shape: tuple[int, ...] = meta.shape
        self.nbytes: int = meta.nbytes

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __len__(self) -> int:
        """Size of the first dimension."""
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        """Row after row; each is read when its turn comes."""
        return (self[row] for row in range(len(self)))

    def __bool__(self) -> bool:
        """True: there is such a tensor, whatever it holds."""
        return True

    def __repr__(self) -> str:
        """Name, type and shape."""
        return f"<TensorView {self.fqn} {self.dtype.name} {list(self.shape)}>"

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        """The elements at a basic index (whole numbers, slices, ``...``), as numpy would give them.

        Of a slice with a step, all from the first to the last element are read. bfloat16 and float8 come as ml_dtypes
        types, packed and opaque types as raw bytes (``V``).

        Raises:
            BadIndex: an index of another kind (lists, truth values, None), or one outside of the tensor.
        """
        box, rest = slice_box(index if isinstance(index, tuple) else (index,), self.shape, where=self.fqn)
        array = self._checkpoint.read([(self.fqn, box)])[0]
        if any(isinstance(one, slice) and one.step != 1 for one in rest):
            steps = tuple(one if isinstance(one, slice) else slice(None) for one in rest)
            array = np.ascontiguousarray(array[steps])
        return array.reshape([size for size, one in zip(array.shape, rest, strict=True) if isinstance(one, slice)])

    def numpy(self) -> npt.NDArray[Any]:
        """All elements."""
        return self[...]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:  # noqa: FBT001 - numpy's protocol
        """All elements, for ``np.asarray``; always a new array, so ``copy=False`` is an error as it is in numpy."""
        if copy is False:
            raise ValueError("a tensor of a checkpoint becomes an array by reading it, which is a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def torch(self) -> Any:
        """All elements as a ``torch.Tensor`` (needs torch)."""
        from ckpt_tool.frameworks.tensors import torch_tensor

        return torch_tensor(self.numpy(), self.dtype, self.shape)


class Checkpoint(Mapping[str, TensorView], AbstractContextManager["Checkpoint"]):
    """A checkpoint of any readable format; without a manifest, that is read when it is first asked for."""

    def __init__(
        self, url: str, source: Source, reader: Reader, manifest: Manifest | None, memory_budget_bytes: int
    ) -> None:
        self.url = shown(url)
        self._address = url
        self.source = source
        self.reader = reader
        self._manifest = manifest
        self._memory_budget_bytes = memory_budget_bytes
        self._store: Store | None = None

    @property
    def format(self) -> str:
        """Name of the format."""
        return self.manifest.format

    @property
    def manifest(self) -> Manifest:
        """Columns of everything known so far; chunks not asked for yet may be unresolved."""
        if self._manifest is None:
            self._manifest = self.reader.read(self.source).replace(url=self.url)
        return self._manifest

    def part_of(self, fqns: Collection[str]) -> Checkpoint:
        """These tensors alone, where an index tells their files and nobody has asked for the rest; else this one.

        It shares this one's files, and need not be closed.
        """
        if self._manifest is not None or not isinstance(self.reader, PartReader):
            return self
        manifest = self.reader.read_part(self.source, fqns)
        if manifest is None:
            return self
        manifest = manifest.replace(url=self.url)
        return Checkpoint(self._address, self.source, self.reader, manifest, self._memory_budget_bytes)

    @property
    def store(self) -> Store:
        """Reads the manifest's files, those inside compressed containers included."""
        if self._store is None:
            from ckpt_tool.storage.virtual.decode import open_files  # who only looks at metadata reads no payload

            self._store = open_files(self.source.store, self.manifest.files, self._memory_budget_bytes // 4)
        return self._store

    def resolve(self, fqns: Sequence[str] | None = None) -> Manifest:
        """The manifest with exact payload positions of the named tensors (all by default)."""
        chunks = self.manifest.chunks
        unresolved = (chunks.flags & ChunkFlag.UNRESOLVED) != 0
        if fqns is not None:
            wanted = np.zeros(len(self.manifest.tensors), dtype=bool)
            wanted[[self.manifest.tensor_id(fqn) for fqn in fqns]] = True
            unresolved &= wanted[chunks.tensor]
        rows = np.flatnonzero(unresolved)
        if len(rows):
            self._manifest = self.manifest.replace(chunks=self.reader.resolve(self.source, self.manifest, rows))
        return self.manifest

    def read(self, boxes: Sequence[tuple[str, Box]]) -> list[npt.NDArray[Any]]:
        """One array per (fqn, box in global coordinates), read together.

        Raises:
            NotFound: no such tensor.
            BadIndex: a box that is not inside of its tensor.
        """
        from ckpt_tool.engine.memory import read_boxes  # who only looks at metadata starts without an engine

        for fqn, box in boxes:
            shape = self.manifest.tensor(fqn).shape
            if box.ndim != len(shape) or any(
                at < 0 or at + size > whole for at, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
            ):
                raise BadIndex(f"box {box} is not inside of {list(shape)}", where=fqn)
        manifest = self.resolve(sorted({fqn for fqn, _ in boxes}))
        return read_boxes(manifest, self.store, boxes, limits=plan_limits(self._memory_budget_bytes, 1))

    def load_blobs(self, rows: Sequence[int] | None = None) -> tuple[Blob, ...]:
        """All objects that are not tensors, those at ``rows`` (all by default) with their inert values."""
        blobs = self.manifest.blobs
        wanted = [row for row in (range(len(blobs)) if rows is None else rows) if not blobs[row].is_loaded]
        if wanted:
            self._manifest = self.manifest.replace(blobs=self.reader.load_blobs(self.source, self.manifest, wanted))
        return self.manifest.blobs

    def objects(self) -> dict[str, Any]:
        """Inert values of everything that is not a tensor, by name."""
        return {blob.fqn: blob.value for blob in self.load_blobs()}

    def __getitem__(self, fqn: str) -> TensorView:
        """The tensor called ``fqn``; no request, but for a header where the manifest was not read yet.

        Raises:
            UnknownTensor: there is none, a ``KeyError`` too; the hint names the nearest ones.
        """
        return TensorView(self.part_of([fqn]), fqn)

    def __contains__(self, fqn: object) -> bool:
        """Whether there is such a tensor."""
        return isinstance(fqn, str) and fqn in self.part_of([fqn]).manifest.tensors.index

    def get(self, fqn: str, default: Any = None) -> Any:
        """The tensor called ``fqn``, or ``default``."""
        part = self.part_of([fqn])
        return TensorView(part, fqn) if fqn in part.manifest.tensors.index else default

    def __iter__(self) -> Iterator[str]:
        """Names, in the checkpoint's order."""
        return iter(self.manifest.tensors.fqns)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self.manifest.tensors)

    def __repr__(self) -> str:
        """URL, format and number of tensors, as far as they are known."""
        if self._manifest is None:
            return f"<Checkpoint {self.url} {self.reader.name}>"
        return f"<Checkpoint {self.url} {self.format}, {counted(len(self), 'tensor')}>"

    def __reduce__(self) -> tuple[Any, tuple[str, int]]:
        """A copy, also in another process, opens the checkpoint again."""
        return _opened_again, (self._address, self._memory_budget_bytes)

    def shown_as(self, manifest: Manifest) -> Checkpoint:
        """The same files under another manifest, of other names and boxes; it need not be closed."""
        return Checkpoint(self._address, self.source, self.reader, manifest, self._memory_budget_bytes)

    def reopened(self, store: Store, listing: Listing) -> Checkpoint:
        """The same files, read through ``store``, with all that is known of them by now."""
        source = Source(store, listing)
        return Checkpoint(self._address, source, self.reader, self.manifest, self._memory_budget_bytes)

    def close(self) -> None:
        """Release file handles; the manifest stays usable."""
        if self._store is not None:
            self._store.close()
        self.source.store.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def open_checkpoint(url: str | os.PathLike[str], *, memory_budget_bytes: int = DEFAULT_MEMORY_BYTES) -> Checkpoint:
    """Open a checkpoint at a path or URL: its metadata is read, no tensor payload.

    Far away, where an index names the files of tensors, headers are left until somebody asks for a tensor, which needs
    one, or for more.

    Raises:
        NotFound: nothing there, or nothing that reads as a checkpoint; the hint says what to type instead.
        FormatError: a file contradicts its format.
    """
    store, listing = open_store(url)
    source = Source(store, listing)
    try:
        reader = detect(source)
        is_far = store.cost.read_ahead_bytes > 0
        waits = is_far and isinstance(reader, PartReader) and reader.read_part(source, ()) is not None
        manifest = None if waits else reader.read(source).replace(url=shown(os.fspath(url)))
        return Checkpoint(os.fspath(url), source, reader, manifest, memory_budget_bytes)
    except BaseException:
        store.close()
        raise


def _opened_again(url: str, memory_budget_bytes: int) -> Checkpoint:
    return open_checkpoint(url, memory_budget_bytes=memory_budget_bytes)
