"""Bytes outside of a storage record: arrays that stand in the pickle itself, and storages that no tensor describes.

Tensors of devices without storages (XLA) are pickled as numpy arrays. Their elements lie in ``data.pkl``, as they are
or, up to protocol 2, as Latin-1 text in UTF-8: each becomes a file of its own that is decoded when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.errors import Unsupported
from ckpt_tool.formats._pickle.tensors import InlineTensorRef, StorageRef, TensorRef
from ckpt_tool.formats._pickle.walk import tensor_leaves
from ckpt_tool.formats._torch_file.rows import StoragePlace
from ckpt_tool.manifest.model import FileEntry, FileRange

__all__ = ["inline_places", "tensor_of_array", "tensor_of_storage"]

_MAKERS = (b"_rebuild_device_tensor_from_numpy", b"_rebuild_xla_tensor")


def tensor_of_storage(storage: StorageRef) -> TensorRef:
    """All elements of a storage; bytes of one without a type."""
    return TensorRef(storage, 0, (storage.numel,), (1,), storage.dtype or DTYPES["uint8"])


def tensor_of_array(inline: InlineTensorRef) -> TensorRef | None:
    """The tensor in an array, which is `inline_places`'s storage of the same key; None for what torch does not write.

    bfloat16 is pickled as float32 of the same values: their upper halves.
    """
    array = inline.array
    if not isinstance(array, np.ndarray) or not isinstance(inline.dtype, DType) or array.dtype.byteorder == ">":
        return None
    step = 2 if (inline.dtype.name, array.dtype.name) == ("bfloat16", "float32") else 1
    if step == 1 and DTYPES.get(array.dtype.name) != inline.dtype:
        return None
    width = array.dtype.itemsize
    strides = tuple(step * stride // width for stride in array.strides)
    storage = StorageRef(None, _key(array), str(inline.device), array.nbytes)
    return TensorRef(storage, step - 1, array.shape, strides, inline.dtype, requires_grad=inline.requires_grad)


def inline_places(
    root: Any, pickle: bytes, entry: FileEntry, part: FileRange, codec: str | None = None
) -> Iterator[StoragePlace]:
    """Where in ``pickle`` the elements of each array lie that stands for a tensor below ``root``.

    Args:
        root: what the pickle describes.
        pickle: its bytes.
        entry: the file that it lies in.
        part: where in that.
        codec: how it is coded there, None for as it is.

    Raises:
        Unsupported: an array is not there byte by byte (protocol 0 escapes them).
    """
    if not any(maker in pickle for maker in _MAKERS):
        return
    at = 0
    for array in _arrays(root):
        raw = array.tobytes(order="A")
        text = raw.decode("latin-1").encode()
        # The same bytes elsewhere in the pickle would do as well.
        tries = ((form, start) for form in (raw, text) for start in (at, 0))
        found = next(((start, form) for form, first in tries if (start := pickle.find(form, first)) >= 0), None)
        if found is None:
            raise Unsupported(
                f"an array of shape {list(array.shape)} that stands for a tensor is written with escapes",
                where=part.path,
                hint="load it with torch and save it again with pickle_protocol=2",
            )
        start, form = found
        at = start + len(form)
        steps = [] if form == raw else ["latin1"]
        if codec is not None:
            steps = [codec, f"slice:{start}:{len(form)}", *steps]
        if steps:
            piece = part if codec is not None else FileRange(part.path, part.offset + start, len(form))
            content = FileEntry(f"{part.path}!pickle+{start}", len(raw), "|".join(steps), piece)
            yield StoragePlace(_key(array), content, 0, len(raw))
        else:
            yield StoragePlace(_key(array), entry, part.offset + start, len(raw))


def _arrays(root: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Arrays of inline tensors, each object once, in the order of first use."""
    seen: set[int] = set()
    for _, leaf in tensor_leaves(root):
        if isinstance(leaf, InlineTensorRef) and isinstance(leaf.array, np.ndarray) and id(leaf.array) not in seen:
            seen.add(id(leaf.array))
            yield leaf.array


def _key(array: np.ndarray[Any, Any]) -> str:
    """The storage's key: an array that two tensors share is one."""
    return f"array {id(array)}"
