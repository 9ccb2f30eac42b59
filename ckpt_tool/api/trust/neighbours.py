"""A neighbour is another tensor that holds what one was expected to hold: of the next layer, tied, or misnamed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ckpt_tool.compare.confirm import Confirmer, Place
from ckpt_tool.compare.differences import same_bits
from ckpt_tool.compare.reasons import Reason
from ckpt_tool.compare.tiles import ComparedPair, Pair
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import some_of

__all__ = ["NeighbourFinder"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# What models call the two ends that may share their weights.
_ENDS = re.compile(r"(?:embed|wte|lm_head|output|shared)")
_MAX_TRIED = 4
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class _Layers:
    """Two names that differ in one number, which is taken for that of their layer."""

    stack: str
    """What is in front of the number."""
    own: int
    other: int

    @property
    def kind(self) -> str:
        return "off-by-one-layer" if abs(self.own - self.other) == 1 else "renumbered"


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
        self._fronts = _fronts([(a.tensors.fqns[pair.row_a], b.tensors.fqns[pair.row_b]) for pair in pairs])
        self._moved: dict[str, dict[int, int]] = {}
        """By stack, as A calls it: which layer of A each layer of B is that holds another one."""
        self._tried = set[str]()
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
        for other in self._candidates(0, digests[1], number):  # what B holds is elsewhere in A
            if self._equal(0, other, 1, number):
                layers = _layers(self._fqn(0, number), self._fqn(0, other))
                if layers is not None:
                    return self._of_layers(layers)
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
        """Whether a tensor that the other side lacks is one that it has in another layer, or a copy of one."""
        tensors = self._manifests[side].tensors
        fqn = tensors.fqns[row]
        moved = self.explain_moved(side, row)
        if moved is not None or not _ENDS.search(fqn):
            return moved
        shape, dtype = tensors.shape_of(row), tensors.dtypes[row]
        for pair in self._pairs:
            other = (pair.row_a, pair.row_b)[side]
            is_alike = tensors.dtypes[other] == dtype and tensors.shape_of(other) == shape
            if is_alike and _ENDS.search(tensors.fqns[other]) and dtype.bits % 8 == 0:
                verdict = self._confirmer.elementwise(self._place(side, row), self._place(side, other), same_bits)
                if verdict:
                    return Reason("tied-copy", f"a copy of {tensors.fqns[other]}, which both have")
        return None

    def explain_moved(self, side: int, row: int) -> Reason | None:
        """Whether a tensor is the one of another layer of the other side; to be asked after all pairs."""
        layers = self._in_other_layer(side, row)
        return None if layers is None else self._of_layers(layers)

    def told(self, reason: Reason | None, fqn: str) -> Reason | None:
        """A reason as it reads once all layers are known that hold another one: which layers of B are which of A."""
        if reason is None or reason.kind not in ("off-by-one-layer", "renumbered"):
            return reason
        names = (fqn, _as_other(fqn, self._fronts[::-1]))
        stacks = (each for each in self._moved if any(name.startswith(f"{each}.") for name in names))
        stack = max(stacks, key=len, default="")
        return Reason(reason.kind, _moved_text(stack, self._moved[stack])) if stack else reason

    def _of_layers(self, layers: _Layers) -> Reason:
        self._moved.setdefault(layers.stack, {})[layers.own] = layers.other
        return Reason(layers.kind, _moved_text(layers.stack, {layers.own: layers.other}))

    def _in_other_layer(self, side: int, row: int) -> _Layers | None:
        """The layers of B and A, where a tensor is what the other side has a layer further on, as others of its stack.

        Where no other tells, the next layers are looked at, for one tensor of each stack.
        """
        fqn = self._manifests[side].tensors.fqns[row]
        fqn = fqn if side == 0 else _as_other(fqn, self._fronts[::-1])
        for at in _NUMBER.finditer(fqn):
            stack, number, rest = fqn[: max(at.start() - 1, 0)], int(at[0]), fqn[at.end() :]
            steps = {other - own for own, other in self._moved.get(stack, {}).items()}
            if not steps and stack and stack not in self._tried:
                self._tried.add(stack)
                steps = {1, -1}
            elif len(steps) != 1:
                continue
            for step in steps:
                own, other = (number - step, number) if side == 0 else (number, number + step)
                if self._is_called(f"{stack}.{own if side == 0 else other}{rest}", side, row):
                    return _Layers(stack, own, other)
        return None

    def _is_called(self, name: str, side: int, row: int) -> bool:
        """Whether the other side has a tensor under a name, as A calls it, that is equal to one of this side."""
        tensors, others = self._manifests[side].tensors, self._manifests[1 - side].tensors
        there = others.index.get(name if side == 1 else _as_other(name, self._fronts))
        if there is None or tensors.dtypes[row].bits % 8:
            return False
        if (others.dtypes[there], others.shape_of(there)) != (tensors.dtypes[row], tensors.shape_of(row)):
            return False
        return bool(self._confirmer.elementwise(self._place(side, row), self._place(1 - side, there), same_bits))

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
        found.sort(key=lambda other: _distance(fqn, self._fqn(side, other)))
        return found[:_MAX_TRIED]

    def _equal(self, side: int, number: int, other_side: int, other: int) -> bool:
        one, two = self._place(side, self._row(side, number)), self._place(other_side, self._row(other_side, other))
        return bool(self._confirmer.elementwise(one, two, same_bits))

    def _row(self, side: int, number: int) -> int:
        pair = self._pairs[number]
        return (pair.row_a, pair.row_b)[side]

    def _fqn(self, side: int, number: int) -> str:
        return self._manifests[side].tensors.fqns[self._row(side, number)]


def _fronts(names: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """What most names of A and of B begin with before they are alike; two empty ones where they are the same.

    >>> _fronts([("h.0.w", "model.h.0.w"), ("n.w", "model.n.w")]), _fronts([("a.w", "a.w")])
    (('', 'model.'), ('', ''))
    """
    found: Counter[tuple[str, str]] = Counter()
    for one, other in names:
        tail = next((one[at:] for at in _starts(one) if other.endswith(one[at:]) and _is_start(other, one[at:])), None)
        if tail is not None:
            found[one[: len(one) - len(tail)], other[: len(other) - len(tail)]] += 1
    return max(found, key=lambda fronts: found[fronts], default=("", ""))


def _starts(name: str) -> list[int]:
    """Where a name and the parts of it begin that follow a dot."""
    return [0, *(at.end() for at in re.finditer(r"\.", name))]


def _is_start(name: str, tail: str) -> bool:
    return len(name) == len(tail) or name[-len(tail) - 1] == "."


def _as_other(fqn: str, fronts: tuple[str, str]) -> str:
    """A name with the second front in place of the first."""
    return fronts[1] + fqn.removeprefix(fronts[0]) if fqn.startswith(fronts[0]) else fqn


def _layers(fqn: str, other: str) -> _Layers | None:
    """The one number in which two names differ, on both sides; None where they differ in more than that.

    >>> _layers("h.3.w", "h.4.w").kind, _layers("h.3.w", "h.5.w").kind, _layers("h.3.w", "h.4.b")
    ('off-by-one-layer', 'renumbered', None)
    """
    if _NUMBER.sub("#", fqn) != _NUMBER.sub("#", other):
        return None
    differing = [
        (at, int(at[0]), int(number))
        for at, number in zip(_NUMBER.finditer(fqn), _NUMBER.findall(other), strict=True)
        if at[0] != number
    ]
    if len(differing) != 1 or not differing[0][0].start():
        return None
    at, own, theirs = differing[0]
    return _Layers(fqn[: at.start() - 1], own, theirs)


def _distance(fqn: str, other: str) -> int:
    """How many layers two names are apart; far for those that differ in more."""
    layers = _layers(fqn, other)
    return 1 << 30 if layers is None else abs(layers.own - layers.other)


def _moved_text(stack: str, moved: Mapping[int, int]) -> str:
    """Which layers of B are which of A, the first one named.

    >>> _moved_text("h", {2: 1, 1: 0}), _moved_text("h", {0: 3}), _moved_text("h", {0: 3, 3: 0})
    ("B's h.1 to 2 are A's 0 to 1: B's h.1 is A's h.0", "B's h.0 is A's h.3", "B's h.0 is A's h.3, B's h.3 is A's h.0")
    """
    pairs = sorted(moved.items())
    (first, other), (last, last_other) = pairs[0], pairs[-1]
    if len(pairs) > 1 and all(theirs - own == other - first for own, theirs in pairs):
        return (
            f"B's {stack}.{first} to {last} are A's {other} to {last_other}: B's {stack}.{first} is A's {stack}.{other}"
        )
    return some_of([f"B's {stack}.{own} is A's {stack}.{theirs}" for own, theirs in pairs], _SHOWN)
