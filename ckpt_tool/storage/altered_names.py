"""What programs that fetch, copy, pack or keep files in a cloud make of names, and which file such a name stands for.

A file that a checkpoint should have, and has not, often lies beside its place under such a name. By names alone.

Sources: manual pages of rsync (``.NAME.aB3dE9``), wget (``NAME.1``), curl, aria2, azcopy and rclone; browsers; the
finders of macOS (``.NAME.icloud``, ``NAME copy``) and Windows (``NAME - Copy``, ``NAME (1)``); DVC.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping

from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, shell_word

__all__ = ["Altered", "is_placeholder", "is_unfinished", "under_other_names"]

_UNFINISHED = (
    ".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".download", ".opdownload", ".filepart", ".tmp",
    ".temp", ".gstmp",
)  # fmt: skip
"""Ends of names of what an interrupted download, copy or save leaves."""
_PLACEHOLDERS = (".icloud", ".cloud", ".cloudf", ".gdownload", ".dvc")
_PACKED = (".gz", ".zst", ".xz", ".bz2", ".lz4", ".zip", ".7z", ".rar")
_SEALED = (".gpg", ".age", ".enc")
_KEPT = (".bak", ".orig", ".old", ".backup", ".txt", ".bin", ".1", ".2", ".3", "~")

_ENDS = {
    **dict.fromkeys(_UNFINISHED, "unfinished"),
    **dict.fromkeys(_PLACEHOLDERS, "placeholder"),
    **dict.fromkeys(_PACKED, "packed"),
    **dict.fromkeys(_SEALED, "sealed"),
    **dict.fromkeys(_KEPT, "renamed"),
}
# The file's own name is what the groups are together.
_SHAPES = (
    (re.compile(r"\.(.+)\.icloud"), "placeholder"),
    (re.compile(r"\.(.+)\.[A-Za-z0-9]{6}"), "unfinished"),  # rsync
    (re.compile(r"(.+)\.[0-9A-Fa-f]{8}(?:\.partial)?"), "unfinished"),  # aws s3 cp, rclone
    (re.compile(r"(.+)_\.gstmp"), "unfinished"),
    (re.compile(r"\.azDownload-[0-9a-f-]+-(.+)"), "unfinished"),
    (re.compile(r"(.+?) ?\(\d+\)(\.[^.]+)?"), "renamed"),
    (re.compile(r"(.+?)(?: - Copy| copy)(?: \(?\d+\)?)?(\.[^.]+)?"), "renamed"),
    (re.compile(r"Copy of (.+)"), "renamed"),
    (re.compile(r"(.+)\.sync-conflict-[\w-]+(\.[^.]+)"), "renamed"),
    (re.compile(r"([^?]+)\?.+"), "renamed"),  # a download by a link with a query
)


@dataclass(frozen=True, slots=True)
class Altered:
    """A file that is here in place of one that is not."""

    path: str
    of: str
    """The path of the one that is not here."""
    how: str
    """``unfinished``, ``placeholder``, ``packed``, ``sealed`` or ``renamed``."""
    nbytes: int
    """Its length."""

    @property
    def said(self) -> str:
        """What it is and what to do, a clause.

        >>> Altered("a.pt.gz", "a.pt", "packed", 5).said
        'a.pt.gz (5 bytes) may be it, compressed: unpack it'
        """
        here = f"{self.path} ({counted(self.nbytes, 'byte')})"
        if self.how == "unfinished":
            return f"{here} is a download or a copy of it that did not end: let it end, or start it again"
        if self.how == "placeholder":
            return f"{here} stands for it, which lies elsewhere: have it downloaded first"
        if self.how == "packed":
            return f"{here} may be it, compressed: unpack it"
        if self.how == "sealed":
            return f"{here} may be it, encrypted: decrypt it"
        return f"{here} may be it under another name: mv -n {shell_word(self.path)} {shell_word(self.of)}"


def is_unfinished(path: str) -> bool:
    """Whether a name is that of an interrupted download, copy or save.

    >>> is_unfinished("model.safetensors.part"), is_unfinished("model.part.safetensors")
    (True, False)
    """
    return path.endswith(_UNFINISHED)


def is_placeholder(path: str) -> bool:
    """Whether a name is that of a small file which stands for one that lies elsewhere.

    >>> is_placeholder("a/.model.pt.icloud"), is_placeholder("model.pt")
    (True, False)
    """
    return path.endswith(_PLACEHOLDERS)


def under_other_names(missing: Iterable[str], here: Mapping[str, int], used: Iterable[str] = ()) -> dict[str, Altered]:
    """Of paths that are not here, those which a file beside their place seems to be, one look-up each.

    The same name elsewhere in the folder counts too, where just one file has it and the checkpoint does not use it.

    Args:
        missing: paths.
        here: the paths of all files, with their lengths.
        used: those of them that are something else.

    >>> found = under_other_names(["a/W.pt", "b.pt", "c.pt"], {"a/w.pt": 1, "b (1).pt": 2, "c.pt.json": 3})
    >>> {path: each.path for path, each in found.items()}
    {'a/W.pt': 'a/w.pt', 'b.pt': 'b (1).pt'}
    """
    wanted = {_key(path): path for path in missing if path not in here}
    if not wanted:
        return {}
    by_name: dict[str, str | None] = {}
    for key, path in wanted.items():
        name = key.rpartition("/")[2]
        by_name[name] = None if name in by_name else path
    found: dict[str, Altered] = {}
    elsewhere: dict[str, list[str]] = {}
    left_out = set(used)
    for path, nbytes in sorted(here.items()):
        if path in left_out:
            continue
        for original, how in _originals(path):
            of = wanted.get(_key(original))
            if of is not None:
                found.setdefault(of, Altered(path, of, how, nbytes))
        of = by_name.get(_key(path).rpartition("/")[2])
        if of is not None:
            elsewhere.setdefault(of, []).append(path)
    for of, paths in elsewhere.items():
        if len(paths) == 1:
            found.setdefault(of, Altered(paths[0], of, "renamed", here[paths[0]]))
    return found


def _originals(path: str) -> Iterator[tuple[str, str]]:
    """Paths that ``path`` may have been, and how it came to its own; the same but for case and accents first."""
    yield path, "renamed"
    folder, slash, name = path.rpartition("/")
    if not name.startswith("."):
        yield f"{folder}{slash}.{name}", "renamed"  # browsers drop the dot
    for end, how in _ENDS.items():
        if name.endswith(end):
            yield folder + slash + name.removesuffix(end), how
    for shape, how in _SHAPES:
        match = shape.fullmatch(name)
        if match is not None:
            yield folder + slash + "".join(group or "" for group in match.groups()), how


def _key(path: str) -> str:
    """What spellings of one name have in common: case, composition of accents and space around it apart."""
    return unicodedata.normalize("NFC", path.strip()).casefold()
