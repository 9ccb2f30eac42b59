"""Whole tensors beside torch's shards of them, as its Hugging Face writer joins them (``enable_consolidation``).

The joined files tell the global shapes, which shards do not. torch's consolidation (2.13) writes zeros in place of
tensors without dimensions, so of those the shards are likely right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_tool.formats._safetensors.header import Header
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.safetensors.names import SHARD_FILE
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange

__all__ = ["scalar_findings", "shards_beside"]


def shards_beside(source: Source) -> list[str]:
    """Shards at the top or in ``sharded/``, sorted."""
    names = (path for path in source.listing.sizes if path.startswith("sharded/") or "/" not in path)
    return sorted(path for path in names if SHARD_FILE.fullmatch(path))


def scalar_findings(source: Source, joined: Mapping[str, Header], shards: Mapping[str, Header]) -> Iterator[Finding]:
    """Tensors without dimensions that differ between joined files and shards: two requests for each."""
    whole = dict(_scalars(joined))
    for fqn, there in _scalars(shards):
        here = whole.get(fqn)
        if here is None:
            continue
        ours, theirs = source.store.fetch([here, there])
        if ours != theirs:
            said = (
                f"{fqn!r} is {ours.hex()} in {here.path} and {theirs.hex()} in {there.path}; torch's consolidation "
                "zeroes tensors without dimensions, so the shard is likely right"
            )
            yield Finding("differs-from-shard", Severity.WARNING, said, fqn, here)


def _scalars(headers: Mapping[str, Header]) -> Iterator[tuple[str, FileRange]]:
    for path, header in headers.items():
        for entry in header.entries:
            if not entry.shape:
                yield entry.name, FileRange(path, header.data_start + entry.start, entry.nbytes)
