"""Coverage of tensors by their chunks, told in global coordinates."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.checks.coverage import coverage_findings
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange
from tests.checks.synthetic import chunk, kinds, make, tensor
from tests.strategies import partitions, shapes


def findings_of(shape: tuple[int, ...], boxes: Sequence[Box]) -> list[Finding]:
    """Findings about one tensor ``w`` stored in these boxes, beside a clean tensor of more dimensions."""
    chunks = [chunk("w", box, FileRange(f"{i}.bin", 0, 4 * box.volume)) for i, box in enumerate(boxes)]
    whole = Box((0, 0, 0, 0), (1, 2, 1, 2))
    return list(
        coverage_findings(
            make(
                [tensor("clean", whole.sizes), tensor("w", shape)],
                [chunk("clean", whole, FileRange("c.bin", 0, 16)), *chunks],
            )
        )
    )


@given(st.data())
def test_any_partition_is_clean_and_one_box_less_is_that_gap(data: st.DataObject) -> None:
    """Without one of its boxes a partition has a gap of exactly that box's elements."""
    shape = data.draw(shapes(max_ndim=4, max_size=5))
    boxes = [box for box in data.draw(partitions(shape)) if box.volume]
    assert findings_of(shape, boxes) == []
    if not boxes:
        return
    lost = data.draw(st.sampled_from(boxes))
    found = findings_of(shape, [box for box in boxes if box != lost])
    assert {finding.kind for finding in found} == {"gap"}
    assert {finding.fqn for finding in found} == {"w"}
    if len(boxes) > 1:
        assert len(found) == 1
        assert str(lost) in found[0].message
        assert f"({lost.volume:,} of " in found[0].message


def test_gap_has_global_coordinates() -> None:
    """Two gaps of one tensor are two findings."""
    found = findings_of((6, 4), [Box((2, 0), (2, 4)), Box((4, 0), (2, 3))])
    assert [finding.message for finding in found] == [
        "no chunk holds [0:2, 0:4] (8 of 24 elements, 33.3%)",
        "no chunk holds [4:6, 3:4] (2 of 24 elements, 8.3%)",
    ]


def test_tensor_without_chunks() -> None:
    """A tensor that nothing holds is one finding, an empty one is none."""
    assert [finding.message for finding in findings_of((6, 4), [])] == [
        "no chunk at all holds the tensor (24 elements)"
    ]
    assert findings_of((6, 0), []) == []
    assert kinds(findings_of((), [])) == [("gap", "w")]


def test_overlap_names_both_boxes_and_files() -> None:
    """Boxes that share elements without being equal contradict each other."""
    [finding] = findings_of((6,), [Box((0,), (4,)), Box((3,), (3,))])
    assert (finding.kind, finding.severity) == ("overlap", Severity.ERROR)
    assert finding.message == "box [0:4] in 0.bin and box [3:6] in 1.bin hold common elements"


def test_overlap_that_hides_a_gap_is_both() -> None:
    """The volumes add up, yet elements are missing: 0:4 and 2:4 leave 4:6."""
    assert kinds(findings_of((6,), [Box((0,), (4,)), Box((2,), (2,))])) == [("gap", "w"), ("overlap", "w")]


def test_equal_boxes_are_replicas() -> None:
    """Replicas are counted, and no fault."""
    [finding] = findings_of((6,), [Box((0,), (6,))] * 3)
    assert (finding.kind, finding.severity) == ("replicas", Severity.INFO)
    assert finding.message == "2 boxes of 1 tensor are stored more than once (48 bytes)"


def test_box_outside_the_shape() -> None:
    """A box that reaches out is one finding, and what it leaves uncovered another."""
    found = findings_of((6, 2), [Box((0, 0), (5, 2)), Box((5, 0), (2, 2))])
    assert kinds(found) == [("box-outside", "w"), ("gap", "w")]
    assert found[0].message == "box [5:7, 0:2] in 1.bin reaches out of the tensor's shape [6, 2]"


def test_negative_shape() -> None:
    """A shape is not made of negative numbers."""
    found = coverage_findings(make([tensor("w", (-3,)), tensor("empty", (0, 4))], []))
    assert kinds(found) == [("bad-shape", "w")]
