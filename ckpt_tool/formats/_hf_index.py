"""An index is the JSON beside several files of one model that says which file holds which tensor (``weight_map``).

It repeats what the headers say, so it can be wrong; here are its parser and all that it can be wrong about. The format
is Hugging Face's (``save_torch_state_dict`` of huggingface_hub).
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.errors import FormatError
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = [
    "Held",
    "Index",
    "contradictions",
    "homes_of",
    "parse_index",
    "remembered_index",
    "variant_notes",
    "write_index",
]

Held = Mapping[str, Mapping[str, int]]
"""By file: bytes of each tensor in it."""


@dataclass(frozen=True, slots=True)
class Index:
    """A parsed index."""

    path: str
    weight_map: Mapping[str, str]
    """File of each tensor; the last one where the JSON lists a tensor twice."""
    total_size: Any
    """``metadata.total_size`` as it stands, None if absent."""
    faults: tuple[Finding, ...]
    """What is wrong with the text itself."""

    @property
    def files(self) -> tuple[str, ...]:
        """Named files, in order of first sight."""
        return tuple(dict.fromkeys(self.weight_map.values()))

    def homes(self, fqns: Collection[str], sizes: Mapping[str, int]) -> dict[str, str] | None:
        """The file of each tensor, all of them among ``sizes``; None where the index does not tell."""
        found = {fqn: self.weight_map.get(fqn, "") for fqn in fqns}
        return None if self.faults or any(path not in sizes for path in found.values()) else found


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as its pairs, so that a key listed twice is seen."""


def parse_index(raw: bytes, path: str) -> Index:
    """The index in ``raw``.

    Raises:
        FormatError: not a JSON object with a ``weight_map``.
    """
    try:
        found = json.loads(raw, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        from ckpt_tool.formats._content import what_is  # for this message alone

        kind = what_is(raw[:512])
        other = f" but {kind}" if kind not in {None, "JSON text", "plain text"} else f": {error}"
        raise FormatError(f"the index is not JSON{other}", where=path) from error
    top = dict(found) if isinstance(found, _Pairs) else {}
    everywhere = FileRange(path, 0, len(raw))
    faults = []
    if isinstance(found, _Pairs) and sum(key == "weight_map" for key, _ in found) > 1:
        said = f"{path} has weight_map twice; most loaders see the last"
        faults.append(Finding("index-duplicate-key", Severity.ERROR, said, where=everywhere))
    pairs = top.get("weight_map")
    if not isinstance(pairs, _Pairs):
        raise FormatError(
            "expected a JSON object with a weight_map from tensors to files",
            where=path,
            hint="delete the index to read the files by their own headers",
        )
    weight_map: dict[str, str] = {}
    for fqn, file in pairs:
        if not isinstance(file, str):
            kind = "object" if isinstance(file, _Pairs) else type(file).__name__
            said = f"{path} maps {fqn!r} to a JSON {kind}, expected the name of a file"
            faults.append(Finding("index-bad-value", Severity.ERROR, said, fqn, everywhere))
            continue
        if fqn in weight_map:
            said = f"{path} lists {fqn!r} twice: in {weight_map[fqn]} and in {file}; most loaders see the last"
            faults.append(Finding("index-duplicate-key", Severity.ERROR, said, fqn, everywhere))
        weight_map[fqn] = _plain(file)
    metadata = top.get("metadata")
    total_size = dict(metadata).get("total_size") if isinstance(metadata, _Pairs) else None
    return Index(path, weight_map, total_size, tuple(faults))


def remembered_index(source: Source, path: str) -> Index:
    """The index in a file, which is read once.

    Raises:
        FormatError: not a JSON object with a ``weight_map``.
    """
    key = f"index {path}"
    if key not in source.remembered:
        source.remembered[key] = parse_index(source.read_whole(path), path)
    found: Index = source.remembered[key]
    return found


def _plain(file: str) -> str:
    """A relative path as listings have it: ``./a`` is ``a``. What leaves the folder stays as it is, and is not here."""
    plain = posixpath.normpath(file) if file and "://" not in file else file
    return file if plain == "." or plain.startswith(("/", "..")) else plain


def homes_of(held: Held, weight_map: Mapping[str, str]) -> dict[str, str]:
    """The file that each tensor is taken from: the one the index names if it holds it, else the last that does."""
    homes: dict[str, str] = {}
    for path, names in held.items():
        for fqn in names:
            if fqn not in homes or weight_map.get(fqn) != homes[fqn]:
                homes[fqn] = path
    return homes


def contradictions(index: Index, held: Held, sizes: Mapping[str, int], strays: Collection[str]) -> Iterator[Finding]:
    """Everything in which an index and the files beside it differ.

    Args:
        index: the parsed index.
        held: what the headers of the files that were read say.
        sizes: bytes of every file that is there.
        strays: files of tensors that the index does not name.
    """
    yield from index.faults
    yield from _missing_files(index, held, sizes, strays)
    yield from _misplaced(index, held)
    for path, names in held.items():
        unlisted = [fqn for fqn in names if fqn not in index.weight_map]
        if unlisted:
            yield Finding(
                "not-in-index",
                Severity.WARNING,
                f"{path} holds {counted(len(unlisted), 'tensor')} that {index.path} does not list: {_some(unlisted)}",
                unlisted[0],
                FileRange(path, 0, sizes[path]),
            )
    yield from _duplicates(index, held)
    for path in strays:
        if path not in held:
            yield Finding(
                "stray-file",
                Severity.WARNING,
                f"{path} is not named by {index.path} and was left out",
                where=FileRange(path, 0, sizes[path]),
            )
    yield from _total_size(index, held, sizes)


def variant_notes(paths: Sequence[str]) -> Iterator[str]:
    """What to say of files that were left out as variants of those that were read."""
    if paths:
        were = "is another variant of the same tensors and was" if len(paths) == 1 else "are other variants and were"
        yield f"{', '.join(paths[:3])}{' ...' if len(paths) > 3 else ''} {were} left out; name a file, or its index"


def _some(names: list[str]) -> str:
    return ", ".join(repr(n) for n in names[:3]) + (" ..." if len(names) > 3 else "")


def _missing_files(index: Index, held: Held, sizes: Mapping[str, int], strays: Collection[str]) -> Iterator[Finding]:
    by_file: dict[str, list[str]] = {}
    for fqn, path in index.weight_map.items():
        if path not in sizes:
            by_file.setdefault(path, []).append(fqn)
    if by_file and len(by_file) == len(index.files) and strays:
        yield Finding(
            "stale-index",
            Severity.ERROR,
            f"{index.path} names {counted(len(by_file), 'file')}, of which none is here ({_some(list(by_file))}); "
            f"{len(strays):,} others are ({_some(sorted(strays))}) and were read by their own headers",
        )
        return
    elsewhere = {fqn for names in held.values() for fqn in names}
    for path, fqns in by_file.items():
        lost = [fqn for fqn in fqns if fqn not in elsewhere]
        is_outside = path.startswith(("/", ".."))
        outside = " (a path out of this folder, which is not followed)" if is_outside else ""
        verb = "is" if len(lost) == 1 else "are"
        held_by = f"{len(lost):,} of its {counted(len(fqns), 'tensor')} {verb} in no other file: {_some(lost)}"
        yield Finding(
            "missing-file",
            Severity.ERROR,
            f"{path} is named by {index.path} and is not here{outside}; "
            f"{held_by if lost else f'other files hold {_some(fqns)}'}",
            lost[0] if lost else fqns[0],
            FileRange(index.path if is_outside else path, 0, 0),
        )


def _misplaced(index: Index, held: Held) -> Iterator[Finding]:
    """Tensors that the named file is there for, but does not hold."""
    homes = homes_of(held, index.weight_map)
    for fqn, path in index.weight_map.items():
        if path not in held or fqn in held[path]:
            continue
        if fqn in homes:
            said = f"{index.path} puts {fqn!r} into {path}, which lacks it; it is in {homes[fqn]}"
            yield Finding("index-wrong-file", Severity.ERROR, said, fqn, FileRange(index.path, 0, 0))
        else:
            said = f"{index.path} puts {fqn!r} into {path}, which lacks it, and so does every other file"
            is_misspelt = any(name not in index.weight_map for name in held[path])
            where = FileRange(index.path if is_misspelt else path, 0, 0)
            yield Finding("index-ghost-tensor", Severity.ERROR, said, fqn, where)


def _duplicates(index: Index, held: Held) -> Iterator[Finding]:
    homes = homes_of(held, index.weight_map)
    first: dict[str, str] = {}
    for path, names in held.items():
        for fqn in names:
            if fqn in first:
                said = f"{fqn!r} is in {first[fqn]} and in {path}; {homes[fqn]} was taken"
                yield Finding("duplicate-tensor", Severity.ERROR, said, fqn, FileRange(path, 0, 0))
            first.setdefault(fqn, path)


def _total_size(index: Index, held: Held, sizes: Mapping[str, int]) -> Iterator[Finding]:
    """``total_size`` is the sum of the tensors' bytes; it can only be judged when all named files were read."""
    if any(path not in held for path in index.files):
        return
    homes = homes_of(held, index.weight_map)
    expected = sum(held[path][fqn] for fqn, path in homes.items())
    if index.total_size is None:
        said = f"{index.path} has no metadata.total_size, expected {expected:,}"
        yield Finding("total-size", Severity.INFO, said)
    elif type(index.total_size) not in (int, float) or index.total_size != expected:
        got = f"{index.total_size:,}" if type(index.total_size) is int else repr(index.total_size)[:40]
        also = " (the sum of the file sizes)" if index.total_size == sum(sizes[path] for path in held) else ""
        said = f"{index.path} says total_size {got}{also}, expected the sum of the tensors' bytes, {expected:,}"
        yield Finding("total-size", Severity.WARNING, said)


def write_index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The JSON of an index, keys sorted as huggingface_hub writes them."""
    content = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
