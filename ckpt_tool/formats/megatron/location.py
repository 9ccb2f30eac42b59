"""A location is the folder of one iteration in what the user named: the run's folder, or the iteration's own.

``latest_checkpointed_iteration.txt`` (the tracker) is a text file with a number, or the word ``release``; iterations
lie in ``iter_0000010`` or ``release`` beside it. Source: Megatron-LM ``training/checkpointing.py``, ``read_metadata``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats.base import Source
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import some_of
from ckpt_tool.storage.virtual.subfolder import Subfolder, sublisting

__all__ = ["TRACKER", "Location", "iterations", "locate", "other_iteration", "within"]

TRACKER = "latest_checkpointed_iteration.txt"
_OF_BYTECHECKPOINT = "global_step_"
"""Folders of ByteCheckpoint, which calls its tracker alike."""
_ITERATION = re.compile(r"iter_(\d{7,})|release")
_MAX_TRACKER_NBYTES = 64
_SHOWN = 8

_NEMO = {"weights": "NeMo 2", "model_weights": "a .nemo archive"}
"""Folders of NeMo, and who writes them."""

IsComplete = Callable[[Iterable[str]], bool]
"""Whether file names, relative to an iteration's folder, are those of a complete checkpoint."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where one iteration lies."""

    folder: str
    """Below the source's root; empty for the root itself."""
    notes: tuple[str, ...] = ()
    """Which iteration was taken, and what lies beside it."""

    @property
    def number(self) -> int | None:
        """Of the iteration, by the name of its folder."""
        match = _ITERATION.fullmatch(self.folder)
        return None if match is None or match[1] is None else int(match[1])


def other_iteration(url: str, folder: str, iteration: int | None) -> str | None:
    """What to say where the folder of an iteration holds another one's state; None where it does not, or nothing tells.

    >>> other_iteration("run", "iter_0000020", 10)
    'iter_0000020 holds the state of iteration 10: the folder was renamed, or files of another one were put there'
    """
    name = (folder or url.rstrip("/")).rpartition("/")[2]
    match = _ITERATION.fullmatch(name)
    if match is None or match[1] is None or iteration in (None, int(match[1])):
        return None
    return (
        f"{name} holds the state of iteration {iteration:,}: the folder was renamed, or files of another one were put "
        "there"
    )


def iterations(paths: Iterable[str]) -> dict[str, list[str]]:
    """Folders of iterations and the files in each, relative to it; by number, ``release`` first.

    >>> iterations(["iter_0000020/a", "iter_0000010/b/c", "logs/x"])
    {'iter_0000010': ['b/c'], 'iter_0000020': ['a']}
    """
    found: dict[str, list[str]] = {}
    for path in paths:
        folder, separator, rest = path.partition("/")
        if separator and _ITERATION.fullmatch(folder):
            found.setdefault(folder, []).append(rest)
    return {folder: found[folder] for folder in sorted(found, key=lambda folder: (len(folder), folder))}


def within(source: Source, folder: str) -> Source:
    """The files of a folder of the source, with paths relative to it; the source itself for the empty name."""
    if not folder:
        return source
    return Source(Subfolder(source.store, folder), sublisting(source.listing, folder), is_salvage=source.is_salvage)


def locate(source: Source, is_complete: IsComplete, is_ours: Callable[[str], bool]) -> Location | None:
    """The iteration to read; None when there is none of this format.

    At the root itself, or in its ``weights`` folder (NeMo 2) or ``model_weights`` (.nemo archives); else the one that
    the tracker names, or without a tracker the newest complete one.

    Costs one request for the tracker where there is one.

    Args:
        source: what the user named.
        is_complete: whether an iteration's files are complete.
        is_ours: whether a path, relative to the source, is one that only this format has.

    Raises:
        NotFound: the tracker names an iteration that is not there or not complete, the complete ones are listed.
        FormatError: the tracker holds neither a number nor ``release``.
    """
    listing = source.listing
    if listing.entry is not None and listing.entry != TRACKER:
        return None
    if is_complete(path for path in listing.sizes):
        return Location("")
    for folder, writer in _NEMO.items():
        inside = [path.removeprefix(f"{folder}/") for path in listing.sizes if path.startswith(f"{folder}/")]
        if is_complete(inside):
            return Location(folder, (f"the weights lie in the folder {folder!r}, as {writer} writes them",))
    if not any(is_ours(path) for path in listing.sizes):
        return None
    found = iterations(listing.sizes)
    complete = [folder for folder, files in found.items() if is_complete(files)]
    if TRACKER in listing and (found or not any(path.startswith(_OF_BYTECHECKPOINT) for path in listing.sizes)):
        return _tracked(source, found, complete)
    if not complete:
        return None
    others = [folder for folder in found if folder != complete[-1]]
    note = f"no {TRACKER}: the newest complete iteration, {complete[-1]}, is read"
    return Location(complete[-1], (note + (f"; beside it: {_listed(others)}" if others else ""),))


def _tracked(source: Source, found: Collection[str], complete: list[str]) -> Location:
    """The iteration that the tracker names."""
    nbytes = source.listing.nbytes(TRACKER)
    text = source.head(TRACKER, _MAX_TRACKER_NBYTES).decode("ascii", "replace").strip()
    where = f"{source.listing.url.rstrip('/')}/{TRACKER}"
    if nbytes > _MAX_TRACKER_NBYTES or not (text == "release" or text.isdecimal()):
        url = source.listing.url.rstrip("/")
        hint = f'put one there, or name a folder of {_listed(complete)}: "{url}/{complete[-1]}"' if complete else None
        raise FormatError(f"expected an iteration's number or 'release', got {text[:40]!r}", where=where, hint=hint)
    folder = text if text == "release" else f"iter_{int(text):07d}"
    if folder in complete:
        ordered = list(found)
        newer = [] if folder == "release" else ordered[ordered.index(folder) + 1 :]
        note = f"{TRACKER} names {text}: {folder} is read"
        if newer:
            unfinished = [name for name in newer if name not in complete]
            state = f", of which {_listed(unfinished)} unfinished" if unfinished else ""
            note += f"; newer than it: {_listed(newer)}{state}"
        return Location(folder, (note,))
    what = "is not complete" if folder in found else "is not there, or an empty folder"
    hint = f'name one of them: "{source.listing.url.rstrip("/")}/{complete[-1]}"' if complete else None
    if f"{folder}/.metadata" in source.listing:
        hint = f'saved as fsdp_dtensor or torch_dcp, it is plain DCP: "{source.listing.url.rstrip("/")}/{folder}"'
    listed = _listed(complete) if complete else "none"
    raise NotFound(
        f"{TRACKER} names {text}, but {folder} {what}; complete iterations: {listed}",
        files=() if folder in found else (TRACKER,),
        where=source.listing.url,
        hint=hint,
    )


def _listed(folders: list[str]) -> str:
    return some_of(folders[-_SHOWN:], _SHOWN, n=len(folders))
