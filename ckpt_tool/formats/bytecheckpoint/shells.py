"""A shell is a tensor without its bytes: the pickle that says type, shape and strides of one stored item.

ByteCheckpoint stores of each tensor the whole storage as it lies in memory, and keeps the shell in ``.metadata``
(``utilities/serialization.py::_serialize_tensor``, 0.0.2). So every element's place is known without a further read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable, TensorTable, pad_shapes
from ckpt_tool.sizes import counted

__all__ = ["place_chunks"]

Shells = dict[tuple[str, tuple[int, ...]], bytes]


def place_chunks(tensors: TensorTable, chunks: ChunkTable, recorded: object, where: str) -> ChunkTable:
    """The chunks, which name stored items, with the exact place of their elements.

    Args:
        tensors: their tensors.
        chunks: unresolved.
        recorded: ``all_tensor_metadata``: a shell by index.
        where: the metadata file, for messages.

    Raises:
        FormatError: a chunk has no shell, or one that contradicts the chunk or the length of its item.
        Unsupported: a shell of something else than a plain strided tensor.
    """
    shells = _shells(recorded, where)
    known: dict[bytes, TensorRef] = {}
    offset, length = chunks.offset.copy(), chunks.length.copy()
    flags = np.zeros(len(chunks), dtype=np.uint8)
    strides: dict[int, tuple[int, ...]] = {}
    columns = (chunks.tensor.tolist(), chunks.offsets.tolist(), chunks.sizes.tolist(), chunks.length.tolist())
    ndim = tensors.ndim.tolist()
    for row, (number, starts, extent, nbytes) in enumerate(zip(*columns, strict=True)):
        fqn, width = tensors.fqns[number], ndim[number]
        shell = shells.get((fqn, tuple(starts[:width])))
        if shell is None:
            raise FormatError(f"the chunk at {starts[:width]} of {fqn!r} has no tensor metadata", where=where)
        tensor = known.get(shell)
        if tensor is None:
            tensor = known[shell] = _tensor(shell, f"{where}: {fqn}")
        _check(tensor, tensors.dtypes[number], tuple(extent[:width]), nbytes, f"{where}: {fqn}")
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
        offset[row] += tensor.dtype.nbytes(tensor.offset)
        length[row] = tensor.dtype.nbytes(span)
        flags[row] = (ChunkFlag.CONJUGATE if tensor.conj else 0) | (ChunkFlag.NEGATE if tensor.neg else 0)
        if not tensor.is_contiguous:
            strides[row] = tensor.strides
    placed = chunks.replace(offset=offset, length=length, flags=flags)
    if not strides:
        return placed
    rows = [strides.get(row, contiguous_strides(extent)) for row, extent in enumerate(columns[2])]
    return placed.replace(strides=pad_shapes(rows, chunks.sizes.shape[1], 1))


def _shells(recorded: object, where: str) -> Shells:
    """Shells by fqn and offsets of the chunk; objects have None for one."""
    if not isinstance(recorded, dict):
        raise FormatError(f"all_tensor_metadata is a {type(recorded).__name__}, expected a dict", where=where)
    shells: Shells = {}
    for index, shell in recorded.items():
        if shell is None:
            continue
        try:
            fields: Mapping[str, Any] = index[0]
            fqn, starts = fields["fqn"], fields["offset"]
        except (IndexError, KeyError, TypeError) as error:
            raise FormatError(f"an index of all_tensor_metadata lacks a field: {error}", where=where) from None
        is_sound = type(fqn) is str and isinstance(starts, tuple) and all(type(start) is int for start in starts)
        if not is_sound or type(shell) is not bytes:
            raise FormatError(f"tensor metadata of {fqn!r}: a field is of the wrong type", where=where)
        shells[fqn, tuple(starts)] = shell
    return shells


def _tensor(shell: bytes, where: str) -> TensorRef:
    tensor = load_pickle(shell, where=where)
    if not isinstance(tensor, TensorRef):
        raise Unsupported(f"a stored {type(tensor).__name__}, expected a plain tensor", where=where)
    return tensor


def _check(tensor: TensorRef, dtype: DType, sizes: tuple[int, ...], nbytes: int, where: str) -> None:
    if tensor.dtype != dtype or tensor.shape != sizes:
        raise FormatError(
            f"expected a chunk {dtype.name}{list(sizes)}, its tensor metadata says "
            f"{tensor.dtype.name}{list(tensor.shape)}",
            where=where,
        )
    if tensor.storage.nbytes != nbytes:
        raise FormatError(
            f"an item of {counted(nbytes, 'byte')} is recorded for a storage of {tensor.storage.nbytes:,}", where=where
        )
