"""Writer of whole tensors: one safetensors file, or several with Hugging Face's index."""

from __future__ import annotations

import numpy as np

from ckpt_tool.errors import Unsupported, UsageError
from ckpt_tool.formats._element_types import check_types
from ckpt_tool.formats._hf_index import write_index
from ckpt_tool.formats._safetensors.header import PEER_MAX_HEADER_NBYTES, build_header, has_type
from ckpt_tool.formats._whole import whole_rows
from ckpt_tool.formats.base import LayOut, Segment, WriteRequest
from ckpt_tool.formats.safetensors.names import INDEX_SUFFIX, SUFFIX
from ckpt_tool.manifest.model import FileEntry
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.sizes import counted

__all__ = ["WRITER", "SafetensorsWriter", "split"]

_SLACK_NBYTES = 100_000  # of the reference reader's limit: room for metadata and padding


class SafetensorsWriter:
    """Lays out whole tensors in the request's order, wide elements first within a file so that every one is aligned."""

    name = "safetensors"
    per_rank = False

    def lay_out(self, request: WriteRequest) -> LayOut:
        """One file, or numbered files and an index when a limit is exceeded; the index is then the commit file.

        Limits are ``options.max_shard_nbytes`` of payload and the header length that the reference library reads. A
        tensor larger than the limit gets a file of its own.

        Raises:
            Unsupported: objects, or dtypes that the format lacks.
            LayoutError: a tensor is not stored as one whole box.
        """
        _check_contents(request)
        row_of_tensor = whole_rows(request, "a safetensors file")
        metadata = {"format": "pt", **request.options.metadata}
        header_limit = PEER_MAX_HEADER_NBYTES - _SLACK_NBYTES - sum(len(k) + len(v) for k, v in metadata.items()) * 6
        files = split(
            request.tensors, max_shard_nbytes=request.options.max_shard_nbytes, max_header_nbytes=header_limit
        )
        stem = _stem(request.options.file_name)
        names = [stem + SUFFIX]
        if len(files) > 1:
            names = [f"{stem}-{i + 1:05d}-of-{len(files):05d}{SUFFIX}" for i in range(len(files))]
        file_of, offset = (np.zeros(len(request.boxes), dtype=np.int64) for _ in range(2))
        segments, entries, weight_map = [], [], {}
        for file, (name, tensors) in enumerate(zip(names, files, strict=True)):
            ordered = sorted(tensors, key=lambda t: -request.tensors.dtypes[t].bits)
            described = [
                (request.tensors.fqns[t], request.tensors.dtypes[t], request.tensors.shape_of(t)) for t in ordered
            ]
            data, header = build_header(described, metadata, request.options.origins)
            segments.append(Segment(name, 0, data))
            entries.append(FileEntry(name, header.data_start + header.payload_nbytes))
            for tensor, entry in zip(ordered, header.entries, strict=True):
                weight_map[entry.name] = name
                row = row_of_tensor[tensor]
                if row >= 0:
                    file_of[row], offset[row] = file, header.data_start + entry.start
        commit_path = None
        if len(files) > 1:
            commit_path = stem + INDEX_SUFFIX
            segments.append(Segment(commit_path, 0, write_index(weight_map, int(request.tensors.nbytes.sum()))))
        name = self.name if commit_path is None else "safetensors-index"
        manifest = request.manifest(name, entries, file=file_of, offset=offset)
        return LayOut(manifest, tuple(segments), commit_path)


def split(tensors: TensorTable, *, max_shard_nbytes: int | None, max_header_nbytes: int) -> list[list[int]]:
    """Rows of ``tensors`` for each file, in order: a file ends before the tensor that would exceed a limit."""
    files: list[list[int]] = [[]]
    payload, header = 0, 0
    for row, nbytes in enumerate(tensors.nbytes.tolist()):
        # {"NAME":{"dtype":"F8_E4M3FNUZ","shape":[..],"data_offsets":[..,..]}, with numbers of up to 20 digits; a
        # character of a name takes 4 bytes as UTF-8 or 6 when escaped.
        described = 110 + 6 * len(tensors.fqns[row]) + 21 * int(tensors.ndim[row])
        too_long = max_shard_nbytes is not None and payload + nbytes > max_shard_nbytes
        if files[-1] and (too_long or header + described > max_header_nbytes):
            files.append([])
            payload, header = 0, 0
        files[-1].append(row)
        payload, header = payload + nbytes, header + described
    return files


def _stem(file_name: str | None) -> str:
    if file_name is None:
        return "model"
    if not file_name.endswith(SUFFIX) or file_name == SUFFIX or "/" in file_name:
        raise UsageError(f"{file_name!r} is no name for a safetensors file", hint="name it like model.safetensors")
    return file_name[: -len(SUFFIX)]


def _check_contents(request: WriteRequest) -> None:
    if request.blobs:
        names = ", ".join(repr(b.fqn) for b in request.blobs[:3])
        raise Unsupported(
            f"safetensors holds tensors only, and there are {counted(len(request.blobs), 'other object')}: {names}",
            hint="ckpt export writes the weights alone; --exclude leaves out what it names, --to torch-save keeps all",
        )
    check_types(request.tensors, "safetensors has no such type:", has_type, other="torch-save")


WRITER = SafetensorsWriter()
