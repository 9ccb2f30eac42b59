"""Items that are being written: the bytes around each tensor's payload, and whole items of objects.

Items of equal dtype and sizes have equal surroundings but for the checksum, so each kind is laid out once. They are
what torch 2.13 writes, byte for byte but for the serialization id, which is not derived from checksums here.
"""

from __future__ import annotations

import pickletools
from typing import Any

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.errors import Unsupported
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.tensors import StorageRef, TensorRef
from ckpt_tool.formats._torch_file.objects import check_objects
from ckpt_tool.formats._zip.layout import ZipLayout, item_layout, torch_members
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.manifest.model import Blob
from ckpt_tool.records import dataclass

__all__ = ["ItemKind", "ItemKinds", "foreign_names", "is_writable", "object_item"]

_PAYLOAD_MEMBER = 4
"""Position of ``data/0`` among the members of an item."""
_NO_TORCH_TYPE = frozenset({"float6_e2m3fn", "float6_e3m2fn", "bits8"})
# Importable wherever torch is; other names need the program that wrote them.
_KNOWN_ROOTS = frozenset({"torch", "numpy", "collections", "_codecs", "__builtin__", "builtins", "copy_reg", "pathlib"})


@dataclass(frozen=True, slots=True)
class ItemKind:
    """Where everything of an item lies that holds a tensor of one dtype and shape."""

    layout: ZipLayout
    head: bytes
    """From the item's first byte to the payload."""
    payload_nbytes: int
    middle: bytes
    """From the payload's descriptor, which comes before it, to the directory, which comes behind it."""

    @property
    def nbytes(self) -> int:
        """Length of the item."""
        return self.layout.nbytes

    def rear(self, crc32: int) -> bytes:
        """From the payload's end to the item's; 0 stands for a checksum that is not recorded."""
        *descriptor, (_, directory) = self.layout.tail((crc32,))
        return b"".join([*(data for _, data in descriptor), self.middle, directory])


class ItemKinds:
    """Kinds of items, each laid out once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[int, ...]], ItemKind] = {}

    def kind(self, dtype: DType, sizes: tuple[int, ...]) -> ItemKind:
        """The kind of items that hold a packed tensor of ``dtype`` and ``sizes``."""
        key = (dtype.name, sizes)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _lay_out(dtype, sizes)
        return found


def is_writable(dtype: DType) -> bool:
    """Whether torch has the type and its elements alone make a tensor (quantized ones need a scale)."""
    return DTYPES.get(dtype.name) == dtype and dtype.kind != "quantized" and dtype.name not in _NO_TORCH_TYPE


def object_item(blob: Blob, original: bytes | None) -> bytes:
    """The whole item of an object: its original bytes, or its inert value written anew.

    Raises:
        Unsupported: the value is not loaded, holds tensors, or something that no pickle here can say.
    """
    if original is not None:
        return original
    check_objects([blob])
    try:
        layout = ZipLayout(torch_members(dump_pickle(blob.value), ()))
    except Unsupported as error:
        raise Unsupported(f"the object {blob.fqn!r}: {error.message}", hint=error.hint) from None
    item = bytearray(layout.nbytes)
    for offset, data in (*layout.heads, *layout.tail(())):
        item[offset : offset + len(data)] = data
    return bytes(item)


def foreign_names(value: Any) -> list[str]:
    """Classes and functions in the pickle of ``value`` that belong neither to torch nor to numpy or Python."""
    names = {
        str(argument).replace(" ", ".")
        for opcode, argument, _ in pickletools.genops(dump_pickle(value))
        if opcode.name == "GLOBAL"
    }
    return sorted(name for name in names if name.partition(".")[0] not in _KNOWN_ROOTS)


def _lay_out(dtype: DType, sizes: tuple[int, ...]) -> ItemKind:
    numel = 1
    for size in sizes:
        numel *= size
    nbytes = dtype.nbytes(numel)
    storage = StorageRef(dtype, "0", "cpu", numel) if dtype.storage else StorageRef(None, "0", "cpu", nbytes)
    tensor = TensorRef(storage, 0, sizes, contiguous_strides(sizes), dtype)
    layout = item_layout(dump_pickle(tensor), (nbytes,))
    start = layout.payload_offsets[_PAYLOAD_MEMBER]
    if nbytes:
        (_, head), (_, middle) = layout.heads
    else:  # nothing parts what comes before an empty payload from what comes behind it
        ((_, both),) = layout.heads
        head, middle = both[:start], both[start:]
    return ItemKind(layout, head, nbytes, middle)
