"""Choosing tensors by name, and elements of one tensor by slices, as people type them.

A *pattern* is a glob over the whole fqn or, after ``re:``, a regular expression found anywhere in it; after ``dtype:``
it is a glob over the names of the element type. A *slice text* is ``NAME[0:4, :]`` as numpy writes it. Knows no command
line and no bytes.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_tool.dtypes import spellings
from ckpt_tool.errors import BadIndex, NotFound, UsageError
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.tables import SECTIONS, IntArray, TensorTable
from ckpt_tool.sizes import counted, shell_word

if TYPE_CHECKING:
    from ckpt_tool.manifest.model import Manifest

__all__ = [
    "OF_TYPES", "Index", "expand_braces", "is_name", "matching", "near_hint", "parse_slice", "select", "slice_box",
    "texts",
]  # fmt: skip

Index = tuple["slice | int | EllipsisType", ...]

OF_TYPES = "dtype:"
"""Before a pattern that is held against element types."""
_MAX_EXPANSIONS = 10_000
_SLICE_EXAMPLE = 'write it like "NAME[0:4, :]": whole numbers, ":" and "..." only'


def select(
    manifest: Manifest,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    sections: str | Sequence[str] = (),
) -> IntArray:
    """Rows of ``manifest.tensors`` that fit, in table order.

    Args:
        manifest: where to look.
        include: patterns of which one must match; none for all tensors.
        exclude: patterns of which none may match.
        sections: ``model``, ``optimizer``, ``other``; none for all.

    Raises:
        NotFound: a pattern matches no tensor (the hint names near ones), or nothing is left.
        UsageError: no such section, or a pattern that cannot be read.
    """
    include, exclude, sections = texts(include), texts(exclude), texts(sections)
    tensors = manifest.tensors
    keep = np.ones(len(tensors), dtype=np.bool_)
    for section in sections:
        if section not in SECTIONS:
            raise UsageError(f"{section!r} is no section", hint="one of: " + " ".join(SECTIONS))
    if sections:
        keep &= np.isin(tensors.section, [SECTIONS.index(s) for s in sections])
    if include:
        keep &= _any_of(include, tensors, manifest.where)
    if exclude:
        keep &= ~_any_of(exclude, tensors, manifest.where)
    if not len(tensors) and manifest.blobs and (include or exclude or sections):
        raise NotFound(
            f"no tensors, only {counted(len(manifest.blobs), 'other object')}",
            where=manifest.where or None,
            hint=_where_tensors_are(manifest),
        )
    if not keep.any() and (include or exclude or sections):
        asked = (("include", include), ("exclude", exclude), ("section", sections))
        said = "; ".join(f"{name} {', '.join(words)}" for name, words in asked if words)
        counts = np.bincount(tensors.section, minlength=len(SECTIONS)).tolist()
        held = ", ".join(f"{n:,} {name}" for name, n in zip(SECTIONS, counts, strict=True) if n)
        raise NotFound(
            f"none of {counted(len(tensors), 'tensor')} is left: {said}",
            where=manifest.where or None,
            hint=f"by section there are {held}: choose other patterns or sections (ckpt export --all takes every one)"
            if held
            else None,
        )
    return np.flatnonzero(keep).astype(np.int64)


def _where_tensors_are(manifest: Manifest) -> str:
    """What to do about a checkpoint of objects alone."""
    arrays = [blob.fqn for blob in manifest.blobs if getattr(blob.value, "ndim", 0) > 0]
    if arrays:
        what = f"{counted(len(arrays), 'array of numpy', 'are')} among them, such as {arrays[0]}"
        return f"{what}: save them as tensors of torch, or with numpy.savez"
    hint = "inspect --objects shows them"
    if manifest.format == "dcp":  # torch's own tool, whose result has the tensors apart
        hint += (
            "; with flatten_state_dict=False tensors are inside them: torch has python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch SRC OUT.pt, which unpickles what it reads"
        )
    return hint


def texts(given: str | Sequence[str]) -> tuple[str, ...]:
    """One text, or several, as several: a text alone is not a sequence of letters.

    >>> texts("model.*"), texts(["a", "b"])
    (('model.*',), ('a', 'b'))
    """
    return (given,) if isinstance(given, str) else tuple(given)


def _any_of(patterns: Sequence[str], tensors: TensorTable, where: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    found = np.zeros(len(tensors), dtype=np.bool_)
    for pattern in patterns:
        of_types = pattern.startswith(OF_TYPES)
        names = [dtype.name for dtype in tensors.dtypes] if of_types else tensors.fqns
        hits = _of_types(pattern.removeprefix(OF_TYPES), names) if of_types else matching(pattern, names)
        if not hits:
            near = "its types: " + " ".join(sorted(set(names))) if of_types else near_hint(pattern, names)
            hint = near or f'list the names with "ckpt inspect {shell_word(where or "SRC")} --flat"'
            raise NotFound(f"no tensor matches {pattern!r} among {len(tensors):,}", where=where or None, hint=hint)
        found[hits] = True
    return found


def _of_types(pattern: str, names: Sequence[str]) -> list[int]:
    """Positions of the types of which any spelling fits."""
    fitting = {name for name in set(names) if matching(pattern, spellings(name))}
    return [i for i, name in enumerate(names) if name in fitting]


def is_name(pattern: str) -> bool:
    """Whether a pattern can fit nothing but the tensor of that name.

    >>> is_name("layers.0.weight"), is_name("layers.*.weight"), is_name("re:w")
    (True, False, False)
    """
    return not (pattern.startswith(("re:", OF_TYPES)) or set(pattern) & set("*?[{"))


def matching(pattern: str, fqns: Sequence[str]) -> list[int]:
    """Positions of the fqns that fit one pattern.

    In a glob ``*`` stands for any text, dots included, ``?`` for one character, ``[0-3]`` for one of several, and
    ``{a,b}`` for either; a name always fits itself.

    >>> matching("*.{q,k}.weight", ["a.q.weight", "a.v.weight", "b.c.k.weight"])
    [0, 2]
    >>> matching("re:^b", ["a.b", "b.a"])
    [1]

    Raises:
        UsageError: the pattern cannot be read.
    """
    if pattern.startswith("re:"):
        try:
            search = re.compile(pattern[3:]).search
        except re.error as error:
            raise UsageError(f"{pattern!r} is no regular expression: {error}") from error
        return [i for i, fqn in enumerate(fqns) if search(fqn)]
    same = [i for i, fqn in enumerate(fqns) if fqn == pattern]
    try:
        glob = re.compile("|".join(_glob_regex(text) for text in expand_braces(pattern)), re.DOTALL)
    except UsageError:
        if same:
            return same
        raise
    return sorted({*same, *(i for i, fqn in enumerate(fqns) if glob.fullmatch(fqn))})


def expand_braces(pattern: str) -> list[str]:
    """Every text that ``{a,b}`` in ``pattern`` stands for; braces may be nested.

    >>> expand_braces("x{1,2{a,b}}y")
    ['x1y', 'x2ay', 'x2by']

    Raises:
        UsageError: a brace without its partner, or more than 10,000 texts.
    """
    start = pattern.find("{")
    if start < 0:
        if "}" in pattern:
            raise UsageError(f"{pattern!r} closes a brace that it does not open")
        return [pattern]
    if "}" in pattern[:start]:
        raise UsageError(f"{pattern!r} closes a brace that it does not open")
    depth, cuts = 0, [start]
    for position in range(start, len(pattern)):
        character = pattern[position]
        depth += (character == "{") - (character == "}")
        if depth == 1 and character == ",":
            cuts.append(position)
        if depth == 0:
            cuts.append(position)
            break
    else:
        raise UsageError(f"{pattern!r} opens a brace that it does not close")
    tails = expand_braces(pattern[cuts[-1] + 1 :])
    middles = [text for i in range(len(cuts) - 1) for text in expand_braces(pattern[cuts[i] + 1 : cuts[i + 1]])]
    if len(middles) * len(tails) > _MAX_EXPANSIONS:
        raise UsageError(f"{pattern!r} stands for more than {counted(_MAX_EXPANSIONS, 'name')}")
    return [pattern[:start] + middle + tail for middle in middles for tail in tails]


def _glob_regex(glob: str) -> str:
    """A regular expression for a glob without braces."""
    parts = []
    for piece in re.findall(r"\[[!^]?\]?[^\]]*\]|\*+|\?|.", glob, re.DOTALL):
        if piece[0] == "*":
            parts.append(".*")
        elif piece == "?":
            parts.append(".")
        elif len(piece) > 2:
            negated = piece[1] in "!^"
            inner = piece[1 + negated : -1].replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
            inner = inner.replace("&&", "&\\&").replace("||", "|\\|").replace("~~", "~\\~").replace("--", "-\\-")
            parts.append(f"[{'^' if negated else ''}{inner}]")
        else:
            parts.append(re.escape(piece))
    text = "".join(parts)
    try:
        re.compile(text)
    except re.error as error:
        raise UsageError(f"{glob!r} has a character range that cannot be read: {error}") from error
    return text


def near_hint(pattern: str, fqns: Sequence[str]) -> str | None:
    """What was meant by a pattern that fits no name: all below it, or up to three names that look like it.

    >>> (
    ...     near_hint("model", ["model.a", "model.b"]),
    ...     near_hint("*.lm_haed.weight", ["lm_head.weight"]),
    ...     near_hint("x", []),
    ... )
    ("'model.*' fits 2", 'did you mean lm_head.weight', None)
    """
    n_below = sum(fqn.startswith(f"{pattern}.") for fqn in fqns)
    if n_below:
        return f"{pattern + '.*'!r} fits {n_below:,}"
    plain = re.sub(r"re:|[*?{}\[\]^$\\()|]", "", pattern)
    containing = [fqn for fqn in fqns if plain and plain.casefold() in fqn.casefold()]
    near = containing[:3] or difflib.get_close_matches(plain, fqns[:50_000], n=3, cutoff=0.4)
    return f"did you mean {' or '.join(near)}" if near else None


def parse_slice(text: str) -> tuple[str, Index]:
    """``(fqn, index)`` of ``NAME[0:4, :]``; the index is empty for a bare name.

    >>> parse_slice("w[0:4, :, -1]")
    ('w', (slice(0, 4, None), slice(None, None, None), -1))
    >>> parse_slice("w")
    ('w', ())

    Raises:
        UsageError: not a slice that can be read as one box: a step, a list, a name.
    """
    if not text.endswith("]") or "[" not in text:
        return text, ()
    fqn, _, inside = text[:-1].rpartition("[")
    if not fqn:
        raise UsageError(f"{text!r} names no tensor", hint=_SLICE_EXAMPLE)
    index = tuple(_parse_item(item.strip(), text) for item in inside.split(","))
    if index.count(Ellipsis) > 1:
        raise UsageError(f'{text!r} has "..." twice', hint=_SLICE_EXAMPLE)
    return fqn, index


def _parse_item(item: str, text: str) -> slice | int | EllipsisType:
    if item == "...":
        return Ellipsis
    parts = item.split(":")
    numbers = [_parse_number(part.strip(), text) for part in parts]
    if len(numbers) == 1:
        if numbers[0] is None:
            raise UsageError(f"{text!r} has an empty place between its commas", hint=_SLICE_EXAMPLE)
        return numbers[0]
    if len(numbers) > 3 or (len(numbers) == 3 and numbers[2] not in {None, 1}):
        raise UsageError(f"{text!r} has a step in {item!r}, which is not one box", hint=_SLICE_EXAMPLE)
    return slice(numbers[0], numbers[1])


def _parse_number(part: str, text: str) -> int | None:
    if not part:
        return None
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", part):
        raise UsageError(f"{part!r} in {text!r} is no whole number", hint=_SLICE_EXAMPLE)
    return int(part)


def slice_box(
    index: Sequence[Any], shape: tuple[int, ...], *, where: str | None = None
) -> tuple[Box, tuple[slice | int, ...]]:
    """``(box, rest)``: the smallest region that has all of ``index``, and what is left to take of it.

    ``array[index] == array[box.slices][rest]`` for every array of ``shape``.

    >>> box, rest = slice_box((slice(1, 9, 2), -1), (6, 5))
    >>> str(box), rest
    ('[1:6, 4:5]', (slice(None, None, 2), 0))

    Args:
        index: places of it, in the order of dimensions.
        shape: of the tensor.
        where: the tensor, for messages.

    Raises:
        BadIndex: not whole numbers, slices and one ``...`` alone, more of them than dimensions, or a number outside of
            its dimension.
    """
    at = [place for place, item in enumerate(index) if item is Ellipsis]
    places = len(index) - len(at)
    if len(at) > 1:
        raise BadIndex("an index has one ... at most", where=where, hint=_SLICE_EXAMPLE)
    if places > len(shape):
        raise BadIndex(
            f"{counted(places, 'place')} in the slice, expected at most {len(shape)}, the dimensions of {list(shape)}",
            where=where,
        )
    fill = (slice(None),) * (len(shape) - places)
    first = at[0] if at else len(index)
    full = (*index[:first], *fill, *index[first + 1 :])
    taken = [_taken(item, size, dim, where) for dim, (item, size) in enumerate(zip(full, shape, strict=True))]
    return Box(tuple(one[0] for one in taken), tuple(one[1] for one in taken)), tuple(one[2] for one in taken)


def _taken(item: Any, size: int, dim: int, where: str | None) -> tuple[int, int, slice | int]:
    """Offset and size of what one place of an index takes of a dimension, and the index inside of that."""
    try:
        if isinstance(item, slice):
            found = range(*item.indices(size))
            low = min(found[0], found[-1]) if found else min(found.start, size - 1 if size else 0)
            return max(low, 0), abs(found[-1] - found[0]) + 1 if found else 0, slice(None, None, found.step)
        # An index by truth is of another kind, though True is a number.
        whole: Any = None if isinstance(item, bool | np.bool_) else item
        number = operator.index(whole)
    except (TypeError, ValueError):  # a step of 0 is a ValueError
        raise BadIndex(
            f"an index has whole numbers, slices and ... alone, got {item!r}",
            where=where,
            hint="index the array of .numpy()",
        ) from None
    if not -size <= number < size:
        said = f"{number} is outside of dimension {dim}, which has {counted(size, 'element')}"
        raise BadIndex(said, where=where)
    return number % size, 1, 0
