"""Chunks that meet in their file."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tool.checks.extents import measure
from ckpt_tool.checks.sharing import sharing_findings
from ckpt_tool.dtypes import dtype
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.manifest.model import FileRange, TensorMeta
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.storage.store import Listing
from tests.checks.synthetic import chunk as made
from tests.checks.synthetic import make, tensor


def findings_of(*ranges: tuple[str, str, int, int], flags: int = 0) -> list[tuple[str, Severity, str | None]]:
    """Kind, severity and tensor of what is found of (fqn, dtype, offset, n elements) in one file."""
    widths = {"float32": 4, "int64": 8, "bool": 1}
    extra = 16 if flags else 0
    tensors = {fqn: tensor(fqn, (n,), dtype) for fqn, dtype, _, n in ranges}
    chunks = [
        made(fqn, Box((0,), (n,)), FileRange("a.bin", offset, n * widths[dtype] + extra), flags)
        for fqn, dtype, offset, n in ranges
    ]
    manifest = make(list(tensors.values()), chunks)
    has_chunk = measure(manifest, Listing("", {"a.bin": 10_000})).has_chunk
    return [(found.kind, found.severity, found.fqn) for found in sharing_findings(manifest, has_chunk)]


def test_neighbours_are_clean() -> None:
    """Ranges that only touch share nothing."""
    assert findings_of(("a", "float32", 0, 4), ("b", "float32", 16, 4), ("c", "bool", 32, 4)) == []


def test_equal_ranges_are_tied() -> None:
    """Two names for the same bytes are worth knowing, three as well."""
    tied = ("tied-tensors", Severity.INFO)
    assert findings_of(("a", "float32", 0, 4), ("b", "float32", 0, 4)) == [(*tied, "b")]
    assert findings_of(("a", "float32", 0, 4), ("b", "float32", 0, 4), ("c", "float32", 0, 4)) == [
        (*tied, "b"),
        (*tied, "c"),
    ]


def test_a_step_that_parameters_share_says_nothing() -> None:
    """Optimizers count all parameters' steps with one tensor."""
    steps = [TensorMeta(f"state.{n}.step", dtype("float32"), (), "optimizer", (f"state.{n}.step",)) for n in range(3)]
    where = FileRange("a.bin", 0, 4)
    manifest = make(steps, [made(each.fqn, Box((), ()), where) for each in steps])
    has_chunk = measure(manifest, Listing("", {"a.bin": 4})).has_chunk
    assert list(sharing_findings(manifest, has_chunk)) == []


def test_same_type_at_element_steps_is_a_view() -> None:
    """A slice of a storage that another tensor shows whole."""
    assert findings_of(("a", "float32", 0, 8), ("b", "float32", 8, 2)) == [("overlapping-views", Severity.INFO, "b")]


def test_other_type_or_between_elements_is_suspicious() -> None:
    """No view begins between two elements."""
    warned = [("bytes-overlap", Severity.WARNING, "b")]
    assert findings_of(("a", "float32", 0, 8), ("b", "float32", 6, 2)) == warned
    assert findings_of(("a", "float32", 0, 8), ("b", "int64", 8, 2)) == warned


def test_range_far_behind_meets_the_long_one() -> None:
    """What reaches furthest is compared, not what stands just before."""
    assert findings_of(("a", "float32", 0, 100), ("b", "float32", 0, 1), ("c", "float32", 200, 1)) == [
        ("overlapping-views", Severity.INFO, "b"),
        ("overlapping-views", Severity.INFO, "c"),
    ]


def test_container_items_never_overlap() -> None:
    """Items of a container that overlap in part contradict each other; equal ones hold several tensors."""
    flags = ChunkFlag.UNRESOLVED
    overlapped = findings_of(("a", "float32", 0, 8), ("b", "float32", 40, 8), flags=flags)
    assert overlapped == [("bytes-overlap", Severity.ERROR, "b")]
    assert findings_of(("a", "float32", 0, 8), ("b", "float32", 48, 8), flags=flags) == []
    assert findings_of(("a", "float32", 0, 8), ("b", "float32", 0, 8), flags=flags) == []


def test_two_boxes_of_one_tensor_do_not_share_bytes() -> None:
    """One tensor's parts are different elements."""
    where = FileRange("a.bin", 0, 16)
    manifest = make([tensor("w", (8,))], [made("w", Box((at,), (4,)), where) for at in (0, 4)])
    has_chunk = measure(manifest, Listing("", {"a.bin": 16})).has_chunk
    assert [found.kind for found in sharing_findings(manifest, has_chunk)] == ["bytes-overlap"]


def test_strided_boxes_may_lie_between_one_another() -> None:
    """Halves of a transposed weight meet in their range of bytes and share none, unless one begins too early."""

    def kinds(second: int) -> list[str]:
        ranges = FileRange("a.bin", 0, 84), FileRange("a.bin", second, 84)
        parts = [made("w", Box((3 * n, 0), (3, 4)), where) for n, where in enumerate(ranges)]
        manifest = make([tensor("w", (6, 4))], [replace(part, strides=(1, 6)) for part in parts])
        has_chunk = measure(manifest, Listing("", {"a.bin": 200})).has_chunk
        return [found.kind for found in sharing_findings(manifest, has_chunk)]

    assert kinds(12) == []
    assert kinds(8) == kinds(10) == ["bytes-overlap"]
