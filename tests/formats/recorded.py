"""What a reader finds recorded in the files: checksums, told apart from faults."""

from __future__ import annotations

from ckpt_tool.formats.base import Checksum, Reader, Source
from ckpt_tool.manifest.model import Manifest

__all__ = ["checksums_of"]


def checksums_of(reader: Reader, source: Source, manifest: Manifest) -> list[Checksum]:
    """The recorded checksums, without what was found around them."""
    return [found for found in reader.checksums(source, manifest) if isinstance(found, Checksum)]
