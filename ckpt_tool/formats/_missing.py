"""Files of ranks that are not here, told by those that are: a few of them say how many ranks there were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ckpt_tool.formats.base import Reader, Source
from ckpt_tool.sizes import counted, some_of

__all__ = ["LackingReader", "missing_text"]


@runtime_checkable
class LackingReader(Reader, Protocol):
    """A reader of files that each rank writes, and that can tell which others there should be without opening all."""

    def lacking(self, source: Source) -> tuple[str, ...]:
        """What a checkpoint lacks by its names and a few small files, a sentence each: for ``ls``."""
        ...


def missing_text(paths: Sequence[str]) -> str:
    """A sentence on files that are not here, which has the first of them.

    >>> missing_text(["a", "b", "c", "d"])
    '4 files are missing: a, b, c and 1 more'
    """
    return f"{counted(len(paths), 'file', 'are')} missing: {some_of(paths)}"
