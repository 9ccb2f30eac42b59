"""A location is the folder of one step in what the user named: the run's folder, or the step's own.

A step's folder has sections (``model``, ``optimizer``) with a ``.metadata`` each, and ``extra_state``. The run's folder
has ``global_step_<N>`` and a tracker with the newest number (bytecheckpoint 0.0.2, ``storage/write_checkpoint.py``).
"""

from __future__ import annotations

import re

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._dcp.metadata import METADATA_NAME, foreign_root
from ckpt_tool.formats.base import Source
from ckpt_tool.records import dataclass
from ckpt_tool.storage.virtual.subfolder import Subfolder, sublisting

__all__ = ["MODULE", "SECTIONS", "TRACKER", "Location", "foreign_step", "locate", "within"]

MODULE = "bytecheckpoint.checkpointer.meta_type"
SECTIONS = ("model", "optimizer")
TRACKER = "latest_checkpointed_iteration.txt"
_STEP = re.compile(r"global_step_(\d{1,18})")
_HEAD_NBYTES = 256
_MAX_TRACKER_NBYTES = 64
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Location:
    """Where one step lies."""

    folder: str
    """Below the source's root; empty for the root itself."""
    step: int | None
    sections: tuple[str, ...]
    notes: tuple[str, ...] = ()
    is_section: bool = False
    """Whether the root is the folder of one section, taken out of its step."""


def within(source: Source, folder: str) -> Source:
    """The files of a folder of the source, with paths relative to it; the source itself for the empty name."""
    if not folder:
        return source
    return Source(Subfolder(source.store, folder), sublisting(source.listing, folder), is_salvage=source.is_salvage)


def foreign_step(source: Source, folder: str) -> str | None:
    """None when the metadata of a step's folder is ByteCheckpoint's, else what it is: one request."""
    inner = within(source, folder)
    path = next((f"{section}/{METADATA_NAME}" for section in _sections(inner)), METADATA_NAME)
    return foreign_root(inner.head(path, _HEAD_NBYTES), MODULE)


def locate(source: Source) -> Location | None:
    """The step to read; None when nothing here is laid out like one.

    The root itself, a step or one section of it; else the step that the tracker names; without a tracker the only step
    there is. Costs one request for the tracker where there is one.

    Raises:
        NotFound: the tracker names a step that is not there; those that are there are listed.
        FormatError: the tracker holds no number.
    """
    if source.listing.entry is not None:
        return None
    sections = _sections(source)
    name = source.listing.url.rstrip("/").rpartition("/")[2]
    if METADATA_NAME in source.listing:
        section = name if name in SECTIONS else "model"
        return Location("", None, (section,), (f"one section alone, read as {section}",), is_section=True)
    if sections:
        named = _STEP.fullmatch(name)
        return Location("", int(named[1]) if named else None, sections)
    steps = _steps(source)
    if not steps:
        return None
    if TRACKER in source.listing:
        return _tracked(source, steps)
    if len(steps) > 1:
        return None
    ((step, folder),) = steps.items()
    return Location(folder, step, _sections(within(source, folder)), (f"no {TRACKER}: the only step is read",))


def _sections(source: Source) -> tuple[str, ...]:
    return tuple(section for section in SECTIONS if f"{section}/{METADATA_NAME}" in source.listing)


def _steps(source: Source) -> dict[int, str]:
    """Folders of steps that have metadata, by number."""
    folders = {path.partition("/")[0] for path in source.listing.sizes if path.endswith(f"/{METADATA_NAME}")}
    numbered = {int(match[1]): folder for folder in folders if (match := _STEP.fullmatch(folder))}
    return {step: numbered[step] for step in sorted(numbered) if _sections(within(source, numbered[step]))}


def _tracked(source: Source, steps: dict[int, str]) -> Location:
    where = f"{source.listing.url.rstrip('/')}/{TRACKER}"
    text = source.head(TRACKER, _MAX_TRACKER_NBYTES).decode("ascii", "replace").strip()
    if not text.isdecimal() or source.listing.nbytes(TRACKER) > _MAX_TRACKER_NBYTES:
        raise FormatError(f"expected the number of a step, got {text[:40]!r}", where=where)
    step = int(text)
    listed = ", ".join(list(steps.values())[-_SHOWN:])
    if step not in steps:
        raise NotFound(
            f"{TRACKER} names {step:,}, but global_step_{step} is not there or has no {METADATA_NAME}; there are: "
            f"{listed}",
            where=source.listing.url,
            hint=f'name one of them: "{source.listing.url.rstrip("/")}/{list(steps.values())[-1]}"',
        )
    others = [folder for number, folder in steps.items() if number != step]
    note = f"{TRACKER} names {step:,}: {steps[step]} is read"
    note += f"; beside it: {', '.join(others[-_SHOWN:])}" if others else ""
    return Location(steps[step], step, _sections(within(source, steps[step])), (note,))
