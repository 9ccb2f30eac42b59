"""Finds out what a source is: asks every reader."""

from __future__ import annotations

from ckpt_tool.errors import NotFound
from ckpt_tool.formats.base import SURE, TAKEN_ABOVE, Probe, Reader, Source
from ckpt_tool.formats.registry import iter_readers, readers
from ckpt_tool.storage.unfinished import MARKER_NAME

__all__ = ["detect"]


def detect(source: Source) -> Reader:
    """The reader whose probe is surest; on a tie the more specific one.

    Raises:
        NotFound: the source holds no checkpoint; the message says what it is, the hint where one lies.
    """
    url = source.listing.url.rstrip("/")
    if MARKER_NAME in source.listing and source.listing.entry is None:
        raise NotFound(
            "an unfinished target of this tool, not a checkpoint",
            where=url,
            hint="repeat the command that began it with --resume, or with --overwrite to start again",
        )
    probes: list[tuple[Probe, Reader]] = []
    for reader in iter_readers(source.listing.paths):
        probe = reader.probe(source)
        if probe.confidence >= SURE:  # no later reader is more specific
            return reader
        probes.append((probe, reader))
    if probes:
        best, found = max(probes, key=lambda pair: pair[0].confidence)
        if best.confidence > TAKEN_ABOVE:
            return found
    probes = [(reader.probe(source), reader) for reader in readers()]
    best, found = max(probes, key=lambda pair: pair[0].confidence)
    if best.confidence > TAKEN_ABOVE:  # by content, although its files are not called as usual
        return found
    from ckpt_tool.formats.undetected import about_undetected  # 3 ms of start-up that a known source does without

    raise about_undetected(source, probes)
