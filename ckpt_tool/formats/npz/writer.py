"""The writer of ``.npz``: whole tensors, uncompressed, one member each, as ``numpy.savez`` lays them out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ckpt_tool.checksum import crc32, crc32_combine
from ckpt_tool.errors import Unsupported, UsageError
from ckpt_tool.formats._npy import npy_header
from ckpt_tool.formats._whole import whole_rows
from ckpt_tool.formats._zip.layout import Member, ZipLayout
from ckpt_tool.formats.base import LayOut, Segment, WriteRequest
from ckpt_tool.manifest.model import FileEntry
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.sizes import counted

__all__ = ["WRITER", "NpzWriter"]

_FILE_NAME = "model.npz"
_SHOWN = 3


class NpzWriter:
    """Lays out one zip of ``.npy`` files, the elements of each at a multiple of 64 bytes."""

    name = "npz"
    per_rank = False

    def lay_out(self, request: WriteRequest) -> LayOut:
        """The file; checksums come with ``seal``, and are 0 until then.

        Types that numpy lacks (bfloat16, float8) are written as void elements of their width, as numpy writes those of
        ml_dtypes; a note names them.

        Raises:
            Unsupported: objects, or elements that are no whole bytes.
            LayoutError: a tensor is not stored as one whole box.
        """
        tensors = request.tensors
        if request.blobs:
            names = ", ".join(repr(blob.fqn) for blob in request.blobs[:_SHOWN])
            raise Unsupported(
                f".npz holds arrays only, and there are {counted(len(request.blobs), 'other object')}: {names}",
                hint="leave them out with --exclude, or choose --to torch-save, which keeps them",
            )
        rows = whole_rows(request, "an .npz file")
        path = request.options.file_name or _FILE_NAME
        if not path.endswith(".npz") or "/" in path:
            raise UsageError(f"{path!r} is no name for an .npz file", hint="name it like model.npz")
        headers = [npy_header(meta.dtype, meta.shape) for meta in tensors]
        nbytes = tensors.nbytes.tolist()
        members = []
        for fqn, header, length in zip(tensors.fqns, headers, nbytes, strict=True):
            known = header if not length else None
            members.append(Member(f"{fqn}.npy", len(header) + length, known))
        zipped = ZipLayout(members)
        starts = [at + len(header) for at, header in zip(zipped.payload_offsets, headers, strict=True)]
        boxes = request.boxes
        manifest = request.manifest(
            self.name,
            [FileEntry(path, zipped.nbytes)],
            file=np.zeros(len(boxes), dtype=np.int32),
            offset=np.array(starts, dtype=np.int64)[boxes.tensor],
            notes=_notes(tensors),
        )
        filled = [row for row, length in enumerate(nbytes) if length]
        heads = [Segment(path, offset, data) for offset, data in zipped.heads]
        heads += [Segment(path, zipped.payload_offsets[row], headers[row]) for row in filled]
        unsealed = [Segment(path, offset, data) for offset, data in zipped.tail([0] * len(filled))]

        def seal(crc32s: npt.NDArray[np.uint32]) -> Iterator[Segment]:
            whole = [crc32_combine(crc32(headers[row]), int(crc32s[rows[row]]), nbytes[row]) for row in filled]
            return (Segment(path, offset, data) for offset, data in zipped.tail(whole))

        return LayOut(manifest, (*heads, *unsealed), None, needs_crc32=True, seal=seal)


def _notes(tensors: TensorTable) -> tuple[str, ...]:
    """A note about types that numpy has no name for."""
    void = [
        fqn for fqn, kind in zip(tensors.fqns, tensors.dtypes, strict=True) if npy_header(kind, ()).find(b"'|V") >= 0
    ]
    if not void:
        return ()
    kinds = sorted({tensors.dtypes[tensors.index[fqn]].name for fqn in void})
    note = (
        f"{counted(len(void), 'tensor', 'are')} {', '.join(kinds)}, which numpy has no name for: they load as void "
        "elements, array.view(ml_dtypes.bfloat16) shows them"
    )
    if all(tensors.dtypes[tensors.index[fqn]].is_castable for fqn in void):
        note += "; --dtype fp32 avoids this"
    return (note,)


WRITER = NpzWriter()
