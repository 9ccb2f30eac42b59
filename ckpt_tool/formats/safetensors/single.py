"""One safetensors file that holds whole tensors: a model, or a PEFT adapter."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tool.errors import NotFound
from ckpt_tool.formats._companions import config_findings, read_companions, tied_note
from ckpt_tool.formats._resolved import ResolvedReader
from ckpt_tool.formats._safetensors.header import Header
from ckpt_tool.formats._safetensors.stored import (
    header_findings,
    header_notes,
    read_headers,
    tables,
    whole_box,
)
from ckpt_tool.formats._split_names import index_names, split_name
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.formats.safetensors.names import RANK_FILE, SHARD_FILE, index_paths, plain_paths
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.sizes import counted

__all__ = ["READER", "SafetensorsReader"]


class SafetensorsReader(ResolvedReader):
    """Reads one file: one request, two for a long header, and one more for each JSON companion."""

    name = "safetensors"

    def probe(self, source: Source) -> Probe:
        """By name; a single file with another name by its first bytes."""
        listing = source.listing
        if listing.entry is not None:
            return self._probe_entry(source, listing.entry)
        paths = plain_paths(listing)
        if index_paths(listing):
            return Probe(0.2, "an index lies beside the safetensors files")
        if len(paths) == 1:
            return Probe(0.9, f"{paths[0]} is the only safetensors file")
        return Probe(0.0, f"{counted(len(paths), 'safetensors file')} at the top, expected one")

    def _probe_entry(self, source: Source, entry: str) -> Probe:
        if RANK_FILE.fullmatch(entry) or SHARD_FILE.fullmatch(entry):
            return Probe(0.3, f"{entry} is named like one rank's part of a larger checkpoint")
        if entry.endswith(".safetensors"):
            return Probe(0.9, f"{entry} is one safetensors file")
        head = source.head(entry, 16)
        length = int.from_bytes(head[:8], "little")
        if head[8:9] == b"{" and 2 <= length <= source.listing.nbytes(entry) - 8:
            return Probe(0.7, f"{entry} starts as a safetensors file does")
        return Probe(0.0, f"{entry} is no safetensors file by name or first bytes")

    def read(self, source: Source) -> Manifest:
        """The manifest; ``info["metadata"]`` is the file's own, companions as `read_companions` puts them."""
        path = self._path(source)
        [header] = read_headers(source, [path])
        boxes = (whole_box(entry, header, 0) for entry in header.entries)
        tensors, chunks, files = tables(boxes, [path], source.listing)
        info, notes = read_companions(source)
        notes = [*header_notes([path], [header]), *_part_notes(source, path, header), *notes]
        notes += tied_note(info, tensors.index)
        info = {"metadata": dict(header.metadata), **info}
        return Manifest(self.name, source.store.url, tensors, chunks, files, info=info, notes=tuple(notes))

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Names that share bytes, a header too long for the reference reader, tied weights stored twice."""
        paths = manifest.files.paths
        yield from header_findings(paths, read_headers(source, paths))
        yield from config_findings(source, manifest)

    def _path(self, source: Source) -> str:
        if source.listing.entry is not None:
            return source.listing.entry
        paths = plain_paths(source.listing)
        if len(paths) != 1:
            raise NotFound(f"expected one safetensors file, found {len(paths)}", where=source.store.url)
        return paths[0]


def _part_notes(source: Source, path: str, header: Header) -> Iterator[str]:
    """What to say about a file that is only a part."""
    numbered = split_name(path)
    if numbered and numbered.family[1] > 1:
        here = index_names(source.listing.sizes, "safetensors")
        beside = "; the index beside it names the others: open the folder" if here else ""
        yield f"{path} is one of {counted(numbered.family[1], 'file')}{beside}"
    if "DCP_SHARDING_INFO" in header.metadata:
        yield f"{path} was written by torch's sharded writer and may hold only parts of its tensors"


READER = SafetensorsReader()
