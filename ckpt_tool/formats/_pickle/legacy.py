"""The stream that torch.save wrote before 1.6 and still writes on request: five pickles, then the storages.

``magic, 1001, {protocol_version, little_endian, type_sizes}, object, storage keys``; then for each key an int64 count
of elements and the elements, without padding or checksum (torch ``serialization.py::_legacy_save``). Knows nothing of
files: bytes come from ``read(offset, length)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats._pickle.load import load_prefix
from ckpt_tool.formats._pickle.scan import pickle_end
from ckpt_tool.formats._pickle.tensors import StorageRef
from ckpt_tool.formats._pickle.walk import storages
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["LegacyFile", "begins_legacy", "is_legacy", "is_legacy_tar", "read_legacy"]

_MAGIC = 0x1950A86A20F9469CFC6C
# The magic number as each protocol pickles it: decimal text in 0 and 1, LONG1 from 2 on, in a frame from 4 on.
_MAGIC_PICKLE = re.compile(
    rb"(?s:L119547037146038801333356L?\n\.|\x80[\x02-\x05](?:\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.)"
)
_MAGIC_PICKLES = (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", b"\x80\x03\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.")
_PROTOCOL_VERSION = 1001
_FIRST_READ_BYTES = 1 << 20
_MAX_PICKLE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class LegacyFile:
    """What a legacy stream holds."""

    root: Any
    """The saved object, tensors as records."""
    storages: dict[str, tuple[int, int]]
    """Storage key -> byte offset and length of its elements in the stream."""
    is_little_endian: bool
    pickle: bytes
    """The bytes of the saved object's pickle."""
    pickle_offset: int
    """Where that lies in the stream."""


def is_legacy(head: bytes) -> bool:
    """True when ``head``, the first 28 bytes or more, begins a legacy stream of any pickle protocol."""
    return _MAGIC_PICKLE.match(head) is not None


def begins_legacy(data: bytes) -> bool:
    """True when ``data``, too short for `is_legacy`, is how a legacy stream begins that was cut there."""
    return len(data) > 2 and any(magic.startswith(data) for magic in _MAGIC_PICKLES)


def is_legacy_tar(head: bytes) -> bool:
    """True when ``head``, the first 265 bytes or more, is a tar archive: what torch wrote before 0.1.10."""
    return head[257:262] == b"ustar"


def read_legacy(read: Callable[[int, int], bytes], nbytes: int, *, where: str, is_cut: bool = False) -> LegacyFile:
    """The object of a legacy stream of ``nbytes`` bytes, and where its storages lie.

    Costs one read of at most 1 MiB, more when the pickles are longer, and one of 8 bytes; storages are not read.
    With ``is_cut`` storages may lie behind the end, or end before it.

    Raises:
        Unsupported: the tar archive that torch wrote before 0.1.10.
        FormatError: not a legacy stream, or one whose storages do not end where the file does.
    """
    head, ends = _pickles(read, nbytes, where)
    starts = [0, *ends]
    magic, version, info, root, keys = (load_prefix(head, where=where, start=start)[0] for start in starts[:5])
    if magic != _MAGIC or version != _PROTOCOL_VERSION:
        raise FormatError(f"legacy torch file of version {version!r}, expected {_PROTOCOL_VERSION}", where=where)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise FormatError("the list of storages is not a list of names", where=f"{where}:{starts[4]}")
    known = {storage.key: storage for storage in storages(root)}
    places, end = _places(keys, known, ends[4], nbytes if not is_cut else None, where)
    if end != nbytes and not is_cut:
        raise FormatError(f"the storages end at byte {end:,}, the file at {nbytes:,}", where=where)
    last = next((key for key in reversed(keys) if places[key][0] <= nbytes), None)
    if last is not None:
        _check_count(read, known[last], places[last][0] - 8, where)
    is_little = not isinstance(info, dict) or info.get("little_endian") is not False
    return LegacyFile(root, places, is_little, head[starts[3] : starts[4]], starts[3])


def _pickles(read: Callable[[int, int], bytes], nbytes: int, where: str) -> tuple[bytes, list[int]]:
    """The first bytes of the stream, and the offset behind each of the five pickles."""
    length = min(nbytes, _FIRST_READ_BYTES)
    while True:
        head = read(0, length)
        if is_legacy_tar(head):
            raise Unsupported(
                "a tar archive as torch wrote before 0.1.10 (2017)",
                where=where,
                hint="load it with torch < 2.6 and save it again",
            )
        if not is_legacy(head):
            raise FormatError("not a legacy torch file: its first bytes are others", where=where)
        ends: list[int] = []
        try:
            while len(ends) < 5:
                ends.append(pickle_end(head, where=where, start=ends[-1] if ends else 0))
        except FormatError as error:
            if length == nbytes or length >= _MAX_PICKLE_BYTES:
                raise FormatError(
                    f"{error.message}, in pickle {len(ends) + 1} of the 5 in front of the tensors' bytes, so that "
                    f"nothing can be salvaged of its {counted(nbytes, 'byte')}",
                    where=error.where,
                    hint="the copy or the save was cut: fetch or save the file again",
                ) from error
            length = min(nbytes, length * 4)
            continue
        return head, ends


def _places(
    keys: list[str], known: dict[str, StorageRef], start: int, nbytes: int | None, where: str
) -> tuple[dict[str, tuple[int, int]], int]:
    places: dict[str, tuple[int, int]] = {}
    end = start
    for key in keys:
        storage = known.get(key)
        if storage is None:
            raise FormatError(f"storage {key!r} belongs to no tensor, so its size is unknown", where=f"{where}:{end}")
        if key in places:
            raise FormatError(f"storage {key!r} is listed twice", where=f"{where}:{start}")
        places[key] = (end + 8, storage.nbytes)
        end += 8 + storage.nbytes
        if nbytes is not None and end > nbytes:
            raise FormatError(
                f"storage {key!r} ends at byte {end:,}, the file has {nbytes:,} ({end - nbytes:,} missing)",
                where=where,
                hint="the copy was cut; fetch it again, or keep what is whole: ckpt verify SRC --salvage OUT",
            )
    missing = next((key for key in known if key not in places), None)
    if missing is not None:
        raise FormatError(f"a tensor needs storage {missing!r}, which is not in the file", where=where)
    return places, end


def _check_count(read: Callable[[int, int], bytes], storage: StorageRef, offset: int, where: str) -> None:
    n_elements = int.from_bytes(read(offset, 8), "little", signed=True)
    if n_elements != storage.numel:
        raise FormatError(
            f"storage {storage.key!r} says it has {counted(n_elements, 'element')}, expected {storage.numel:,}",
            where=f"{where}:{offset}",
        )
