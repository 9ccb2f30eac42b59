from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.trust.diff import diff
from ckpt_tool.compare.report import TensorDiff
from ckpt_tool.compare.row_orders import find_order
from ckpt_tool.storage.memory import MemoryStore
from tests.checks.synthetic import checkpoint_of, stored
from tests.storage.recording import RecordingStore

Array = npt.NDArray[Any]


def opened(arrays: Mapping[str, Array], n_files: int = 1) -> Checkpoint:
    """A checkpoint of arrays; bfloat16 by its own name."""
    manifest, files = stored(arrays, n_files)
    return checkpoint_of(manifest, files)


def random(*shape: int, seed: int = 0) -> Array:
    """Normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def found(a: Mapping[str, Array], b: Mapping[str, Array], fqn: str = "w", **options: Any) -> TensorDiff:
    """What the diff says of one tensor."""
    report = diff(opened(a), opened(b, 2), **options)
    return next(each for each in report.tensors if each.fqn == fqn)


def reason(a: Array, b: Array, **options: Any) -> tuple[str, str] | None:
    """Kind and sentence of the reason why B's tensor is not A's."""
    why = found({"w": a}, {"w": b}, **options).reason
    return None if why is None else (why.kind, why.text)


def swapped(a: Array, *shape: int) -> Array:
    """Rows seen as ``[outer, a, b, inner]`` with the two middle ones exchanged."""
    return a.reshape(*shape, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)


def grouped(a: Array, groups: int, q: int, kv: int) -> Array:
    """Query, key and value rows, each whole, dealt out to groups."""
    parts = np.split(a, [groups * q, groups * (q + kv)])
    return np.concatenate([each.reshape(groups, -1, *a.shape[1:]) for each in parts], axis=1).reshape(a.shape)


ROWS = random(48, 10)
REORDERED: Mapping[str, tuple[Callable[[Array], Array], str, str]] = {
    "rotary, interleaved": (
        lambda a: swapped(a, 4, 2, 6, 1), "rotary-order", "heads of 12 rows are interleaved pairs, A's halves"
    ),
    "rotary, halves": (
        lambda a: swapped(a, 4, 6, 2, 1), "rotary-order", "heads of 12 rows are halves, A's interleaved pairs"
    ),
    "gate and up swapped": (lambda a: np.roll(a, 24, axis=0), "halves-swapped", "as gate and up may be"),
    "gate and up, rank by rank": (lambda a: swapped(a, 1, 2, 4, 6), "rank-order", "[2, 4] in A, [4, 2] in B"),
    "rows in rank order": (lambda a: swapped(a, 2, 4, 3, 2), "rank-order", "blocks of 2 rows in each of 2 groups"),
    "qkv in groups": (lambda a: grouped(a, 4, 8, 2), "fused-qkv-order", "B 4 groups of 8 + 2 + 2 rows"),
    "rolled": (lambda a: np.roll(a, -5, axis=0), "rows-rolled", "begin with A's row 5"),
    "shuffled": (lambda a: a[np.random.default_rng(3).permutation(48)], "rows-reordered", "in another order"),
}  # fmt: skip


def test_rows_in_another_order_in_one_part_of_a_tensor() -> None:
    """Of parts that are the same on both sides the rows are looked at too, once a difference was seen in another."""
    a = random(8, 4096)
    order = [0, 1, 4, 3, 2, 5, 6, 7]  # of the rows that differ alone, blocks of two could have changed places
    why = reason(a, a[order], memory_budget_bytes=1 << 19, n_workers=2)
    assert why == ("rows-reordered", "B holds A's rows in another order (2 moved; row 2 is A's 4)")


@pytest.mark.parametrize("name", REORDERED)
def test_rows_in_another_order(name: str) -> None:
    """Each known order of rows is called by its name, with its sizes."""
    change, kind, text = REORDERED[name]
    why = reason(ROWS, change(ROWS))
    assert why is not None
    assert (why[0], text in why[1]) == (kind, True), why


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (
            lambda a: swapped(a, 4, 2, 6, 1),
            "rotary-order",
            "heads of 12 rows are interleaved pairs, A's halves; and cast",
        ),
        (
            lambda a: np.roll(a, 24, axis=0),
            "halves-swapped",
            "as gate and up may be; and cast, float32 in A and bfloat16",
        ),
        (lambda a: a.T, "transposed", "B is A transposed; and cast, float32 in A and bfloat16 in B"),
    ],
)
def test_another_order_and_a_cast(change: Callable[[Array], Array], kind: str, text: str) -> None:
    """What is converted is cast on the way more often than not: both are seen, whichever side is narrower."""
    other = np.ascontiguousarray(change(ROWS)).astype(ml_dtypes.bfloat16)
    for why in (reason(ROWS, other), reason(other, ROWS)):
        assert why is not None
        assert why[0] == kind
    assert text in (reason(ROWS, other) or ("", ""))[1]
    assert reason(ROWS, random(48, 10, seed=5).astype(ml_dtypes.bfloat16)) is None


def test_columns_in_another_order() -> None:
    """A matrix that ranks cut by columns, joined in their order."""
    a = random(10, 48)
    why = reason(a, np.ascontiguousarray(swapped(a.T, 1, 2, 4, 6).T))
    assert why == ("rank-order", "blocks of 6 columns: [2, 4] in A, [4, 2] in B, as fused parts in rank order are")
    assert reason(a, random(10, 48, seed=1)) is None


def test_grouped_to_whole() -> None:
    """The inverse of grouping is seen too."""
    why = reason(grouped(ROWS, 4, 8, 2), ROWS)
    assert why is not None
    assert (why[0], "A 4 groups of 8 + 2 + 2 rows" in why[1]) == ("fused-qkv-order", True)


def test_equal_rows_do_not_hide_an_order() -> None:
    """Rows that occur several times may stand in any order."""
    a = ROWS.copy()
    a[20:28] = 0
    why = reason(a, swapped(a, 4, 2, 6, 1))
    assert why is not None
    assert why[0] == "rotary-order"


def test_experts_are_rows_too() -> None:
    """A stack of matrices is looked at row by row."""
    a = random(4, 12, 6)
    b = a.reshape(4, 2, 6, 6)[:, ::-1].reshape(a.shape)
    why = reason(a, b)
    assert why is not None
    assert why[0] == "rows-reordered"


@given(st.integers(2, 5), st.integers(2, 5), st.integers(1, 4), st.integers(1, 3))
def test_exchanged_axes_are_found_for_all_sizes(a: int, b: int, inner: int, outer: int) -> None:
    """Whatever the sizes, the order that is reported is the one that was made."""
    n = outer * a * b * inner
    rows = np.arange(n)
    made = rows.reshape(outer, a, b, inner).swapaxes(1, 2).reshape(-1)
    marks = np.random.default_rng(0).permutation(n).astype(np.uint64)
    order = find_order(marks, marks[made])
    assert order is not None
    assert order.kind in {"rotary-order", "rank-order"}
    assert order.rows.tolist() == made.tolist()


def test_no_order() -> None:
    """Equal rows in their order, other rows, and no rows have none."""
    marks = np.arange(6, dtype=np.uint64)
    assert find_order(marks, marks.copy()) is None
    assert find_order(marks, marks + np.uint64(1)) is None
    assert find_order(marks[:0], marks[:0]) is None


def test_values_changed_alike() -> None:
    """Flipped signs, zeros on a side, and a detour through a narrower type."""
    a = random(20, 12)
    a[3, 4] = 0
    narrow = a.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert reason(a, -a) == ("negated", "B is A with every sign flipped")
    assert reason(a, np.zeros_like(a)) == ("zeros", "B is all zero")
    assert reason(np.zeros_like(a), a) == ("zeros", "A is all zero")
    assert reason(a, narrow) == ("rounded", "B holds A's values after a detour through bfloat16")
    assert reason(narrow, a) == ("rounded", "A holds B's values after a detour through bfloat16")
    half = a.astype(np.float16).astype(np.float32)
    assert reason(a, half) == ("rounded", "B holds A's values after a detour through float16")


def test_signs_of_zeros_and_payloads_of_nan() -> None:
    """Differences that are none of value say so."""
    a = np.array([0.0, 1.0, np.nan], dtype="f4")
    b = np.array([-0.0, 1.0, np.nan], dtype="f4")
    assert reason(a, b) == ("signed-zero", "only zeros of the other sign; every value is the same")
    c = a.copy()
    c.view("u4")[2] ^= 1
    assert reason(a, c) == ("nan-payload", "only NaN of other bits; every number is the same")


def test_other_types() -> None:
    """A cast is recognised in both directions, and an exact one is told from rounding."""
    a = random(9, 7)
    b = a.astype(np.float16)
    assert reason(a, b) == ("cast", "B is A rounded from float32 to float16")
    assert reason(b, a) == ("cast", "A is B rounded from float32 to float16")
    assert reason(b, b.astype(np.float32)) == ("cast", "every value is the same, cast from float16 to float32")
    b[0, 0] += 1
    assert reason(a, b) is None


@pytest.mark.parametrize(("shape", "kind"), [((16, 16), "transposed"), ((12, 20), "transposed")])
def test_transposition(shape: tuple[int, int], kind: str) -> None:
    """A transposed matrix is recognised, of equal sides or not."""
    a = random(*shape)
    assert reason(a, np.ascontiguousarray(a.T)) == (kind, "B is A transposed")


def test_other_shapes() -> None:
    """Padding, more rows, and the same elements in another shape."""
    a = random(6, 4)
    padded = np.concatenate([a, np.zeros((2, 4), "f4")])
    assert reason(a, padded) == ("padded", "B has 2 more rows, all zero; what both have is the same")
    assert reason(padded, a) == ("padded", "A has 2 more rows, all zero; what both have is the same")
    wider = np.concatenate([a, np.ones((6, 1), "f4")], axis=1)
    text = "B has 1 more places along dimension 1, not zero; what both have is the same"
    assert reason(a, wider) == ("extended", text)
    assert reason(a, a.reshape(3, 8)) == ("reshaped", "the same elements in the same order, cut into another shape")
    assert reason(a, a.reshape(24)) == ("reshaped", "the same elements in the same order, cut into another shape")
    assert reason(a, random(8, 4, seed=1)) is None
    assert reason(a, random(4, 6, seed=1)) is None
    why = found({"w": a}, {"w": padded.astype(np.float16)})
    assert (why.status, why.reason is not None and why.reason.kind) == ("shape", "padded")


@pytest.mark.parametrize("by", [1, -3, 20, -40])
def test_shifts(by: int) -> None:
    """Elements that lie behind or before where they should are seen, by whole rows or not."""
    flat = random(50 * 10).reshape(-1)
    a, b = flat[100:400], flat[100 - by : 400 - by]
    where = f"B holds A {abs(by)} element{'s' if abs(by) > 1 else ''} {'later' if by > 0 else 'earlier'}"
    assert reason(a.reshape(30, 10), b.reshape(30, 10)) == ("shifted", where)
    assert reason(a, b) == ("shifted", where)


def test_a_layer_too_far() -> None:
    """A layer that holds what its neighbour should is called so, with the neighbour's name."""
    layers = {f"h.{n}.w": random(8, 6, seed=n) for n in range(4)}
    late = {f"h.{n}.w": layers[f"h.{max(n - 1, 0)}.w"] for n in range(4)}
    why = found(layers, late, "h.2.w").reason
    assert why is not None
    assert (why.kind, why.text) == ("off-by-one-layer", "B's h.1 to 3 are A's 0 to 2: B's h.1 is A's h.0")


def test_layers_numbered_from_one() -> None:
    """What only one side has is told from the layers that both have, and all of it by one sentence."""
    a = {f"h.{n}.{w}": random(8, 6, seed=n + 9 * len(w)) for n in range(3) for w in ("w", "up")}
    b = {f"h.{n + 1}.{w}": a[f"h.{n}.{w}"] for n in range(3) for w in ("w", "up")}
    reasons = {(each.status, each.reason) for each in diff(opened(a), opened(b)).tensors}
    assert {status for status, _ in reasons} == {"differs", "only-a", "only-b"}
    assert {why and why.text for _, why in reasons} == {"B's h.1 to 3 are A's 0 to 2: B's h.1 is A's h.0"}


def test_experts_in_another_order() -> None:
    """Numbers that changed places are listed one by one."""
    a = {f"h.0.experts.{n}.w": random(8, 6, seed=n) for n in range(3)}
    why = found(a, {f"h.0.experts.{2 - n}.w": each for n, (_, each) in enumerate(a.items())}, "h.0.experts.0.w").reason
    assert why is not None
    assert (why.kind, why.text) == (
        "renumbered", "B's h.0.experts.0 is A's h.0.experts.2, B's h.0.experts.2 is A's h.0.experts.0"
    )  # fmt: skip


def test_copies_and_misplaced_tensors() -> None:
    """A tied copy, and a tensor under another's name."""
    a = {"embed.w": random(8, 6), "lm_head.w": random(8, 6, seed=1)}
    why = found(a, {**a, "lm_head.w": a["embed.w"]}, "lm_head.w").reason
    assert why is not None
    assert (why.kind, why.text) == ("tied-copy", "in B it is a copy of embed.w, as tied tensors are")
    why = found({**a, "lm_head.w": a["embed.w"]}, a, "lm_head.w").reason
    assert why is not None
    assert (why.kind, why.text) == ("tied-copy", "in A it is a copy of embed.w, as tied tensors are")
    exchanged = {"q": a["embed.w"], "k": a["lm_head.w"]}
    why = found({"k": a["embed.w"], "q": a["lm_head.w"]}, exchanged, "k").reason
    assert why is not None
    assert (why.kind, why.text) == ("misplaced", "B holds what A calls q")


def test_tied_tensor_that_one_side_lacks() -> None:
    """A head that only one side has is explained by the embedding that it copies."""
    embed = random(8, 6)
    why = found({"embed.w": embed, "lm_head.w": embed}, {"embed.w": embed}, "lm_head.w")
    assert (why.status, why.reason is not None and why.reason.kind) == ("only-a", "tied-copy")
    why = found({"embed.w": embed}, {"embed.w": embed, "lm_head.w": random(8, 6, seed=1)}, "lm_head.w")
    assert (why.status, why.reason) == ("only-b", None)


def test_training_is_no_reason() -> None:
    """Tensors that a step of training changed have no reason, and nothing is read again for them."""
    a = random(40, 30)
    b = (a + random(40, 30, seed=5) * 1e-3).astype(np.float32)
    stores = []
    sides = []
    for array in (a, b):
        manifest, files = stored({"w": array})
        stores.append(RecordingStore(MemoryStore(files)))
        sides.append(checkpoint_of(manifest, files, store=stores[-1]))
    report = diff(*sides)
    assert report.tensors[0].reason is None
    assert [store.nbytes for store in stores] == [a.nbytes, b.nbytes]


def test_near_misses_are_no_reason() -> None:
    """One element that does not follow the rule, and samples that do, give no reason."""
    a = random(64, 64)
    for change in (np.negative, np.transpose, lambda x: np.roll(x, 32, axis=0)):
        b = np.ascontiguousarray(change(a))
        b[37, 29] += 1  # at no position of a sample
        assert reason(a, b) is None


def test_ones_are_not_rounded_weights() -> None:
    """Weights that are still all one do not pass for rounded ones of the other side."""
    assert reason(np.ones(64, "f4"), (1 + random(64) * 1e-3).astype("f4")) is None


def test_large_tensors_are_confirmed_by_a_sample() -> None:
    """An order of rows in a tensor that does not fit into memory is confirmed by some rows, and said to be."""
    a = random(400, 60)
    changed = found({"w": a}, {"w": swapped(a, 10, 2, 20, 1)}, memory_budget_bytes=1 << 18)
    assert changed.reason is not None
    assert (changed.reason.kind, changed.reason.is_confirmed) == ("rotary-order", False)


def test_reasons_can_be_left_out() -> None:
    """Without reasons nothing is read twice."""
    a = random(20, 12)
    assert reason(a, -a, reasons=False) is None


@pytest.mark.parametrize("kind", ["float32", "float16", ml_dtypes.bfloat16, "int64"])
@pytest.mark.parametrize("is_b", [False, True])
def test_a_part_that_is_zero(kind: Any, is_b: bool) -> None:
    """A tail that was lost in saving is zero on one side, and values elsewhere."""
    whole = (1 + np.abs(random(12, 10)) * 9).astype(kind)
    cut = whole.copy()
    cut.reshape(-1)[77:] = 0
    why = reason(whole, cut) if is_b else reason(cut, whole)
    assert why == ("partly-zero", f"{'B' if is_b else 'A'} is zero in all 43 elements that differ")
    cut.reshape(-1)[3] = 7
    assert reason(whole, cut) is None


def test_layers_that_moved_under_another_front() -> None:
    """Stacks whose names begin otherwise on one side are the same stacks."""
    layers = {n: random(4, 4, seed=n) for n in range(4)}
    a = {f"model.layers.{n}.w": each for n, each in layers.items()} | {"model.norm.w": random(4, 5)}
    b = {f"model.model.layers.{n + 1}.w": each for n, each in layers.items()} | {"model.model.norm.w": random(4, 5)}
    report = diff(opened(a), opened(b))
    whys = {None if each.reason is None else each.reason.text for each in report.tensors if each.status != "same"}
    assert whys == {"B's model.layers.1 to 4 are A's 0 to 3: B's model.layers.1 is A's model.layers.0"}
    assert report.hint is None


def test_names_of_other_shapes_are_no_hint() -> None:
    """A fused tensor is none of its parts, whatever the names have in common."""
    a = {f"h.{n}.{part}_proj.w": random(4, 4) for n in range(3) for part in ("q", "k")}
    b = {f"h.{n}.qk_proj.w": random(8, 4) for n in range(3)}
    assert diff(opened(a), opened(b)).hint is None
    renamed = {f"h.{n}.query_proj.w": random(4, 4) for n in range(3)}
    assert "'query_proj.' in B" in (diff(opened({k: v for k, v in a.items() if "q_" in k}), opened(renamed)).hint or "")
