"""Local headers have the last word on where payload starts: chunks are checked against them, and storages located.

Everything here starts from the files again (their directories), so that readers stay stateless.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from ckpt_tool.errors import FormatError
from ckpt_tool.formats._torch_file.archive import predicted_offset, storage_members, zip_directory
from ckpt_tool.formats._zip.container import MAX_SMALL_NBYTES, container_findings
from ckpt_tool.formats._zip.directory import LOCAL_HEADER_NBYTES, Read, ZipMember, local_payload_offset
from ckpt_tool.formats.base import Checksum, Source
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.geometry.runs import merge_runs
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileEntry, FileRange, Manifest
from ckpt_tool.manifest.subset import only_files
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable, FileTable, IntArray
from ckpt_tool.records import dataclass
from ckpt_tool.storage.fetch import fetch_all

__all__ = ["StorageRecord", "checksums", "only_zips", "plain_zips", "resolve", "storage_records"]


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """One stored storage of a zip, by its own local header."""

    key: str
    where: FileRange
    crc32: int
    """0 where none is recorded."""


def resolve(source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:
    """The chunks of ``manifest``, unresolved ones among ``rows`` moved to where their local headers say.

    Costs for each file one request for its directory, and the local headers, 30 bytes and a name each, neighbours read
    together as the store's cost says.

    Raises:
        FormatError: a local header is not the directory's, or no storage is where a chunk should be.
    """
    chunks = manifest.chunks
    wanted = distinct(np.asarray(rows, dtype=np.int64))
    wanted = wanted[(chunks.flags[wanted] & ChunkFlag.UNRESOLVED) != 0]
    if not len(wanted):
        return chunks
    offset, flags = chunks.offset.copy(), chunks.flags.copy()
    files = distinct(chunks.file[wanted]).tolist()
    paths = [manifest.files.paths[file] for file in files]
    opened = fetch_all(lambda path: zip_directory(source, path), paths, concurrency=source.store.cost.concurrency)
    for file, path, (directory, read) in zip(files, paths, opened, strict=True):
        members = sorted((m for m in storage_members(directory).values() if m.is_stored), key=predicted_offset)
        starts = [predicted_offset(member) for member in members]
        own = wanted[chunks.file[wanted] == file]
        owners: dict[int, list[int]] = {}
        for row in own.tolist():
            at = bisect_right(starts, int(offset[row])) - 1
            if at < 0 or offset[row] + chunks.length[row] > starts[at] + members[at].nbytes:
                raise FormatError("no storage lies where a chunk was found", where=f"{path}:{int(offset[row])}")
            owners.setdefault(at, []).append(row)
        actual = _payload_offsets(source, path, read, [members[at] for at in owners])
        for (at, owned), start in zip(owners.items(), actual, strict=True):
            offset[owned] += start - starts[at]
            flags[owned] &= ~np.uint8(ChunkFlag.UNRESOLVED)
    return chunks.replace(offset=offset, flags=flags)


def _payload_offsets(source: Source, path: str, read: Read, members: Sequence[ZipMember]) -> list[int]:
    """Where the payload of each member starts, by its local header, in the order of ``members``."""
    starts = np.array([m.header_offset for m in members], dtype=np.int64)
    lengths = np.array(
        [min(LOCAL_HEADER_NBYTES + len(m.name.encode()), m.next_offset - m.header_offset) for m in members],
        dtype=np.int64,
    )
    cost = source.store.cost
    read_starts, read_lengths, run_to_read = merge_runs(
        starts, lengths, max_gap_bytes=cost.max_gap_bytes, max_read_bytes=cost.max_read_bytes, split=False
    )
    ranges = list(zip(read_starts.tolist(), read_lengths.tolist(), strict=True))
    pages = fetch_all(lambda one: read(*one), ranges, concurrency=cost.concurrency)
    offsets = []
    for member, start, length, number in zip(
        members, starts.tolist(), lengths.tolist(), run_to_read.tolist(), strict=True
    ):
        at = start - ranges[number][0]
        offsets.append(local_payload_offset(pages[number][at : at + length], member, where=path))
    return offsets


def plain_zips(manifest: Manifest) -> list[FileEntry]:
    """Files that are zips, by what the reader noted: no legacy streams, no safetensors; of decoded members too."""
    legacy = frozenset(manifest.info.get("legacy_files", ()))
    plain = [entry for entry in manifest.files if entry.codec is None and entry.path not in legacy]
    found = {entry.path: entry for entry in plain if not entry.path.endswith(".safetensors")}
    for entry in manifest.files:
        part = entry.part
        if entry.codec is None or part is None or part.path in legacy:
            continue
        if entry.path.startswith(f"{part.path}!"):
            found.setdefault(part.path, FileEntry(part.path, -1))
    return list(found.values())


def only_zips(source: Source, manifest: Manifest, paths: Sequence[str]) -> Manifest:
    """What lies in some files, those that begin as zips do; files that no tensor lies in are there too."""
    found = [path for path in paths if path in source.listing and source.head(path, 4) == b"PK\x03\x04"]
    part = only_files(manifest, [path in found for path in manifest.files.paths])
    others = [FileEntry(path, -1) for path in found if path not in part.files.index]
    return part.replace(files=FileTable((*part.files, *others)))


def storage_records(source: Source, path: str) -> list[StorageRecord]:
    """Every stored storage that is not empty; requests as `resolve` of one file."""
    directory, read = zip_directory(source, path)
    members = {k: m for k, m in storage_members(directory).items() if m.is_stored and m.nbytes}
    offsets = _payload_offsets(source, path, read, list(members.values()))
    return [
        StorageRecord(key, FileRange(path, start, member.nbytes), member.crc32)
        for (key, member), start in zip(members.items(), offsets, strict=True)
    ]


def checksums(source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
    """The CRC-32 that zips record of their members, which torch itself never checks, and what else is wrong with them.

    A CRC of 0 was not computed (``torch.serialization.set_crc32_options(False)``, ``skip_data``) and is left out. That
    of a compressed storage is of its content. The bytes around the members are held against each other
    (``container-damage``, ``container-odd``).
    """
    chunks = resolve(source, manifest, np.arange(len(manifest.chunks), dtype=np.int64))
    decoded = {entry.path for entry in manifest.files if entry.codec is not None}
    for entry in plain_zips(manifest):
        file = manifest.files.index.get(entry.path, -1)
        order = np.flatnonzero(chunks.file == file)
        order = order[np.argsort(chunks.offset[order], kind="stable")]
        starts = chunks.offset[order].tolist()
        directory, read = zip_directory(source, entry.path)
        members = [m for m in directory.members.values() if _is_covered(m) or f"{entry.path}!{m.name}" in decoded]
        payloads = _payloads(source, entry.path, read, members)
        for member in members:
            if not member.crc32:
                continue
            where = FileRange(entry.path, payloads[member.name], member.nbytes)
            if not member.is_stored:
                where = FileRange(f"{entry.path}!{member.name}", 0, member.nbytes)
            at = bisect_left(starts, where.offset)
            is_used = member.is_stored and at < len(starts) and starts[at] < where.end
            fqn = manifest.tensors.fqns[chunks.tensor[order[at]]] if is_used else None
            yield Checksum(where, member.crc32, fqn)
        others = [member for name, member in directory.members.items() if name not in payloads]
        try:  # behind the checksums, which must not be lost with it
            payloads |= _payloads(source, entry.path, read, others)
        except FormatError as error:
            yield Finding("container-damage", Severity.ERROR, str(error), where=FileRange(entry.path, 0, 0))
        else:
            yield from container_findings(source, entry.path, directory, payloads, _is_covered)


def _payloads(source: Source, path: str, read: Read, members: Sequence[ZipMember]) -> dict[str, int]:
    """Where the payload of each member starts, by its name."""
    starts = _payload_offsets(source, path, read, members) if members else []
    return {member.name: start for member, start in zip(members, starts, strict=True)}


def _is_covered(member: ZipMember) -> bool:
    """Whether the member's own checksum is one of those that are taken of payload."""
    is_payload = "/data/" in member.name or member.name.endswith("/data.pkl") or member.nbytes > MAX_SMALL_NBYTES
    return is_payload and member.is_stored and member.nbytes > 0
