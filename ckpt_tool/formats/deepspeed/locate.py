"""Where the tag folder of a source is: the root itself, or the folder that the tracker file ``latest`` names."""

from __future__ import annotations

import re

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.deepspeed.names import LATEST, LATEST_UNIVERSAL, tag_files, tags_below, what_file
from ckpt_tool.records import dataclass

__all__ = ["Located", "locate", "refuse_single_file", "single_file_text"]

_MAX_TRACKER_NBYTES = 1024
_SHOWN = 4
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Located:
    """The tag folder that is meant."""

    folder: str
    """With a slash behind it, empty for the root."""
    tag: str | None
    """As the tracker says it, None where the root is the tag folder."""


def locate(source: Source, tracker: str) -> Located:
    """The tag folder that ``tracker`` names, the root where there is none. At most one small request.

    Raises:
        NotFound: the tracker names a folder that is not here.
        FormatError: the tracker does not hold a folder's name.
    """
    if tracker not in source.listing:
        return Located("", None)
    raw = source.head(tracker, _MAX_TRACKER_NBYTES)
    tag = _tag(raw)
    where = f"{source.listing.url.rstrip('/')}/{tracker}"
    if tag is None:
        raise FormatError(f"expected the name of a folder, got {raw[:40]!r}", where=where, hint=_hint(source))
    folder = tag + "/"
    if not any(path.startswith(folder) for path in source.listing.sizes):
        raise NotFound(f"names {tag!r}, and there is no such folder here", where=where, hint=_hint(source))
    return Located(folder, tag)


def _hint(source: Source) -> str:
    """Folders that could be meant, where the tracker names none."""
    here = sorted(tags_below(source.listing), key=lambda tag: [int(n) for n in _NUMBER.findall(tag)])
    url = source.listing.url.rstrip("/")
    more = f" (beside it: {', '.join(here[-1 - _SHOWN : -1])})" if len(here) > 1 else ""
    return f'give the folder of a step: "{url}/{here[-1]}"{more}' if here else "the copy is not complete"


def _tag(raw: bytes) -> str | None:
    """The folder's name that a tracker file holds, None where it holds something else."""
    try:
        tag = raw.decode().strip()
    except UnicodeDecodeError:
        return None
    is_name = tag not in ("", ".", "..") and not any(c in tag for c in "/\\\0\n")
    return tag if is_name and len(raw) < _MAX_TRACKER_NBYTES else None


def single_file_text(source: Source) -> str | None:
    """What the one file that was named is, when it is part of a checkpoint whose other files lie beside it."""
    entry = source.listing.entry
    if entry is None:
        return None
    if entry in (LATEST, LATEST_UNIVERSAL):
        tag = _tag(source.head(entry, _MAX_TRACKER_NBYTES))
        return None if tag is None else f"the file that names the last step, {tag!r}"
    name = entry.rpartition("/")[2]
    what = what_file(name)
    if what is None:
        return None
    folder = entry[: len(entry) - len(name)]
    beside = tag_files(source.listing.sizes, folder)
    n_beside = len(beside.models) + len(beside.optims) + len(beside.layers) + len(beside.experts)
    return what if n_beside > 1 else None


def refuse_single_file(source: Source) -> None:
    """Nothing, unless one file of several was named.

    Raises:
        NotFound: it says what the file is, and what to type.
    """
    what = single_file_text(source)
    if what is not None:
        url = source.listing.url.rstrip("/")
        raise NotFound(
            f"one file of a DeepSpeed checkpoint, not the whole: {what}",
            where=f"{url}/{source.listing.entry}",
            hint=f'give the folder: "{url}"',
        )
