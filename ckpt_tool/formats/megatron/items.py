"""An item is a zip of ``torch.save`` somewhere in a file; here those that hold objects are opened, tensors and all.

mcore stores an object as a one-element list in an item of a ``.distcp``. Its pickle is read, its tensors are placed.
"""

from __future__ import annotations

from ckpt_tool.errors import FormatError
from ckpt_tool.formats._dcp.items import item_fault
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._torch_file.archive import TorchFile, storage_members
from ckpt_tool.formats._torch_file.rows import StoragePlace
from ckpt_tool.formats._zip.directory import is_big_endian, payload_offset, read_directory, read_member
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.model import FileEntry, FileRange

__all__ = ["open_item"]

_WHOLE_NBYTES = 4 << 20
"""Items up to this size are read in one request."""


def open_item(source: Source, where: FileRange, fqn: str) -> TorchFile:
    """The object stored at ``where``, out of its list, and the exact place of each of its storages.

    Costs one request up to 4 MiB; above that one for the directory, one or two for the pickle, and one per storage.

    Raises:
        NotFound: the file is missing.
        FormatError: it ends before the item does, or the item is no zip with a pickle.
        UnsafePickle: the pickle asks for something that could run code.
    """
    place = f"{where.path}:{where.offset} ({fqn})"
    fault = item_fault(source.listing.sizes, where, fqn)
    if fault is not None:
        raise fault
    whole = source.store.read(where.path, where.offset, where.length) if where.length <= _WHOLE_NBYTES else None

    def read(offset: int, length: int) -> bytes:
        if whole is not None:
            return whole[offset : offset + length]
        return source.store.read(where.path, where.offset + offset, length)

    directory = read_directory(read, where.length, where=place)
    pickle = directory.record("data.pkl")
    if pickle is None:
        raise FormatError("the zip has no data.pkl, expected what torch.save writes", where=place)
    value = load_pickle(read_member(read, pickle, where=place), where=f"{place} data.pkl")
    entry = FileEntry(where.path, source.listing.nbytes(where.path))
    storages = {
        key: StoragePlace(key, entry, where.offset + payload_offset(read, member, where=place), member.nbytes)
        for key, member in storage_members(directory).items()
        if member.is_stored
    }
    root = value[0] if isinstance(value, list) and len(value) == 1 else value
    big_endian = is_big_endian(read, directory, where=place)
    return TorchFile(where.path, "zip", root, storages, big_endian, directory)
