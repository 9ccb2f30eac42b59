"""The checksums that a zip records of its members, and what is wrong between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckpt_tool.formats._zip.container import container_findings
from ckpt_tool.formats._zip.directory import LOCAL_HEADER_NBYTES, ZipDirectory, ZipMember, local_payload_offset
from ckpt_tool.formats.base import Checksum, Source
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import FileRange

__all__ = ["member_sums"]


def member_sums(
    source: Source, path: str, directory: ZipDirectory, named: Callable[[ZipMember], str | None]
) -> Iterator[Checksum | Finding]:
    """The CRC-32 of each stored member, and faults around the members; compressed ones are checked when decoded.

    Args:
        source: has the file.
        path: the zip.
        directory: its members.
        named: the tensor or object that a member is.
    """
    members = list(directory.members.values())
    firsts = [FileRange(path, m.header_offset, _local_nbytes(m)) for m in members]
    heads = source.store.fetch(firsts) if firsts else []
    payloads = {
        member.name: local_payload_offset(data, member, where=path) for member, data in zip(members, heads, strict=True)
    }
    for member in members:
        if member.is_stored and member.crc32:
            yield Checksum(FileRange(path, payloads[member.name], member.nbytes), member.crc32, named(member))
    yield from container_findings(source, path, directory, payloads, lambda member: member.is_stored)


def _local_nbytes(member: ZipMember) -> int:
    return min(LOCAL_HEADER_NBYTES + len(member.name.encode()), member.next_offset - member.header_offset)
