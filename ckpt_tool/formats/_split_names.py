"""Names of the files that one model is split into (``model-00001-of-00003.safetensors``), and of the index beside them.

Hugging Face's names, with the variants of transformers and diffusers (``model.safetensors.index.fp16.json``,
``model-00001-of-00003.fp16.safetensors``). Others number with fewer digits, or from 0. Pure: knows no store.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_tool.geometry.absent import absent_numbers
from ckpt_tool.records import dataclass

__all__ = ["SplitName", "index_beside", "index_names", "missing_names", "split_name", "unlike", "variants"]

_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{1,9})-of-(?P<count>\d{1,9})(?P<end>(?:\.\w+)?\.\w+)", re.ASCII)
_INDEX = re.compile(r"[^/]*\.(?P<kind>\w+)\.index(?P<variant>\.[^/.]+)?\.json", re.ASCII)
_ENDING = re.compile(r"(?P<variant>\.\w+)?(?P<kind>\.\w+)", re.ASCII)
_MAX_MISSING = 100


@dataclass(frozen=True, slots=True)
class SplitName:
    """The name of one file of several, taken apart."""

    family: tuple[str, int, str]
    """What all files of one set have in common: what stands before the number, how many they are, how they end."""
    number: int
    text: str
    """The number as it is written, with its zeros."""
    count_text: str


def split_name(path: str) -> SplitName | None:
    """The parts of such a name, None for another.

    >>> split_name("model-00002-of-00003.safetensors").family
    ('model', 3, '.safetensors')
    >>> split_name("model.safetensors") is None
    True
    """
    found = _NUMBERED.fullmatch(path)
    if found is None:
        return None
    return SplitName(
        (found["stem"], int(found["count"]), found["end"]), int(found["number"]), found["number"], found["count"]
    )


def missing_names(paths: Iterable[str]) -> list[str]:
    """Names that the sets of ``paths`` lack, by their own numbers; at most 100 of each set.

    >>> missing_names(["m-00001-of-00003.bin", "m-00003-of-00003.bin", "other.bin"])
    ['m-00002-of-00003.bin']
    >>> missing_names(["m-0-of-2.bin"])
    ['m-1-of-2.bin']
    """
    families: dict[tuple[str, int, str], list[SplitName]] = {}
    for path in paths:
        name = split_name(path)
        if name is not None:
            families.setdefault(name.family, []).append(name)
    missing: list[str] = []
    for (stem, count, end), members in families.items():
        present = {member.number for member in members}
        first = 0 if 0 in present and count not in present else 1
        width, of = len(members[0].text), members[0].count_text
        lacking = absent_numbers(present, count, first=first, at_most=_MAX_MISSING)
        missing += [f"{stem}-{number:0{width}d}-of-{of}{end}" for number in lacking]
    return missing


def index_beside(paths: Iterable[str]) -> str:
    """What the index of numbered files is called; the first set counts.

    >>> index_beside(["model-00001-of-00002.safetensors", "x.bin"])
    'model.safetensors.index.json'
    """
    families = [name.family for path in paths if (name := split_name(path)) is not None]
    stem, _, end = min(families, default=("model", 1, ".safetensors"))
    *variant, kind = end.strip(".").split(".")
    return ".".join([stem, kind, "index", *variant, "json"])


def index_names(paths: Iterable[str], kind: str) -> tuple[str, ...]:
    """Indexes among ``paths`` of files that end with ``kind``; those without a variant alone where there are any.

    >>> index_names(["model.safetensors.index.json", "model.safetensors.index.fp16.json"], "safetensors")
    ('model.safetensors.index.json',)
    """
    found = [match for path in paths if (match := _INDEX.fullmatch(path)) is not None and match["kind"] == kind]
    plain = [match for match in found if match["variant"] is None]
    return tuple(match[0] for match in plain or found)


def variants(paths: Iterable[str]) -> dict[str, str]:
    """Which of ``paths`` are, by their names, another variant of what others of them hold: path -> variant.

    transformers and diffusers write ``fp16``, ``bf16``, ``non_ema`` and such into names.

    >>> variants(["m.safetensors", "m.fp16.safetensors", "n.fp16.safetensors"])
    {'m.fp16.safetensors': 'fp16'}
    >>> variants(["m-1-of-1.bin", "m.ema-1-of-1.bin", "m-1-of-1.ema.bin", "m.ema.bin"])
    {'m.ema-1-of-1.bin': 'ema', 'm-1-of-1.ema.bin': 'ema', 'm.ema.bin': 'ema'}
    """
    return {path: variant for path, (_, variant) in _models(paths).items() if variant}


def unlike(read: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Those of ``others`` that are, by their names, another variant of what is in the files that are ``read``.

    >>> unlike(["m.safetensors"], ["m.fp16.safetensors", "n.safetensors"])
    ('m.fp16.safetensors',)
    >>> unlike(["m.fp16.safetensors"], ["m.safetensors"])
    ('m.safetensors',)
    """
    read, others = tuple(read), tuple(others)
    models = _models((*read, *others))
    known = {models[path] for path in read}
    bases = {base for base, _ in known}
    return tuple(path for path in others if models[path] not in known and models[path][0] in bases)


def _models(paths: Iterable[str]) -> dict[str, tuple[tuple[str, str], str]]:
    """For each path what its model is called without number and variant, how it ends, and the variant, "" for none.

    What stands behind a dot is a variant only where a file without it is among ``paths``.
    """
    parts = {path: _stem_and_variant(path) for path in paths}
    plain = {(stem, kind) for stem, variant, kind in parts.values() if not variant}
    found: dict[str, tuple[tuple[str, str], str]] = {}
    for path, (stem, variant, kind) in parts.items():
        outer, _, last = stem.rpartition(".")
        if variant and (stem, kind) not in plain:
            found[path] = (f"{stem}.{variant}", kind), ""
        elif not variant and (outer, kind) in plain:
            found[path] = (outer, kind), last
        else:
            found[path] = (stem, kind), variant
    return found


def _stem_and_variant(path: str) -> tuple[str, str, str]:
    """What stands before the number or the ending, a variant behind the number, and the ending."""
    name = split_name(path)
    if name is None:
        stem, dot, kind = path.rpartition(".")
        return stem, "", dot + kind
    ending = _ENDING.fullmatch(name.family[2])
    variant, kind = ending.groups("") if ending is not None else ("", name.family[2])
    return name.family[0], variant.lstrip("."), kind
