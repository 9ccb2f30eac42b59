"""Files that nothing refers to."""

from __future__ import annotations

import pytest

from ckpt_tool.checks.extents import measure
from ckpt_tool.checks.strays import stray_findings
from ckpt_tool.checks.structure import structure_findings
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.manifest.model import Blob, FileRange
from ckpt_tool.storage.store import Listing
from tests.checks.synthetic import chunk, make, tensor

MANIFEST = make(
    [tensor("w", (2,))],
    [chunk("w", Box((0,), (2,)), FileRange("sub/a.distcp", 0, 8))],
    [Blob("step", "torch_save", FileRange("b.pt", 0, 8))],
)


@pytest.mark.parametrize(
    ("path", "nbytes", "expected"),
    [
        ("sub/a.distcp", 8, []),
        ("b.pt", 8, []),
        (".metadata", 8, []),
        ("config.json", 8, []),
        ("metadata.pkl", 8, []),
        ("w/.zarray", 8, []),
        ("_CHECKPOINT_METADATA", 8, []),
        (".snapshot_metadata", 8, []),
        ("ocdbt.process_0/manifest.ocdbt", 8, []),
        ("sub/b.distcp", 8, [("stray-file", Severity.WARNING)]),
        ("sub/b.distcp", 0, [("empty-file", Severity.WARNING)]),
        ("b.distcp", 8, [("other-files", Severity.INFO)]),
        ("tokenizer.bin", 8, [("other-files", Severity.INFO)]),
        ("sub/a.distcp.tmp", 8, [("unfinished-file", Severity.WARNING)]),
        (".metadata.incomplete", 0, [("unfinished-file", Severity.WARNING)]),
    ],
)
def test_strays(path: str, nbytes: int, expected: list[tuple[str, Severity]]) -> None:
    """What a file is taken for depends on its folder, its suffix and whether it is empty."""
    listing = Listing("", {"sub/a.distcp": 8, "b.pt": 8, path: nbytes})
    assert [(found.kind, found.severity) for found in stray_findings(MANIFEST, listing)] == expected


def test_other_files_are_one_finding() -> None:
    """A run's logs and tokenizers are summed up."""
    listing = Listing("", {f"events.{i}": 1 for i in range(100)})
    [found] = stray_findings(MANIFEST, listing)
    assert found.message == (
        "100 other files hold nothing of this checkpoint and were not checked: "
        "'events.0', 'events.1', 'events.10' and 97 more"
    )


def test_one_other_file_is_said_in_the_singular() -> None:
    """One is not several."""
    [found] = stray_findings(MANIFEST, Listing("", {"events.0": 1}))
    assert found.message == "1 other file holds nothing of this checkpoint and was not checked: 'events.0'"


def test_named_file_has_no_strays() -> None:
    """Whoever names one file does not ask about its siblings."""
    assert list(stray_findings(MANIFEST, Listing("", {"b.pt": 8, "c.pt": 8}, entry="b.pt"))) == []


def test_nothing_at_all_is_an_error() -> None:
    """A checkpoint without a tensor or an object is what a rank without anything saves."""
    manifest, listing = make([], []), Listing("", {})
    found = structure_findings(manifest, listing, measure(manifest, listing))
    assert [each.kind for each in found] == ["nothing-saved"]
