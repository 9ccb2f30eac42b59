"""A data descriptor is what a zip that was written in one go has behind a member: its CRC-32 and size.

torch writes all its files so, and its items of DCP too; a payload that lies in one is told by what stands behind it,
without the zip's directory. Source: APPNOTE 6.3.10, 4.3.9, with its signature; sizes have 4 bytes, or 8 in zip64.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from ckpt_tool.formats._merged import read_merged
from ckpt_tool.manifest.tables import FileTable, IntArray
from ckpt_tool.storage.store import Store

__all__ = ["DESCRIPTOR_NBYTES", "described_crc32s", "descriptor_crc32"]

_SIGNATURE = b"PK\x07\x08"
_SHORT, _LONG = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
DESCRIPTOR_NBYTES = _LONG.size


def descriptor_crc32(data: bytes | memoryview, nbytes: int) -> int | None:
    r"""The CRC-32 that a descriptor at the start of ``data`` records for a stored member of ``nbytes`` bytes.

    None where there is no such descriptor, or where it says 0, as it does where none was computed.

    >>> descriptor_crc32(struct.pack("<4sIII", b"PK\x07\x08", 99, 5, 5), 5)
    99
    """
    for form in (_SHORT, _LONG):
        if len(data) >= form.size:
            signature, crc32, packed, size = form.unpack_from(data)
            if signature == _SIGNATURE and packed == size == nbytes:
                return crc32 or None
    return None


def described_crc32s(
    store: Store, files: FileTable, file: IntArray, offset: IntArray, length: IntArray
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    """``(crc32 uint32[n], is_recorded bool[n])`` of payloads, by what stands behind each; one short read for each.

    Args:
        store: has the files.
        files: with their sizes; behind a payload at the very end of one nothing is recorded.
        file: int64[n], rows of ``files``.
        offset: int64[n], bytes.
        length: int64[n], bytes.
    """
    crc32s, is_recorded = np.zeros(len(file), dtype=np.uint32), np.zeros(len(file), dtype=np.bool_)
    wanted = np.minimum(files.nbytes[file] - offset - length, DESCRIPTOR_NBYTES)
    rows = np.flatnonzero(wanted >= _SHORT.size)
    found = read_merged(store, files.paths, file[rows], (offset + length)[rows], wanted[rows])
    for position, behind in found:
        row = int(rows[position])
        crc32 = descriptor_crc32(behind, int(length[row]))
        if crc32 is not None:
            crc32s[row], is_recorded[row] = crc32, True
    return crc32s, is_recorded
