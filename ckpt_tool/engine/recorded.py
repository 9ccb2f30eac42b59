"""What the source's files record of their payloads is held against what a run found, before the target gets its name.

torch computes a CRC-32 of every storage and never looks at it again. A digest that is taken on the way is the CRC-32 of
a whole tensor, and those of its chunks add up to it where each chunk is one run of the tensor's bytes (cut by rows, or
not at all): so a flipped byte is seen without reading anything twice. Others are left to ``ckpt verify --full``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.checksum import crc32
from ckpt_tool.engine.base import TakenDigests
from ckpt_tool.errors import IntegrityError
from ckpt_tool.formats._zip.descriptor import described_crc32s
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.geometry.join import is_packed_in
from ckpt_tool.geometry.overlaps import exact_duplicates
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.digest import crc32_of_zeros, linear_forms
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.manifest.tables import ChunkFlag, IntArray
from ckpt_tool.plan.model import Plan
from ckpt_tool.storage.store import Store

__all__ = ["check_recorded"]

_BLOCK_NBYTES = 8 << 20
_CHANGED = int(ChunkFlag.BIG_ENDIAN | ChunkFlag.CONJUGATE | ChunkFlag.NEGATE)


def check_recorded(plan: Plan, store: Store, taken: TakenDigests) -> int:
    """Bytes of the target's tensors that recorded checksums prove.

    Costs one short read for each chunk of a tensor that can be proven; nothing on far storage, where that is a request.

    Raises:
        IntegrityError: a tensor is not what its chunks' checksums say; the message names the chunk, its file and bytes.
    """
    if store.cost.read_ahead_bytes:
        return 0
    chunks, n_tensors = plan.source.chunks, len(plan.source.tensors)
    begins_at, is_usable = _runs(plan)
    target_row = np.full(n_tensors, -1, dtype=np.int64)
    digested = np.array([row for row in taken.tensors if not plan.is_cast[row]], dtype=np.int64)
    target_row[plan.source_tensor[digested]] = digested
    rows = np.flatnonzero(_of_all(is_usable & (target_row[chunks.tensor] >= 0), chunks.tensor, n_tensors))
    if not len(rows):
        return 0
    length = chunks.length[rows]
    crc32s, is_known = described_crc32s(
        store, plan.source.files, chunks.file[rows].astype(np.int64), chunks.offset[rows], length
    )
    tensor = chunks.tensor[rows].astype(np.int64)
    first = exact_duplicates(chunks.offsets[rows], chunks.sizes[rows], tensor)
    is_proof = _of_all(is_known & (crc32s == crc32s[first]), tensor, n_tensors) & (first == np.arange(len(rows)))
    total = plan.source.tensors.nbytes
    summed = np.bincount(tensor[is_proof], weights=length[is_proof], minlength=n_tensors)
    is_proof &= (summed == total)[tensor]
    kept = np.flatnonzero(is_proof)
    behind = total[tensor[kept]] - begins_at[rows[kept]] - length[kept]
    linear = np.zeros(n_tensors, dtype=np.uint32)
    np.bitwise_xor.at(linear, tensor[kept], linear_forms(crc32s[kept], length[kept], behind))
    proven = distinct(tensor[kept])
    for number in proven.tolist():
        if int(linear[number]) ^ crc32_of_zeros(int(total[number])) != taken.tensors[int(target_row[number])].crc32:
            own = kept[tensor[kept] == number]
            raise _difference(plan, store, rows[own].tolist(), crc32s[own].tolist())
    return int(total[proven].sum())


def _runs(plan: Plan) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """int64[n]: first byte of each source chunk in its tensor; bool[n]: it is one run there, as it is in its file."""
    source = plan.source
    tensors, chunks = source.tensors, source.chunks
    width = chunks.sizes.shape[1]
    shape = tensors.shape[chunks.tensor, :width]
    begins_at = (chunks.offsets * contiguous_strides_columns(shape)).sum(axis=1) * tensors.bits[chunks.tensor] // 8
    is_plain = np.array([entry.codec is None and entry.nbytes >= 0 for entry in source.files], dtype=np.bool_)
    is_usable = is_packed_in(chunks.sizes, shape) & is_plain[chunks.file] & ((chunks.flags & _CHANGED) == 0)
    if chunks.strides is not None:
        is_usable &= (chunks.strides == contiguous_strides_columns(chunks.sizes)).all(axis=1)
    return begins_at, is_usable


def _of_all(is_so: npt.NDArray[np.bool_], tensor: npt.NDArray[Any], n_tensors: int) -> npt.NDArray[np.bool_]:
    """bool[n]: whether it is so for all chunks of a chunk's tensor."""
    n_chunks, n_so = np.bincount(tensor, minlength=n_tensors), np.bincount(tensor[is_so], minlength=n_tensors)
    found: npt.NDArray[np.bool_] = (n_chunks == n_so)[tensor]
    return found


def _difference(plan: Plan, store: Store, rows: Sequence[int], recorded: Sequence[int]) -> IntegrityError:
    """What to say of a tensor that is not what the checksums of ``rows`` say: which of them is not."""
    source = plan.source
    hint = (
        'fetch or save the file again; "ckpt verify --full" lists all that is damaged, --no-digest copies it as it is'
    )
    for row, expected in zip(rows, recorded, strict=True):
        chunk = source.chunks.record(row, source.tensors, source.files)
        found = _crc32_of(store, chunk.where)
        if found != expected:
            said = f"the CRC-32 of {chunk.fqn!r} {chunk.box} is {found:08x}, the file records {expected:08x}"
            return IntegrityError(said, where=f"{source.where}: {chunk.where}", hint=hint)
    said = f"{chunk.fqn!r} was read with other bytes than it has now: memory or storage is not reliable"
    return IntegrityError(said, where=source.where, hint="run it again, on another machine if it happens again")


def _crc32_of(store: Store, where: FileRange) -> int:
    """The CRC-32 of a range of a file."""
    value = 0
    for at in range(where.offset, where.end, _BLOCK_NBYTES):
        value = crc32(store.read(where.path, at, min(_BLOCK_NBYTES, where.end - at)), value)
    return value
