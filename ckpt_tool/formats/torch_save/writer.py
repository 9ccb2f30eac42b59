"""The writer of one torch.save file that holds everything, nested as the key paths say."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_tool.errors import UsageError
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats._torch_file.objects import check_objects
from ckpt_tool.formats._torch_file.written import (
    WrittenFile,
    blob_entry,
    check_dtypes,
    fresh_tensor,
    weights_only_notes,
)
from ckpt_tool.formats._torch_file.written_files import WrittenFiles
from ckpt_tool.formats._whole import whole_rows
from ckpt_tool.formats.base import LayOut, WriteRequest
from ckpt_tool.manifest.model import Blob, KeyPath
from ckpt_tool.sizes import counted

__all__ = ["WRITER", "TorchSaveWriter"]

_FILE_NAME = "checkpoint.pt"


class TorchSaveWriter:
    """Lays out one zip as torch.save (2.13) writes it.

    ``torch.load(weights_only=True)`` reads it unless an object that is carried over is of a class that it refuses, such
    as numpy's; a note names those.

    Every tensor gets a storage of its own, in the request's order: tensors that were tied in the source are written
    once for each name, for a request does not say what was tied.
    """

    name = "torch-save"
    per_rank = False

    def lay_out(self, request: WriteRequest) -> LayOut:
        """The file; integer keys become lists or dicts as ``info["int_keyed_dicts"]`` says (see ``nest``).

        Of objects that each rank has, the first is kept. Checksums come with ``seal``, and are 0 until then.

        Raises:
            Unsupported: dtypes that torch lacks, objects that cannot be pickled, paths that contradict each other.
            LayoutError: a tensor is not stored as one whole box.
        """
        check_dtypes(request.tensors)
        row_of_tensor = whole_rows(request, "one torch.save file")
        path = request.options.file_name or _FILE_NAME
        if "/" in path or path.endswith((".safetensors", ".json")):
            raise UsageError(f"{path!r} is no name for a torch.save file", hint="name it like checkpoint.pt")
        tensors = request.tensors
        values: list[tuple[KeyPath, Any]] = [
            (meta.path, fresh_tensor(key, meta.dtype, meta.shape)) for key, meta in enumerate(tensors)
        ]
        blobs, n_left_out = _first_blobs(request.blobs)
        check_objects(blobs)
        values += [blob_entry(blob) for blob in blobs]
        value = nest(values, int_keyed=request.info.get("int_keyed_dicts", ()))
        nbytes = tensors.nbytes.tolist()
        file = WrittenFile.of(path, value, nbytes, row_of_tensor.tolist())
        payload = np.array(file.payload_offsets, dtype=np.int64)
        notes = (f"{counted(n_left_out, 'object of further ranks', 'were')} left out",) if n_left_out else ()
        files = WrittenFiles([file])
        manifest = request.manifest(
            self.name,
            files.entries(),
            file=np.zeros(len(request.boxes), dtype=np.int32),
            offset=payload[request.boxes.tensor],
            blobs=blobs,
            notes=(*notes, *weights_only_notes(blobs)),
        )
        return LayOut(manifest, tuple(files.segments()), None, needs_crc32=True, seal=files.seal)


def _first_blobs(blobs: tuple[Blob, ...]) -> tuple[tuple[Blob, ...], int]:
    """The first blob of each fqn, and how many there are besides."""
    first: dict[str, Blob] = {}
    for blob in blobs:
        first.setdefault(blob.fqn, blob)
    return tuple(first.values()), len(blobs) - len(first)


WRITER = TorchSaveWriter()
