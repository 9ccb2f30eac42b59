"""The writer of GGUF, version 3: whole tensors as they are, each at a multiple of 32 bytes, behind pairs and places.

Nothing is quantised and no name is changed: what a program of its own makes of the file is told by its names and by
``general.architecture``. Of a source in GGUF the pairs are kept, so that a split model becomes one file; how wide a
number was is not known any more, and chosen as llama.cpp's own converter does.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import Unsupported, UsageError
from ckpt_tool.formats._element_types import check_types
from ckpt_tool.formats._whole import whole_rows
from ckpt_tool.formats.base import LayOut, Segment, WriteRequest
from ckpt_tool.formats.gguf.header import MAGIC
from ckpt_tool.formats.gguf.types import ggml_number
from ckpt_tool.manifest.model import FileEntry
from ckpt_tool.sizes import counted

__all__ = ["WRITER", "GgufWriter"]

_FILE_NAME = "model.gguf"
_VERSION, _ALIGNMENT, _MAX_NDIM = 3, 32, 4
_ARCHITECTURE = "general.architecture"
_LEFT_OUT = ("general.alignment", "split.")
_STRING, _ARRAY = 8, 9


class GgufWriter:
    """Lays out one file."""

    name = "gguf"
    per_rank = False

    def lay_out(self, request: WriteRequest) -> LayOut:
        """The file.

        Raises:
            Unsupported: element types that GGUF lacks, more than four dimensions, objects that are no pairs.
            LayoutError: a tensor is not stored as one whole box.
        """
        tensors, boxes = request.tensors, request.boxes
        whole_rows(request, "a GGUF file")
        check_types(tensors, "GGUF has no elements of", lambda kind, _: ggml_number(kind) is not None)
        path = request.options.file_name or _FILE_NAME
        if not path.endswith(".gguf") or "/" in path:
            raise UsageError(f"{path!r} is no name for a GGUF file", hint="name it like model.gguf")
        places, end = [], 0
        for nbytes in tensors.nbytes.tolist():
            places.append(end)
            end = -(-(end + nbytes) // _ALIGNMENT) * _ALIGNMENT
        pairs = {_ARCHITECTURE: "unknown", **_pairs(request)}
        entries = b"".join(
            _entry(meta.fqn, meta.dtype, meta.shape, place) for meta, place in zip(tensors, places, strict=True)
        )
        head = MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(pairs))
        head += b"".join(_text(key) + _value(key, value) for key, value in pairs.items()) + entries
        start = -(-len(head) // _ALIGNMENT) * _ALIGNMENT
        manifest = request.manifest(
            self.name,
            [FileEntry(path, start + end)],
            file=np.zeros(len(boxes), dtype=np.int32),
            offset=start + np.array(places, dtype=np.int64)[boxes.tensor],
            blobs=request.blobs,
        )
        return LayOut(manifest, (Segment(path, 0, head),), None)


def _pairs(request: WriteRequest) -> dict[str, Any]:
    """Pairs that the source has, of GGUF as it was."""
    said = request.info.get("metadata")
    values = dict(said) if isinstance(said, Mapping) and _ARCHITECTURE in said else {}
    values |= {blob.fqn: blob.value for blob in request.blobs}
    return {key: value for key, value in values.items() if not key.startswith(_LEFT_OUT)}


def _entry(fqn: str, dtype: DType, shape: tuple[int, ...], place: int) -> bytes:
    found = ggml_number(dtype)
    if found is None:
        raise Unsupported(f"GGUF has no elements of {dtype.name}", where=fqn)
    if len(shape) > _MAX_NDIM:
        raise Unsupported(
            f"{counted(len(shape), 'dimension')}, GGUF has at most {_MAX_NDIM}", where=fqn, hint="--exclude it"
        )
    number, block = found
    sizes = (*shape[:-1], shape[-1] * block) if shape else ()
    layout = f"<I{len(sizes)}QIQ"
    return _text(fqn) + struct.pack(layout, len(sizes), *reversed(sizes), number, place)


def _text(text: str) -> bytes:
    raw = text.encode(errors="surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> bytes:
    """A value with its kind in front."""
    if isinstance(value, list | tuple):
        kind = _kind(key, list(value), is_list=True)
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(_raw(kind, one) for one in value)
    kind = _kind(key, [value], is_list=False)
    return struct.pack("<I", kind) + _raw(kind, value)


def _kind(key: str, values: list[Any], *, is_list: bool) -> int:
    """The kind that programs expect: 32 bits where numbers fit, with a sign in lists."""
    types = {type(value) for value in values}
    if types <= {str}:
        return _STRING
    if types == {bool}:
        return 7
    if types == {int}:
        kinds = ((4, 0, 32), (5, -31, 31), (10, 0, 64), (11, -63, 63))
        kinds = (kinds[1], kinds[0], *kinds[2:]) if is_list else kinds
        for kind, low, high in kinds:
            if (-(1 << -low) if low else 0) <= min(values) and max(values) < 1 << high:
                return kind
    if types == {float}:
        exact = np.array(values, dtype=np.float64)
        with np.errstate(over="ignore"):
            narrow = exact.astype(np.float32).astype(np.float64)
        return 6 if np.array_equal(exact, narrow, equal_nan=True) else 12
    raise Unsupported(
        f"a pair of GGUF is text, a number, or a list of either; {key!r} is not",
        hint="ckpt export SRC DST --to gguf, without --all, takes the weights alone",
    )


_FORMATS = {4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def _raw(kind: int, value: Any) -> bytes:
    return _text(value) if kind == _STRING else struct.pack(_FORMATS[kind], value)


WRITER = GgufWriter()
