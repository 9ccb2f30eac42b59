"""Where a rank's part of a parameter belongs: pairs of slices, of the part and of the whole.

A fused parameter (queries, keys and values; gate and up) has several pairs. Source: nanotron ``parallel/parameters.py``
(``SlicesPair``) and ``serialize/metadata.py`` (versions 1.2 to 1.5). Reads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.geometry.box import Box, intersect
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Part", "parse_part", "whole_part"]

_NUMBER = re.compile(r"(?:np\.int\d+\()?(\d{1,18})\)?")
_MAX_PAIRS = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a parameter."""

    local_shape: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole."""
    pairs: tuple[tuple[Box, Box], ...]
    """Boxes of the part, and of the whole, of the same sizes."""

    def joined(self, box: Box) -> list[tuple[Box, Box]]:
        """The pieces of ``box`` (of the part): each as a box of the part and as one of the whole."""
        found = []
        for local, whole in self.pairs:
            common = intersect(box, local)
            if common is None or not common.volume:
                continue
            offsets = tuple(
                w + c - start for w, c, start in zip(whole.offsets, common.offsets, local.offsets, strict=True)
            )
            found.append((common, Box(offsets, common.sizes)))
        return found


def whole_part(shape: tuple[int, ...]) -> Part:
    """A parameter that each rank has all of."""
    box = Box.whole(shape)
    return Part(shape, shape, ((box, box),))


def parse_part(metadata: Mapping[str, str], local_shape: tuple[int, ...], where: str) -> Part:
    """The part that a file's metadata describes.

    Raises:
        FormatError: slices that do not fit the part or the whole.
        Unsupported: files of versions before 1.3 that do not describe it.
    """
    text, shape_text = metadata.get("local_global_slices_pairs"), metadata.get("unsharded_shape")
    if text is None or shape_text is None:
        raise Unsupported(
            "no local_global_slices_pairs: nanotron's versions before 1.3 need not record where a part belongs",
            where=where,
            hint="save it again with a newer nanotron",
        )
    shape = tuple(int(match[1]) for match in _NUMBER.finditer(shape_text))
    pairs = []
    parts = text.split(";")
    if len(parts) > _MAX_PAIRS:
        raise FormatError(f"{counted(len(parts), 'pair')} of slices", where=where)
    for part in parts:
        local_text, separator, whole_text = part.partition("#")
        local, whole = _box(local_text, local_shape), _box(whole_text, shape)
        if not separator or local is None or whole is None or local.sizes != whole.sizes:
            raise FormatError(
                f"slices {part[:100]!r} do not fit a part {list(local_shape)} of {list(shape)}", where=where
            )
        pairs.append((local, whole))
    if sum(local.volume for local, _ in pairs) != Box.whole(local_shape).volume:
        raise FormatError(f"slices {text[:100]!r} do not fill a part {list(local_shape)}", where=where)
    return Part(local_shape, shape, tuple(pairs))


def _box(text: str, shape: tuple[int, ...]) -> Box | None:
    """``start,stop,step|...`` within a shape; None when it does not fit."""
    offsets, sizes = [], []
    dims = text.split("|") if shape else []
    if len(dims) != len(shape):
        return None
    for dim, size in zip(dims, shape, strict=True):
        fields = [None if field == "None" else _NUMBER.fullmatch(field) for field in dim.split(",")]
        names = dim.split(",")
        if len(fields) != 3 or any(f is None and n != "None" for f, n in zip(fields, names, strict=True)):
            return None
        start, stop, step = (None if field is None else int(field[1]) for field in fields)
        start, stop = start or 0, size if stop is None else stop
        if step not in (None, 1) or not 0 <= start <= stop <= size:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return Box(tuple(offsets), tuple(sizes))
