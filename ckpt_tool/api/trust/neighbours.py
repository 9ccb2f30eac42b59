"""A neighbour is another tensor that holds what one was expected to hold: of the next layer, tied, or misnamed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ckpt_tool.compare.confirm import Confirmer, Place
from ckpt_tool.compare.differences import same_bits
from ckpt_tool.compare.reasons import Reason
from ckpt_tool.compare.tiles import ComparedPair, Pair
from ckpt_tool.manifest.model import Manifest

__all__ = ["NeighbourFinder"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# What models call the two ends that may share their weights.
_ENDS = re.compile(r"(?:embed|wte|lm_head|output|shared)")
_MAX_TRIED = 4


class NeighbourFinder:
    """Finds neighbours by the digests of samples, and confirms them with the bytes."""

    def __init__(
        self,
        a: Manifest,
        b: Manifest,
        pairs: Sequence[Pair],
        found: Sequence[ComparedPair],
        place: Callable[[int, int], Place],
        confirmer: Confirmer,
    ) -> None:
        self._manifests = (a, b)
        self._pairs = pairs
        self._found = found
        self._place = place
        self._confirmer = confirmer
        self._numbers: tuple[dict[bytes, list[int]], dict[bytes, list[int]]] = ({}, {})
        for number, each in enumerate(found):
            if each.digests is not None:
                for side in (0, 1):
                    self._numbers[side].setdefault(each.digests[side], []).append(number)

    def explain(self, number: int) -> Reason | None:
        """Which other tensor one of a pair that differs is equal to, in the other checkpoint or its own."""
        digests = self._found[number].digests
        if digests is None:
            return None
        own = self._fqn(0, number), self._fqn(1, number)
        for other in self._candidates(0, digests[1], number):  # what B holds is elsewhere in A
            if self._equal(0, other, 1, number):
                name = self._fqn(0, other)
                step = _layer_step(own[0], name)
                if step:
                    text = f"B holds A's layer {step:+d}: it is equal to {name}"
                    return Reason("off-by-one-layer", text)
                break
        for side, mine in ((1, digests[1]), (0, digests[0])):
            for other in self._candidates(side, mine, number):
                if self._equal(side, other, side, number):
                    text = f"in {'AB'[side]} it is a copy of {self._fqn(side, other)}, as tied tensors are"
                    return Reason("tied-copy", text)
        for other in self._candidates(0, digests[1], number):
            if self._equal(0, other, 1, number):
                return Reason("misplaced", f"B holds what A calls {self._fqn(0, other)}")
        return None

    def explain_only(self, side: int, row: int) -> Reason | None:
        """Whether a tensor that the other side lacks is a copy of one that it has under another name."""
        tensors = self._manifests[side].tensors
        fqn = tensors.fqns[row]
        if not _ENDS.search(fqn):
            return None
        shape, dtype = tensors.shape_of(row), tensors.dtypes[row]
        for pair in self._pairs:
            other = (pair.row_a, pair.row_b)[side]
            is_alike = tensors.dtypes[other] == dtype and tensors.shape_of(other) == shape
            if is_alike and _ENDS.search(tensors.fqns[other]) and dtype.bits % 8 == 0:
                verdict = self._confirmer.elementwise(self._place(side, row), self._place(side, other), same_bits)
                if verdict:
                    return Reason("tied-copy", f"a copy of {tensors.fqns[other]}, which both have")
        return None

    def _candidates(self, side: int, digest: bytes, number: int) -> list[int]:
        """Pairs whose tensor on ``side`` may be what has this digest, a neighbouring layer first."""
        mine = self._found[number]
        fqn = self._fqn(side, number)
        found = [
            other
            for other in self._numbers[side].get(digest, ())
            if other != number
            and (self._found[other].shape_a, self._found[other].dtype_a) == (mine.shape_a, mine.dtype_a)
        ]
        found.sort(key=lambda other: _layer_step(fqn, self._fqn(side, other)) == 0)
        return found[:_MAX_TRIED]

    def _equal(self, side: int, number: int, other_side: int, other: int) -> bool:
        one, two = self._place(side, self._row(side, number)), self._place(other_side, self._row(other_side, other))
        return bool(self._confirmer.elementwise(one, two, same_bits))

    def _row(self, side: int, number: int) -> int:
        pair = self._pairs[number]
        return (pair.row_a, pair.row_b)[side]

    def _fqn(self, side: int, number: int) -> str:
        return self._manifests[side].tensors.fqns[self._row(side, number)]


def _layer_step(fqn: str, other: str) -> int:
    """By how much the one number in which two names differ does; 0 unless it is 1 up or down.

    >>> _layer_step("h.3.w", "h.4.w"), _layer_step("h.3.w", "h.5.w"), _layer_step("h.3.w", "h.4.b")
    (1, 0, 0)
    """
    if _NUMBER.sub("#", fqn) != _NUMBER.sub("#", other):
        return 0
    steps = [int(n) - int(m) for m, n in zip(_NUMBER.findall(fqn), _NUMBER.findall(other), strict=True) if m != n]
    return steps[0] if len(steps) == 1 and abs(steps[0]) == 1 else 0
