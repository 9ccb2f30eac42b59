"""Salvage tells what a zip of torch.save that lost its end still holds, from its first bytes.

Storages follow one another in the order of their keys, and ``data.pkl``, which comes first, says how long each is; so
the place of every storage can be reckoned from the place of the first. Nothing is repaired here.
"""

from __future__ import annotations

from ckpt_tool.errors import CkptError
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._pickle.walk import storages
from ckpt_tool.formats._zip.directory import LOCAL_HEADER_NBYTES, Read
from ckpt_tool.formats._zip.head import ItemHead, parse_item_head
from ckpt_tool.sizes import counted

__all__ = ["salvage_text", "storage_sizes"]

_FIRST_NBYTES = 64 << 10
_MAX_NBYTES = 256 << 20
_WIDE_NBYTES = 0xFFFFFFFF
_TORCH_HEADER = b"PK\x03\x04\x08\x08\0\0"  # signature; flags and method, which other writers set otherwise


def salvage_text(read: Read, nbytes: int, *, where: str) -> tuple[str, bool] | None:
    """Half a sentence that says what the local headers tell, and whether any of it can be salvaged.

    None when these bytes are no zip of torch.save.

    Costs one read of 64 KiB, more only where ``data.pkl`` is longer.
    """
    length = min(nbytes, _FIRST_NBYTES)
    while True:
        head = read(0, length)
        if head[:4] + head[6:10] != _TORCH_HEADER or b"/data.pkl" not in head[:512]:
            return None
        item = parse_item_head(head)
        if item is not None:
            return _counted(item, nbytes, where)
        if length >= min(nbytes, _MAX_NBYTES):
            said = f"truncated to {counted(nbytes, 'byte')}: it ends before its first storage"
            return f"{said}, so nothing can be salvaged", False
        length = min(nbytes, length * 4)


def storage_sizes(pickle: bytes) -> dict[str, int]:
    """Bytes of each storage by its key, as a ``data.pkl`` says.

    Raises:
        FormatError: it is no whole pickle.
    """
    return {storage.key: storage.nbytes for storage in storages(load_pickle(pickle, where="data.pkl"))}


def _counted(item: ItemHead, nbytes: int, where: str) -> tuple[str, bool] | None:
    try:
        found = {storage.key: storage for storage in storages(load_pickle(item.pickle, where=where))}
    except CkptError:
        return None
    if item.payload_offset is None or not all(key.isdecimal() for key in found):
        return f"truncated to {counted(nbytes, 'byte')}; its data.pkl is whole", True
    start = item.payload_offset
    alignment = max(start & -start, 1) if start % 64 else 64
    n_whole = 0
    for key in sorted(found, key=int):
        if key != "0":
            name = f"{item.root}data/{key}"
            start += LOCAL_HEADER_NBYTES + len(name.encode()) + 4
            start += -start % alignment
        end = start + found[key].nbytes
        if end > nbytes:
            break
        n_whole += 1
        start = end + ((24 if found[key].nbytes >= _WIDE_NBYTES else 16) if found[key].nbytes else 0)
    said = f"truncated: no end record in its {counted(nbytes, 'byte')}; "
    return f"{said}local headers allow salvage of {n_whole:,} of {counted(len(found), 'storage')}", n_whole > 0
