"""A stand-in is what lies in the place of a file of a checkpoint: a pointer to it, an error page, zeros."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest

if TYPE_CHECKING:
    from ckpt_tool.formats._content import Content

__all__ = ["stand_ins", "with_stand_ins"]

_CUT = frozenset({"truncated-file", "bad-extent"})
_MAX_LOOKED_AT = 32
_MAX_NEAR, _MAX_FAR = 256, 16


def with_stand_ins(findings: Iterable[Finding], source: Source) -> Iterator[Finding]:
    """The findings; those of files that are too short say so where these are something else altogether.

    Cost: a small request for each of the first 32 such files.
    """
    n_looked_at = 0
    for finding in findings:
        path = finding.where.path if finding.where is not None and finding.kind in _CUT else None
        if path is None or not source.listing.sizes.get(path) or n_looked_at == _MAX_LOOKED_AT:
            yield finding
            continue
        n_looked_at += 1
        content = _content(path, source)
        if content is None or not content.is_stand_in:
            yield finding
        else:
            rest = finding.message.removeprefix(path).lstrip()
            yield replace(finding, message=f"{_said(path, content)}: it {rest}", where=FileRange(path, 0, 0))


def stand_ins(manifest: Manifest, source: Source) -> Iterator[Finding]:
    """Files of one object each that are something else altogether: nothing records how long they should be.

    Cost: a small request for each of the first such files, 256 of them near and 16 far away.
    """
    sizes = source.listing.sizes
    whole = [b.where.path for b in manifest.blobs if b.where and b.where.length == sizes.get(b.where.path, 0) > 0]
    for path in whole[: _MAX_FAR if source.store.cost.read_ahead_bytes else _MAX_NEAR]:
        content = _content(path, source)
        if content is not None and content.is_stand_in:
            yield Finding("unreadable-file", Severity.ERROR, _said(path, content), where=FileRange(path, 0, 0))


def _content(path: str, source: Source) -> Content | None:
    from ckpt_tool.formats._content import HEAD_NBYTES, content_of  # a sound checkpoint is checked without it

    return content_of(source.head(path, HEAD_NBYTES))


def _said(path: str, content: Content) -> str:
    return f"{path} is {content.what}" + (f" ({content.fix})" if content.fix else "")
