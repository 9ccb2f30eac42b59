"""A reason is one sentence that explains all of a difference: guessed from probes, confirmed with the bytes.

Guesses are tried from the plainest to the strangest; the first that holds is the reason. Knows no names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from ckpt_tool.compare.confirm import Bits, Confirmer, Place, Verdict
from ckpt_tool.compare.probes import Probe
from ckpt_tool.compare.row_orders import find_order
from ckpt_tool.compare.tiles import ComparedPair, common_box
from ckpt_tool.dtypes import DType, cast_array, dtype
from ckpt_tool.geometry.box import Box
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Reason", "explain", "is_cast"]

_NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_NEEDLE = 32
_TELLING_VALUES = 8


@dataclass(frozen=True, slots=True)
class Reason:
    """Why two tensors differ."""

    kind: str
    """Stable identifier in kebab case: ``cast``, ``transposed``, ``rotary-order`` ..."""
    text: str
    is_confirmed: bool = True
    """Whether every byte was held against it; a sample otherwise."""


def explain(found: ComparedPair, a: Place, b: Place, confirmer: Confirmer) -> Reason | None:
    """The reason of one pair that is not the same, None when no known one fits.

    Reads both tensors again, once for each guess that their samples do not rule out.
    """
    if found.shape_a != found.shape_b:
        return _of_shapes(found, a, b, confirmer)
    if found.dtype_a != found.dtype_b:
        return _untyped(found) or _cast(found) or _rounded_and(found, a, b, confirmer)
    plain = _of_counts(found)
    if plain is not None:
        return plain
    if found.probe is None:
        return None
    return _first_that_holds(found.dtype_a, found.probe, a, b, confirmer) or _partly_zero(found, a, b, confirmer)


def _partly_zero(found: ComparedPair, a: Place, b: Place, confirmer: Confirmer) -> Reason | None:
    """Zeros where the other side has values, the same elsewhere: what a save leaves that lost a part."""
    counts = found.tally
    if counts.max_rel != 1.0 or counts.n_non_finite or found.dtype_a.bits not in (8, 16, 32, 64):
        return None  # a number and zero are exactly as far apart as the number is large
    for name, is_b in (("A", False), ("B", True)):

        def fits(one: Bits, other: Bits, *, is_b: bool = is_b) -> bool:
            return bool(((one == other) | ((other if is_b else one) == 0)).all())

        if confirmer.elementwise(a, b, fits):
            text = f"{name} is zero in all {counted(counts.n_differing, 'element')} that differ"
            return Reason("partly-zero", text)
    return None


def _first_that_holds(kind: DType, probe: Probe, a: Place, b: Place, confirmer: Confirmer) -> Reason | None:
    for reason, verdict in _guesses(kind, probe, a, b, confirmer):
        if verdict:
            return Reason(reason.kind, reason.text, verdict.is_whole)
    return None


class _Rounded:
    """Reads boxes of floating numbers, rounded to a narrower type."""

    def __init__(self, place: Place, wide: DType, narrow: DType) -> None:
        self._place = place
        self._types = wide.as_numpy(), narrow.as_numpy(), np.dtype(f"u{narrow.itemsize}")

    def read(self, row: int, box: Box) -> Bits:  # noqa: ARG002 - of one tensor only
        """See `BoxSource.read`."""
        wide, narrow, bits = self._types
        values = self._place.read(box)
        with np.errstate(over="ignore", invalid="ignore"):
            return values.reshape(-1).view(wide).astype(narrow).view(bits).reshape(values.shape)


def _of_one_type(found: ComparedPair, a: Place, b: Place) -> tuple[DType, Place, Place] | None:
    """Both as numbers of the narrower of their types; None where these are no floating types of two widths."""
    one, other = found.dtype_a, found.dtype_b
    is_float = all(
        kind.kind == "float" and kind.numpy is not None and kind.bits in (16, 32, 64) for kind in (one, other)
    )
    if not is_float or one.bits == other.bits:
        return None
    narrow = min(one, other, key=lambda kind: kind.bits)
    places = [
        place if kind == narrow else Place(_Rounded(place, kind, narrow), place.row, place.shape, narrow.itemsize)
        for place, kind in ((a, one), (b, other))
    ]
    return narrow, places[0], places[1]


def _rounded_and(found: ComparedPair, a: Place, b: Place, confirmer: Confirmer) -> Reason | None:
    """Why tensors of two types differ by more than rounding: what explains the rest."""
    alike = _of_one_type(found, a, b)
    if alike is None:
        return None
    kind, one, other = alike
    reason = _first_that_holds(kind, confirmer.probe(one, other), one, other, confirmer)
    return None if reason is None else _with_cast(reason, found)


def _with_cast(reason: Reason, found: ComparedPair) -> Reason:
    text = f"{reason.text}; and cast, {found.dtype_a.name} in A and {found.dtype_b.name} in B"
    return Reason(reason.kind, text, reason.is_confirmed)


def is_cast(found: ComparedPair) -> bool:
    """Whether two tensors of other types are alike but for rounding the one to the other's type."""
    has_values = found.dtype_a.numpy is not None and found.dtype_b.numpy is not None
    return found.dtype_a != found.dtype_b and has_values and not found.tally.n_uncast


def _of_counts(found: ComparedPair) -> Reason | None:
    """What the counts alone explain."""
    counts = found.tally
    if not counts.n_differing:
        return Reason("nan-payload", "only NaN of other bits; every number is the same")
    if counts.n_signed_zero == counts.n_differing:
        return Reason("signed-zero", "only zeros of the other sign; every value is the same")
    return None


def _untyped(found: ComparedPair) -> Reason | None:
    """The same bytes, of which one side does not say what they are, as numpy does of bfloat16."""
    nameless = next((kind.name for kind in (found.dtype_a, found.dtype_b) if kind.kind == "opaque"), None)
    if nameless is None or found.tally.n_differing or found.dtype_a.bits != found.dtype_b.bits:
        return None
    return Reason("untyped", f"every byte is the same; {nameless} names no type")


def _cast(found: ComparedPair) -> Reason | None:
    if not is_cast(found):
        return None
    counts = found.tally
    names = f"{found.dtype_a.name} to {found.dtype_b.name}"
    if not counts.n_differing:
        return Reason("cast", f"every value is the same, cast from {names}")
    if found.dtype_a.bits >= found.dtype_b.bits:
        return Reason("cast", f"B is A rounded from {names}")
    return Reason("cast", f"A is B rounded from {found.dtype_b.name} to {found.dtype_a.name}")


def _of_shapes(found: ComparedPair, a: Place, b: Place, confirmer: Confirmer) -> Reason | None:
    box = common_box(found.shape_a, found.shape_b)
    if box is not None:
        return _padded(found, a, b, confirmer, box)
    if found.dtype_a != found.dtype_b:
        alike = _of_one_type(found, a, b)
        reason = None if alike is None else _recut(alike[1], alike[2], confirmer)
        return None if reason is None else _with_cast(reason, found)
    return None if found.dtype_a.bits % 8 else _recut(a, b, confirmer)


def _recut(a: Place, b: Place, confirmer: Confirmer) -> Reason | None:
    """The same elements in another shape."""
    if len(a.shape) == 2 and a.shape == b.shape[::-1]:
        verdict = confirmer.transposed(a, b)
        if verdict:
            return Reason("transposed", "B is A transposed", verdict.is_whole)
    if prod(a.shape) == prod(b.shape) and confirmer.reshaped(a, b):
        return Reason("reshaped", "the same elements in the same order, cut into another shape")
    return None


def _padded(found: ComparedPair, a: Place, b: Place, confirmer: Confirmer, common: Box) -> Reason | None:
    """One side has more along one dimension, behind what both have."""
    if not (found.tally.is_same or (found.dtype_a != found.dtype_b and not found.tally.n_uncast)):
        return None
    dim = next(d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n)
    larger, name = (a, "A") if a.shape[dim] > b.shape[dim] else (b, "B")
    more = larger.shape[dim] - common.sizes[dim]
    offsets = tuple(common.sizes[d] if d == dim else 0 for d in range(common.ndim))
    rest = Box(offsets, tuple(more if d == dim else size for d, size in enumerate(larger.shape)))
    what = "rows" if dim == 0 else f"places along dimension {dim}"
    if found.dtype_a.bits % 8 == 0 and found.dtype_b.bits % 8 == 0 and confirmer.zero(larger, rest):
        return Reason("padded", f"{name} has {more:,} more {what}, all zero; what both have is the same")
    return Reason("extended", f"{name} has {more:,} more {what}, not zero; what both have is the same")


def _guesses(kind: DType, probe: Probe, a: Place, b: Place, confirmer: Confirmer) -> Iterator[tuple[Reason, Verdict]]:
    """Guesses that the samples allow, each with what the bytes say of it."""
    grid_a, grid_b = probe.grids
    for name, place, grid, other in (("A", a, grid_a, grid_b), ("B", b, grid_b, grid_a)):
        if not grid.any() and other.any():
            yield Reason("zeros", f"{name} is all zero"), confirmer.zero(place, Box.whole(place.shape))
    if kind.kind == "float" and kind.numpy is not None and kind.name != "float8_e8m0fnu":
        yield from _values(kind, probe.grids, a, b, confirmer)
    order = find_order(*probe.signatures)
    if order is not None:
        yield Reason(order.kind, order.text), confirmer.rows(a, b, order.rows)
    may_be_columns = order is None and len(b.shape) == 2 and probe.may_hold_same_columns()
    marks = confirmer.column_marks(a, b) if may_be_columns else None
    columns = None if marks is None else find_order(*marks)
    if columns is not None:
        text = re.sub(r"\brow(?=s?\b)", "column", columns.text)
        yield Reason(columns.kind.replace("rows", "columns"), text), confirmer.columns(a, b, columns.rows)
    is_square = len(a.shape) == 2 and a.shape[0] == a.shape[1]
    if is_square and np.array_equal(grid_a.T, grid_b):
        yield Reason("transposed", "B is A transposed"), confirmer.transposed(a, b)
    shift = _shift(*probe.heads) or _row_shift(probe)
    if shift:
        where = f"B holds A {counted(abs(shift), 'element')} {'later' if shift > 0 else 'earlier'}"
        yield Reason("shifted", where), confirmer.shifted(a, b, shift)


def _values(
    kind: DType, grids: Sequence[npt.NDArray[np.uint64]], a: Place, b: Place, confirmer: Confirmer
) -> Iterator[tuple[Reason, Verdict]]:
    """Guesses about each value by itself."""
    bits = np.dtype(f"u{kind.itemsize}")
    one, other = (grid.astype(bits) for grid in grids)
    sign = np.array(1 << (kind.bits - 1), dtype=bits)

    def is_negated(x: Bits, y: Bits) -> bool:
        apart = x.reshape(-1).view(bits) ^ y.reshape(-1).view(bits)
        return bool(((apart == sign) | ((x.reshape(-1).view(bits) | sign) == sign) & (apart == 0)).all())

    if is_negated(one, other):
        yield Reason("negated", "B is A with every sign flipped"), confirmer.elementwise(a, b, is_negated)
    # Values that differ so much among themselves are not rounded to one another by coincidence.
    telling = [len(np.unique(grid)) >= _TELLING_VALUES for grid in (one, other)]
    for name in _NARROW:
        narrow = dtype(name)
        if narrow.bits >= kind.bits or not any(telling):
            continue

        def is_rounded(x: Bits, y: Bits, narrow: DType = narrow) -> bool:
            with np.errstate(over="ignore", invalid="ignore"):
                values = x.reshape(-1).view(kind.as_numpy())
                rounded = cast_array(cast_array(values, narrow), kind)
            return bool((rounded.view(bits) == y.reshape(-1).view(bits)).all())

        if telling[1] and is_rounded(one, other):
            text = f"B holds A's values after a detour through {name}"
            yield Reason("rounded", text), confirmer.elementwise(a, b, is_rounded)
        elif telling[0] and is_rounded(other, one):
            text = f"A holds B's values after a detour through {name}"
            yield Reason("rounded", text), confirmer.elementwise(b, a, is_rounded)


def _shift(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> int:
    """Elements that B's first ones lie behind A's (before, when negative); 0 when no such number is seen."""
    size = min(_NEEDLE, len(a) // 2)
    if size < 4:
        return 0
    for hay, needle, sign in ((b, a[:size], 1), (a, b[:size], -1)):
        if len(set(needle.tolist())) < _TELLING_VALUES // 2:
            continue
        starts = np.flatnonzero(hay[: len(hay) - size + 1] == needle[0])
        hits = [at for at in starts.tolist() if np.array_equal(hay[at : at + size], needle)]
        if hits and hits[0]:
            return sign * int(hits[0])
    return 0


def _row_shift(probe: Probe) -> int:
    """Elements of a shift by whole rows; 0 when there is none."""
    a, b = probe.signatures
    n = len(a)
    for hay, needle, sign in ((b, a, 1), (a, b, -1)):
        hits: list[int] = np.flatnonzero(hay == needle[0]).tolist() if n else []
        for hit in [hit for hit in hits if 0 < hit < n // 2][:16]:
            if np.array_equal(hay[hit:], needle[: n - hit]):
                return sign * hit * probe.n_columns
    return 0
