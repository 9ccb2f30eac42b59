"""An edited checkpoint is a list of files made of old bytes and new: headers are written anew, payload is taken over.

What an editor of one format returns; whoever writes the files links, clones or copies the old bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.records import dataclass, field

__all__ = ["Edit", "EditedFile", "EditedFiles", "Editor"]


@dataclass(frozen=True, slots=True)
class Edit:
    """What is to become of a checkpoint."""

    names: Mapping[str, str]
    """New name of each tensor that stays, by its name."""
    objects: Mapping[str, str]
    """Likewise of objects that are not tensors."""
    metadata: Mapping[str, str | None] = field(default_factory=dict)
    """Free text that the format keeps: values to set, None to remove."""
    repair: str | None = None
    """What becomes of tensors that share bytes though the format forbids it: ``copy`` or ``drop``; None to stop."""


@dataclass(frozen=True, slots=True)
class EditedFile:
    """One file of the result."""

    path: str
    parts: tuple[bytes | FileRange, ...]
    """New bytes, and ranges of the old files, in order."""

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return sum(part.length if isinstance(part, FileRange) else len(part) for part in self.parts)

    def is_link(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is an old file as it was; ``sizes`` are the old files'."""
        if len(self.parts) != 1 or not isinstance(self.parts[0], FileRange):
            return False
        only = self.parts[0]
        return only.offset == 0 and only.length == sizes.get(only.path)


@dataclass(frozen=True, slots=True)
class EditedFiles:
    """What an editor makes of a checkpoint."""

    files: tuple[EditedFile, ...]
    """All files that belong to the tensors; others of the folder are taken over as they are."""
    replaced: tuple[str, ...]
    """Old files that these stand for, and that are not taken over."""
    commit_path: str | None
    """The file that makes it a checkpoint."""
    notes: tuple[str, ...] = ()


class Editor(Protocol):
    """Edits one format without moving payload through memory. Stateless."""

    def lay_out(self, source: Source, manifest: Manifest, edit: Edit) -> EditedFiles:
        """The files of the edited checkpoint.

        Raises:
            Unsupported: this checkpoint cannot be edited so.
            FormatError: names share bytes, and nothing was said about it.
        """
        ...
