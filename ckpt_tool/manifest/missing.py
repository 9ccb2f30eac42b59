"""What is known of files that a checkpoint should have and has not: what they held, and whether a selection needs them.

A reader lists them in ``Manifest.info`` as ``missing_files``. Where an index or a format's own rules tell what was in
one, ``held_by_missing`` has for its path either the names of its tensors or the sections that all of them are of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.select import OF_TYPES, matching

__all__ = ["held_by_missing", "missing_facts", "names_of_missing", "needed_files", "without_missing"]

_FILES, _HELD = "missing_files", "held_by_missing"
_NOTHING: Mapping[str, Any] = {}


def held_by_missing(homes: Mapping[str, str], missing: Iterable[str]) -> dict[str, list[str]]:
    """The names of the tensors in each file of ``missing``, by an index from names to files; `missing_facts` takes it.

    >>> held_by_missing({"a": "1.st", "b": "2.st", "c": "2.st"}, ["2.st"])
    {'2.st': ['b', 'c']}
    """
    held: dict[str, list[str]] = {path: [] for path in missing}
    for fqn, path in homes.items():
        if path in held:
            held[path].append(fqn)
    return {path: names for path, names in held.items() if names}


def missing_facts(
    missing: Sequence[str],
    *,
    names: Mapping[str, Sequence[str]] = _NOTHING,
    sections: Mapping[str, str] = _NOTHING,
) -> dict[str, Any]:
    """Entries of ``Manifest.info`` for missing files; none without any.

    Args:
        missing: their paths.
        names: of all tensors in a file, by its path.
        sections: of which all tensors in a file are, by its path: ``optimizer``.
    """
    held = {path: {"tensors": list(names[path])} for path in missing if path in names}
    held |= {path: {"sections": [sections[path]]} for path in missing if path in sections}
    return {**({_FILES: list(missing)} if missing else {}), **({_HELD: held} if held else {})}


def names_of_missing(manifest: Manifest) -> list[str]:
    """Names of tensors that are known to be in missing files."""
    return [fqn for held in _held(manifest).values() for fqn in held.get("tensors", ())]


def needed_files(
    manifest: Manifest, *, include: Sequence[str], exclude: Sequence[str], sections: Sequence[str] | None
) -> dict[str, list[str]]:
    """Missing files that may hold some of what patterns and sections select, as `manifest.select.select` takes them.

    Each with the names of these tensors, where they are known.
    """
    held, found = _held(manifest), {}
    for path in map(str, manifest.info.get(_FILES) or ()):
        names, of_sections = (held.get(path, {}).get(key) for key in ("tensors", "sections"))
        if names is not None:
            selected = _selected(names, include, exclude, sections)
            if selected:
                found[path] = selected
        elif of_sections is None or sections is None or set(sections) & set(of_sections):
            found[path] = []
    return found


def without_missing(manifest: Manifest) -> Manifest:
    """The manifest of what needs none of the missing files."""
    return manifest.replace(info={key: value for key, value in manifest.info.items() if key not in {_FILES, _HELD}})


def _held(manifest: Manifest) -> Mapping[str, Mapping[str, Sequence[str]]]:
    found: Mapping[str, Mapping[str, Sequence[str]]] = manifest.info.get(_HELD) or {}
    return found


def _selected(
    names: Sequence[str], include: Sequence[str], exclude: Sequence[str], sections: Sequence[str] | None
) -> list[str]:
    """Those of ``names`` that fit, and that may: nothing tells of their types."""
    left = {row for row, fqn in enumerate(names) if sections is None or section_of((), fqn) in sections}
    if include and not any(pattern.startswith(OF_TYPES) for pattern in include):
        left &= {row for pattern in include for row in matching(pattern, names)}
    left = left.difference(*(matching(each, names) for each in exclude if not each.startswith(OF_TYPES)))
    return [names[row] for row in sorted(left)]
