"""Matching finds what each tensor and value of a live state is called in a checkpoint, and what does not fit."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from ckpt_tool.api.convert.names import module_names
from ckpt_tool.dtypes import DType
from ckpt_tool.errors import LayoutError, UnsafePickle
from ckpt_tool.manifest.model import Blob, KeyPath, Manifest
from ckpt_tool.manifest.plain import is_plain
from ckpt_tool.records import dataclass

__all__ = [
    "Expected",
    "Match",
    "NameMap",
    "Problem",
    "SavedValues",
    "match_tensors",
    "misfit",
    "neutral_path",
    "unexpected_tensors",
]


NameMap: TypeAlias = Mapping[str, str] | Callable[[str], str]
"""What a tensor of the state is called in the checkpoint."""

_LISTED = 8


@dataclass(frozen=True, slots=True)
class Expected:
    """One tensor that the state has."""

    path: KeyPath
    fqn: str
    """Keys joined by dots."""
    shape: tuple[int, ...]
    dtype: DType
    may_differ: bool = False
    """Whether its shape may be another one, of as many dimensions."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """Something that does not fit."""

    kind: str
    """``missing``, ``shape``, ``dtype`` or ``unexpected``."""
    fqn: str
    text: str


@dataclass(frozen=True, slots=True)
class Match:
    """Rows of the checkpoint's tensors for those of the state."""

    rows: tuple[int, ...]
    """One per expected tensor, -1 where the checkpoint has none."""
    problems: tuple[Problem, ...]
    renamed: tuple[tuple[str, str], ...]
    """(name in the state, name in the checkpoint) of pairs that differ by outer keys or wrappers' prefixes."""


def match_tensors(
    manifest: Manifest,
    expected: Sequence[Expected],
    *,
    names: NameMap | None,
    cast: bool,
    rank: int,
) -> Match:
    """The checkpoint's row of each expected tensor.

    Looked for by the given names, then by the dotted name, by the keys of the path, and last by the name that the
    module itself gives, without a trainer's outer key and wrappers' prefixes, where only one tensor has it, or where
    each rank has saved its own: then that of ``rank`` is taken, and where it has none the first.
    """
    tensors = manifest.tensors
    others = _OtherNames(manifest, expected, rank)
    rows, problems, renamed = [], list[Problem](), []
    for number, each in enumerate(expected):
        fqn = each.fqn
        asked = _asked(names, fqn)
        row = tensors.index.get(asked, -1)
        if row < 0:
            row = others.by_path.get(asked, -1)
        if row < 0 and asked == fqn:
            row = others.by_module(number)
            if row >= 0:
                renamed.append((fqn, tensors.fqns[row]))
        rows.append(row)
        if row < 0:
            problems.append(Problem("missing", fqn, "not in the checkpoint"))
    shapes = tensors.shape[rows, :].tolist() if rows and len(tensors) else [[]] * len(rows)
    for each, row, padded in zip(expected, rows, shapes, strict=True):
        if row < 0:
            continue
        shape, dtype = tuple(padded[: tensors.ndim[row]]), tensors.dtypes[row]
        if shape != each.shape and not (each.may_differ and len(shape) == len(each.shape)):
            problems.append(Problem("shape", each.fqn, f"expected {list(each.shape)}, got {list(shape)}"))
        if dtype != each.dtype and not (cast and dtype.numpy is not None and each.dtype.numpy is not None):
            problems.append(Problem("dtype", each.fqn, f"expected {each.dtype.name}, got {dtype.name}"))
    return Match(tuple(rows), tuple(problems), tuple(renamed))


class _OtherNames:
    """What else tensors may be found by; made only when something is not found by its name."""

    def __init__(self, manifest: Manifest, expected: Sequence[Expected], rank: int) -> None:
        self._tensors, self._expected, self._rank = manifest.tensors, expected, rank

    @cached_property
    def _paths(self) -> Sequence[KeyPath]:
        tensors = self._tensors
        return tensors.paths if tensors.paths is not None else [(fqn,) for fqn in tensors.fqns]

    @cached_property
    def by_path(self) -> dict[str, int]:
        """Row by the keys of the path."""
        return {".".join(str(key) for key in path): row for row, path in enumerate(self._paths)}

    @cached_property
    def _rows(self) -> list[int]:
        """By expected tensor, the row of the same module name where only one tensor of each side has it."""
        known = [neutral_path(path) for path in self._paths]
        saved = module_names([path for path, _ in known])
        wanted = module_names([neutral_path(each.path)[0] for each in self._expected])
        rows: dict[str, list[tuple[bool, int, int]]] = {}
        for row, (name, (_, owner)) in enumerate(zip(saved, known, strict=True)):
            rows.setdefault(name, []).append((owner != self._rank, -1 if owner is None else owner, row))
        n_wanted = Counter(wanted)
        lone = {name: min(found)[2] for name, found in rows.items() if len(found) == 1 or min(found)[1] >= 0}
        return [lone.get(name, -1) if n_wanted[name] == 1 else -1 for name in wanted]

    def by_module(self, number: int) -> int:
        """Row of an expected tensor by the name that the module itself gives it, -1 where that is not clear."""
        return self._rows[number]


_OPTIMIZERS = frozenset({"optim", "optimizer", "optimizer_state_dict"})
_EXTRA_STATE = "extra_state"
_OWNER = re.compile(r"@rank(\d{1,9})$")


def neutral_path(path: KeyPath) -> tuple[KeyPath, int | None]:
    """A path with one word for the optimizer and without the one for extra state, and the rank that it is named for.

    >>> neutral_path(("optim", "state", "w")), neutral_path(("extra_state", "rng@rank3"))
    ((('optimizer', 'state', 'w'), None), (('rng',), 3))
    """
    if len(path) < 2:
        return path, None
    if path[0] in _OPTIMIZERS:
        return ("optimizer", *path[1:]), None
    if path[0] != _EXTRA_STATE:
        return path, None
    last = str(path[-1])
    match = _OWNER.search(last)
    bare: KeyPath = path[1:] if match is None else (*path[1:-1], last[: match.start()])
    return bare, None if match is None else int(match[1])


def _asked(names: NameMap | None, fqn: str) -> str:
    if names is None:
        return fqn
    return names(fqn) if callable(names) else names.get(fqn, fqn)


def unexpected_tensors(manifest: Manifest, used: set[int]) -> list[Problem]:
    """Tensors that no rank's state has, of those parts of the checkpoint that it has some tensor of.

    A part is a section (model, optimizer, other) below one outermost key, so that a model loads without the optimizer
    that was saved beside it. What single ranks have saved for themselves is nobody else's.
    """
    tensors = manifest.tensors
    paths = tensors.paths if tensors.paths is not None else [(fqn,) for fqn in tensors.fqns]
    parts = [
        (section, path[0] if len(path) > 1 else None)
        for section, path in zip(tensors.section.tolist(), paths, strict=True)
    ]
    wanted = {parts[row] for row in used}
    return [
        Problem("unexpected", tensors.fqns[row], "not in the state")
        for row, part in enumerate(parts)
        if row not in used and part in wanted and neutral_path(paths[row])[1] is None
    ]


class SavedValues:
    """The objects of a checkpoint that are no tensors, by name."""

    def __init__(self, blobs: Sequence[Blob], rank: int, read: Callable[[Blob], Any]) -> None:
        """Of a checkpoint's objects, for one rank; ``read`` makes one that is more than plain values, of its bytes."""
        self._read = read
        self._by_name: dict[str, Blob] = {}
        self._by_neutral: dict[str, Blob] = {}
        self._by_fqn: dict[str, Blob] = {}
        for blob in blobs:
            if not blob.is_loaded and blob.where is None:
                continue
            self._by_fqn[blob.fqn] = blob
            path = blob.path or (blob.fqn,)
            for name, known in ((_dotted(path), self._by_name), (_dotted(neutral_path(path)[0]), self._by_neutral)):
                if name not in known or blob.rank == rank:
                    known[name] = blob

    @cached_property
    def _by_module(self) -> dict[str, Blob]:
        """By the name without a trainer's outer key, where only one object has it."""
        blobs = list(self._by_name.values())
        names = module_names([blob.path or (blob.fqn,) for blob in blobs])
        counts = Counter(names)
        return {name: blob for name, blob in zip(names, blobs, strict=True) if counts[name] == 1}

    def has_above(self, path: KeyPath) -> bool:
        """Whether there is an object above ``path``, in which its value may be; not looked into."""
        keys = [str(key) for key in path]
        above = [".".join(keys[:depth]) for depth in range(1, len(keys))]
        return any(name in known for name in above for known in (self._by_name, self._by_fqn, self._by_neutral))

    def find(self, path: KeyPath) -> tuple[bool, Any]:
        """``(found, value)``: the object of that name, or the place for it inside an object above.

        Of objects that every rank saved for itself this rank's is taken, and where there is none the first.
        """
        for known, named in (
            (self._by_name, path), (self._by_fqn, path), (self._by_neutral, neutral_path(path)[0])
        ):  # fmt: skip
            keys = [str(key) for key in named]
            for depth in range(len(keys), 0, -1):
                blob = known.get(".".join(keys[:depth]))
                if blob is not None:
                    return self._inside(blob, keys[depth:])
        blob = self._by_module.get(_dotted(path))
        return (False, None) if blob is None else self._inside(blob, ())

    def _inside(self, blob: Blob, keys: Sequence[str]) -> tuple[bool, Any]:
        """What is at ``keys`` in an object; nothing where it is of classes that are not made here."""
        if blob.is_loaded:
            is_found, value = _inside(blob.value, keys)
            if is_plain(value) if is_found else is_plain(blob.value):
                return is_found, value
        if blob.where is None or blob.kind != "torch_save":
            return False, None
        try:
            return _inside(self._read(blob), keys)
        except UnsafePickle:
            return False, None


def _dotted(path: KeyPath) -> str:
    return ".".join(str(key) for key in path)


def _inside(value: Any, keys: Sequence[str]) -> tuple[bool, Any]:
    for key in keys:
        if isinstance(value, Mapping):
            by_text = {str(each): each for each in value}
            if key not in by_text:
                return False, None
            value = value[by_text[key]]
        elif isinstance(value, (list, tuple, deque)) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return False, None
    return True, value


def misfit(url: str, problems: list[Problem], fqns: Sequence[str]) -> LayoutError:
    """One error for all that does not fit a checkpoint whose tensors are ``fqns``."""
    counts = {kind: sum(each.kind == kind for each in problems) for kind in ("missing", "unexpected", "shape", "dtype")}
    summary = ", ".join(f"{n:,} {kind}" for kind, n in counts.items() if n)
    lines = [f"  {each.kind}: {each.fqn}: {each.text}" for each in problems[:_LISTED]]
    if len(problems) > _LISTED:
        lines.append(f"  and {len(problems) - _LISTED:,} more")
    hint = "pass cast=True to convert element types" if counts["dtype"] else None
    if counts["missing"] or counts["unexpected"]:
        near = f"the checkpoint's names are like {', '.join(fqns[:2])}; map them with names=, or " if fqns else ""
        hint = f"{near}pass strict=False"
    return LayoutError("the state does not fit: " + summary + "\n" + "\n".join(lines), where=url, hint=hint)
