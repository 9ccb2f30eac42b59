"""Sharded safetensors of torch's Hugging Face writer for DCP: each rank's boxes in files of its own.

``shard-{rank + 1}-model-{i}-of-{n}.safetensors``; each header's ``__metadata__`` has ``DCP_SHARDING_INFO``, a JSON
string ``{fqn: {"saved_offsets": [..]}}`` (torch/distributed/checkpoint/_hf_utils.py, torch 2.13). The global shape is
in none of them: it is that of the joined file beside them, where there is one, else the furthest end of any box, so
that a shard missing at the end cannot be told from a smaller tensor. Ranks that had nothing to save write no file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._companions import read_companions
from ckpt_tool.formats._resolved import ResolvedReader
from ckpt_tool.formats._safetensors.header import Header
from ckpt_tool.formats._safetensors.stored import (
    StoredBox,
    header_findings,
    header_notes,
    read_headers,
    tables,
)
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.formats.safetensors.joined import scalar_findings
from ckpt_tool.formats.safetensors.names import SHARD_FILE, plain_paths
from ckpt_tool.geometry.absent import absent_numbers
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.sizes import counted, some_of
from ckpt_tool.storage.store import Listing

__all__ = ["READER", "DcpHfReader"]

_INFO_KEY = "DCP_SHARDING_INFO"
_MAX_FINDINGS = 100  # of one kind, where numbers of names are absurd


class DcpHfReader(ResolvedReader):
    """Reads a folder of shards: one request per file, two for a long header."""

    name = "dcp-hf"

    def probe(self, source: Source) -> Probe:
        """By name; ``sharded/`` counts only while nothing consolidated lies above it."""
        paths = _shard_paths(source.listing)
        if source.listing.entry is not None:
            return Probe(0.4 if paths else 0.0, f"{source.listing.entry} alone has no more than parts of tensors")
        if paths:
            return Probe(0.9, f"{counted(len(paths), 'file')} named like {paths[0]}")
        below = [p for p in source.listing.paths if SHARD_FILE.fullmatch(p)]
        if below:
            return Probe(0.3, f"shards in {below[0].rpartition('/')[0]}/, and consolidated files above them")
        return Probe(0.0, "no file named shard-NNNNN-model-NNNNN-of-NNNNN.safetensors")

    def read(self, source: Source) -> Manifest:
        """The manifest; global shapes are the furthest ends of the boxes, which a note says.

        Raises:
            FormatError: a shard does not say where its tensors belong, or two disagree.
        """
        paths = _shard_paths(source.listing)
        if not paths:
            raise NotFound("no shard-NNNNN-model-NNNNN-of-NNNNN.safetensors", where=source.listing.url)
        headers = read_headers(source, paths)
        offsets = [_saved_offsets(path, header) for path, header in zip(paths, headers, strict=True)]
        shapes = _global_shapes(paths, headers, offsets)
        joined = _joined(source, shapes)
        whole = {entry.name: entry.shape for header in joined.values() for entry in header.entries}
        lost = [
            StoredBox(entry.name, entry.dtype, entry.shape, (), (), 0, 0, 0)
            for header in joined.values()
            for entry in header.entries
            if entry.name not in shapes
        ]
        proven = [fqn for fqn, shape in shapes.items() if _holds(whole.get(fqn), shape)]
        shapes |= {fqn: whole[fqn] for fqn in proven}
        boxes = (
            StoredBox(
                entry.name, entry.dtype, shapes[entry.name], offsets[row][entry.name], entry.shape,
                row, header.data_start + entry.start, entry.nbytes, _rank(paths[row]),
            )
            for row, header in enumerate(headers)
            for entry in header.entries
        )  # fmt: skip
        tensors, chunks, files = tables(chain(boxes, lost), paths, source.listing)
        info, notes = read_companions(source)
        metadata = {k: v for k, v in headers[0].metadata.items() if k != _INFO_KEY}
        notes = [*header_notes(paths, headers), *(f.message for f in _number_findings(paths)), *notes]
        if joined:
            notes.append(
                f"{some_of(list(joined))}: the same tensors whole, which tell their shapes; left out, as shards "
                "are here"
            )
        if len(proven) < len(shapes):
            notes.append(
                "the format stores no global shapes: each is the furthest end of the boxes found, so a last shard that "
                "is missing cannot be noticed"
            )
        info = {"metadata": metadata, "left_out": list(joined), **info} if joined else {"metadata": metadata, **info}
        return Manifest(self.name, source.store.url, tensors, chunks, files, info=info, notes=tuple(notes))

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Missing numbers in the names, and faults of single files. One request per file."""
        paths = manifest.files.paths
        headers = read_headers(source, paths)
        yield from header_findings(paths, headers)
        yield from _number_findings(paths)
        joined = _joined(source, manifest.tensors.index)
        yield from scalar_findings(source, joined, dict(zip(paths, headers, strict=True)))
        whole = {entry.name: (path, entry.shape) for path, header in joined.items() for entry in header.entries}
        unproven = 0
        for row, fqn in enumerate(manifest.tensors.fqns):
            shape = manifest.tensors.shape_of(row)
            path, stated = whole.get(fqn, ("", None))
            unproven += stated is None
            if stated is not None and not _holds(stated, shape):
                said = f"{fqn!r} is {list(stated)} in {path}, and its shards reach to {list(shape)}"
                yield Finding("differs-from-shard", Severity.WARNING, said, fqn, FileRange(path, 0, 0))
        if unproven:
            said = (
                f"no file records the global shapes of the {counted(unproven, 'tensor')}: that the last "
                "shard is here cannot be proven"
            )
            yield Finding("unproven-shape", Severity.WARNING, said)


def _joined(source: Source, fqns: Collection[str]) -> dict[str, Header]:
    """Headers by path of the files beside the shards that hold some of their tensors, whole."""
    paths = plain_paths(source.listing)
    headers = zip(paths, read_headers(source, paths), strict=True)
    return {path: header for path, header in headers if any(entry.name in fqns for entry in header.entries)}


def _holds(whole: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
    """Whether shards that reach to ``shape`` can be those of a tensor of shape ``whole``."""
    return whole is not None and len(whole) == len(shape) and all(n <= m for n, m in zip(shape, whole, strict=True))


def _shard_paths(listing: Listing) -> tuple[str, ...]:
    """Shards at the top; else those in ``sharded/`` when no whole file lies above."""
    top = tuple(p for p in listing.match("shard-*.safetensors") if SHARD_FILE.fullmatch(p))
    if top or plain_paths(listing):
        return top
    return tuple(p for p in listing.match("sharded/shard-*.safetensors") if SHARD_FILE.fullmatch(p))


def _rank(path: str) -> int:
    match = SHARD_FILE.fullmatch(path)
    return int(match["shard"]) - 1 if match else -1


def _saved_offsets(path: str, header: Header) -> dict[str, tuple[int, ...]]:
    """Where each tensor of a file starts in its global tensor."""
    try:
        found: Any = json.loads(header.metadata.get(_INFO_KEY, "null"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{_INFO_KEY} is not JSON: {error}", where=path) from error
    if not isinstance(found, dict):
        raise FormatError(
            f"expected {_INFO_KEY} in its __metadata__, which says where its tensors belong",
            where=path,
            hint="if the file holds whole tensors, name it alone, under another name",
        )
    offsets = {}
    for entry in header.entries:
        stated = found.get(entry.name)
        saved = stated.get("saved_offsets") if isinstance(stated, dict) else None
        if (
            not isinstance(saved, list)
            or len(saved) != len(entry.shape)
            or not all(type(n) is int and 0 <= n < 1 << 62 for n in saved)
        ):
            raise FormatError(
                f"{entry.name!r}: expected {len(entry.shape)} saved_offsets, got {str(stated)[:60]}", where=path
            )
        # The header counts packed fp4 values in pairs; so do the offsets here.
        offsets[entry.name] = tuple(saved)
    return offsets


def _global_shapes(
    paths: Sequence[str], headers: Sequence[Header], offsets: Sequence[dict[str, tuple[int, ...]]]
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path, header, starts in zip(paths, headers, offsets, strict=True):
        for entry in header.entries:
            ends = tuple(o + s for o, s in zip(starts[entry.name], entry.shape, strict=True))
            known = shapes.get(entry.name, ends)
            if len(known) != len(ends):
                raise FormatError(
                    f"{entry.name!r} has {counted(len(ends), 'dimension')} here and {len(known)} in another shard",
                    where=path,
                )
            shapes[entry.name] = tuple(max(a, b) for a, b in zip(known, ends, strict=True))
    return shapes


def _number_findings(paths: Sequence[str]) -> Iterator[Finding]:
    names = [m for m in map(SHARD_FILE.fullmatch, paths) if m]
    shards = {int(m["shard"]) for m in names}
    for number in absent_numbers(shards, max(shards), first=1, at_most=_MAX_FINDINGS):
        yield Finding(
            "missing-shard",
            Severity.WARNING,
            f"no file of shard {number:05d}, though there is one of shard {max(shards):05d}: its rank saved nothing, "
            "or the file is lost",
            where=FileRange(f"shard-{number:05d}-model-*.safetensors", 0, 0),
        )
    counts = sorted({int(m["count"]) for m in names})
    for number in absent_numbers({int(m["number"]) for m in names}, max(counts), first=1, at_most=_MAX_FINDINGS):
        yield Finding(
            "missing-file",
            Severity.ERROR,
            f"no rank has a file model-{number:05d}-of-{max(counts):05d}",
            where=FileRange(f"shard-*-model-{number:05d}-of-{max(counts):05d}.safetensors", 0, 0),
        )


READER = DcpHfReader()
