"""A diff report says of every tensor of two checkpoints whether both hold the same, and if not, how and perhaps why."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ckpt_tool.compare.reasons import Reason
from ckpt_tool.records import dataclass

__all__ = ["SCHEMA", "STATUSES", "DiffGroup", "DiffReport", "Measures", "ObjectDiff", "Side", "TensorDiff"]

SCHEMA = "ckpt-tool/diff/1"
STATUSES = ("only-a", "only-b", "shape", "dtype", "differs", "same")
"""In order of harm."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints."""

    url: str
    format: str
    n_tensors: int
    nbytes: int
    """Bytes of its tensors, each once."""
    n_ignored_tensors: int = 0
    """Random states and the like that were left out."""
    n_ignored_objects: int = 0
    """Objects that were not compared."""
    n_unselected: int = 0
    """Tensors that the selection leaves out."""


@dataclass(frozen=True, slots=True)
class Measures:
    """How far the elements of two tensors are apart. Measures leave out what is not finite."""

    n_compared: int
    n_differing: int
    """Elements of other bits (of other values, where types differ) that are not NaN on both sides."""
    n_nan_payload: int
    """Elements that are NaN on both sides, of other bits."""
    n_non_finite: int
    n_signed_zero: int
    max_abs: float | None
    """None for types that are only bytes."""
    max_rel: float | None
    """Relative to the larger magnitude of the two; None as above."""
    max_ulp: int | None
    first_index: tuple[int, ...] | None
    """Global index of the first element that differs, in row-major order."""
    first_a: str | None
    first_b: str | None
    bounds: tuple[tuple[int, int], ...] | None
    """The smallest box around all that differs: a half-open range for each dimension, global."""


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor, or one of each side that belong together."""

    fqn: str
    """A's name; B's where A has none."""
    fqn_b: str | None
    """B's name where it is another, None otherwise."""
    status: str
    """One of ``STATUSES``."""
    dtype_a: str | None
    dtype_b: str | None
    shape_a: tuple[int, ...] | None
    shape_b: tuple[int, ...] | None
    measures: Measures | None = None
    """None where nothing was compared: on one side only, shapes that do not correspond, names and shapes alone."""
    reason: Reason | None = None
    is_accepted: bool = False
    """Counts as the same: a cast, where casts are allowed."""


@dataclass(frozen=True, slots=True)
class ObjectDiff:
    """One object that is not a tensor."""

    fqn: str
    status: str
    """``same``, ``differs``, ``only-a`` or ``only-b``."""
    text_a: str | None
    text_b: str | None


@dataclass(frozen=True, slots=True)
class DiffGroup:
    """Tensors of one status and kind of reason."""

    status: str
    reason: str | None
    members: tuple[TensorDiff, ...]


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The difference of two checkpoints."""

    a: Side
    b: Side
    tensors: tuple[TensorDiff, ...]
    """Worst status first; within one, in A's order, then B's."""
    objects: tuple[ObjectDiff, ...]
    """Empty unless they were asked for."""
    notes: tuple[str, ...]
    is_quick: bool
    """Whether names, shapes and types alone were compared."""
    compared_nbytes: int
    """Bytes of both sides that were read and compared."""
    seconds: float
    hint: str | None = None
    """What would pair most of what only one side has."""

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return all(t.status == "same" or t.is_accepted for t in self.tensors) and all(
            each.status == "same" for each in self.objects
        )

    @property
    def counts(self) -> dict[str, int]:
        """Number of tensors by status, all statuses in it."""
        found = Counter(tensor.status for tensor in self.tensors)
        return {status: found[status] for status in STATUSES}

    def groups(self) -> tuple[DiffGroup, ...]:
        """Tensors of equal status and kind of reason together, in the order of ``tensors``."""
        grouped: dict[tuple[str, str | None], list[TensorDiff]] = {}
        for tensor in self.tensors:
            grouped.setdefault((tensor.status, tensor.reason.kind if tensor.reason else None), []).append(tensor)
        return tuple(DiffGroup(status, reason, tuple(members)) for (status, reason), members in grouped.items())

    def to_json(self, *, with_same: bool = False) -> dict[str, Any]:
        """The report as JSON-able values.

        Schema ``ckpt-tool/diff/1``: ``schema same quick seconds compared_nbytes``, ``a`` and ``b`` ``{url format
        tensors nbytes ignored}``, ``counts`` by status, ``ignored {tensors objects unselected}`` of each side and of
        both together, ``notes[]``, ``hint``, ``groups[] {status reason count}``, ``tensors[] {fqn fqn_b status dtype_a
        dtype_b shape_a shape_b accepted reason {kind text confirmed}, compared differing nan_payload non_finite
        signed_zero max_abs max_rel max_ulp first {index a b} bounds}`` and ``objects[] {fqn status a b}``; null where
        it does not apply. Same tensors are listed only ``with_same``. Values are texts, as JSON has no NaN.
        Later versions only add keys.
        """
        return {
            "schema": SCHEMA,
            "same": self.is_same,
            "quick": self.is_quick,
            "seconds": round(self.seconds, 3),
            "compared_nbytes": self.compared_nbytes,
            "a": _side_json(self.a),
            "b": _side_json(self.b),
            "counts": self.counts,
            "ignored": {key: n + _ignored(self.b)[key] for key, n in _ignored(self.a).items()},
            "notes": list(self.notes),
            "hint": self.hint,
            "groups": [
                {"status": group.status, "reason": group.reason, "count": len(group.members)} for group in self.groups()
            ],
            "tensors": [_tensor_json(tensor) for tensor in self.tensors if with_same or tensor.status != "same"],
            "objects": [
                {"fqn": each.fqn, "status": each.status, "a": each.text_a, "b": each.text_b} for each in self.objects
            ],
        }


def _side_json(side: Side) -> dict[str, Any]:
    return {
        "url": side.url,
        "format": side.format,
        "tensors": side.n_tensors,
        "nbytes": side.nbytes,
        "ignored": _ignored(side),
    }


def _ignored(side: Side) -> dict[str, int]:
    return {"tensors": side.n_ignored_tensors, "objects": side.n_ignored_objects, "unselected": side.n_unselected}


def _tensor_json(tensor: TensorDiff) -> dict[str, Any]:
    measures, reason = tensor.measures, tensor.reason
    found: dict[str, Any] = {
        "fqn": tensor.fqn,
        "fqn_b": tensor.fqn_b,
        "status": tensor.status,
        "dtype_a": tensor.dtype_a,
        "dtype_b": tensor.dtype_b,
        "shape_a": None if tensor.shape_a is None else list(tensor.shape_a),
        "shape_b": None if tensor.shape_b is None else list(tensor.shape_b),
        "accepted": tensor.is_accepted,
        "reason": None
        if reason is None
        else {"kind": reason.kind, "text": reason.text, "confirmed": reason.is_confirmed},
    }
    names = ("compared", "differing", "nan_payload", "non_finite", "signed_zero")
    counts = [None] * len(names) if measures is None else [getattr(measures, f"n_{name}") for name in names]
    found.update(zip(names, counts, strict=True))
    for name in ("max_abs", "max_rel", "max_ulp"):
        found[name] = None if measures is None else getattr(measures, name)
    has_first = measures is not None and measures.first_a is not None
    found["first"] = found["bounds"] = None
    if measures is not None and has_first:
        index = None if measures.first_index is None else list(measures.first_index)
        found["first"] = {"index": index, "a": measures.first_a, "b": measures.first_b}
        found["bounds"] = None if measures.bounds is None else [list(each) for each in measures.bounds]
    return found
