"""What readers of torch files have in common once their manifest is made; each still reads and probes by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt_tool.formats._torch_file import headers
from ckpt_tool.formats.base import Checksum, Source
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.tables import ChunkTable, IntArray

__all__ = ["TorchFilesReader"]


class TorchFilesReader:
    """Three of a ``Reader``'s methods, for checkpoints whose every file is one of torch.save."""

    def resolve(self, source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:
        """Payload offsets by local headers: one request per file, and the headers of the rows asked for."""
        return headers.resolve(source, manifest, rows)

    def load_blobs(self, source: Source, manifest: Manifest, rows: Sequence[int]) -> tuple[Blob, ...]:
        """The blobs as they are: values come with each file's pickle."""
        del source, rows
        return manifest.blobs

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
        """The CRC-32 of each storage of each file, and of the pickles."""
        return headers.checksums(source, manifest)
