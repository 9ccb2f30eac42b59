"""Bytes of a file that belong to no item."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from ckpt_tool.api.trust.verify import verify
from ckpt_tool.checks.extents import measure
from ckpt_tool.checks.unowned import unowned_findings
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.items import ItemTable
from ckpt_tool.manifest.model import Blob, FileRange, Manifest
from ckpt_tool.storage.store import Listing
from tests.checks.synthetic import chunk, make, tensor

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SIZES = {"a": 1000, "b": 1000, "c": 1000}


def manifest(*, full: tuple[bool, ...] = (True, True, False)) -> Manifest:
    """Two files of items, and a container."""
    made = make(
        [tensor("w", (150,))],
        [
            chunk("w", Box((0,), (50,)), FileRange("a", 101, 200)),
            chunk("w", Box((50,), (50,)), FileRange("b", 0, 200)),
            chunk("w", Box((100,), (50,)), FileRange("c", 333, 200)),
        ],
        [Blob("step", "torch_save", FileRange("a", 301, 699))],
    )
    rows = np.array([[0, 0, 101], [1, 200, 800]], dtype=np.int64)
    return made.replace(items=replace(ItemTable.of_full(3).with_rows(*rows.T), is_full=np.array(full)))


def found(given: Manifest, sizes: dict[str, int]) -> list[Finding]:
    """Where nothing had to be resolved."""
    listing = Listing("", sizes)
    has_chunk = measure(given, listing).has_chunk
    return list(unowned_findings(given, listing, has_chunk, given.chunks.take(np.flatnonzero(has_chunk))))


def test_every_byte_has_an_owner() -> None:
    """Chunks, objects and items without elements fill two files; what else is in a container is its own affair."""
    assert found(manifest(), SIZES) == []
    assert len(found(manifest(full=(True, True, True)), SIZES)) == 2
    assert found(manifest().replace(items=None), SIZES | {"a": 9999}) == []


def test_stretches_are_named_with_their_file() -> None:
    """Behind the last item, at the head, between items; in each file by itself."""
    [tail] = found(manifest(), SIZES | {"a": 1503})
    assert (tail.kind, tail.severity, tail.where) == ("unowned-bytes", Severity.WARNING, FileRange("a", 1000, 503))
    assert tail.message == (
        "a goes on for 503 bytes behind its last item, which ends at byte 1,000: nothing refers there"
    )
    given = manifest()
    assert given.items is not None
    bare = given.replace(items=ItemTable.of_full(2))
    assert [f.where for f in found(bare, SIZES)] == [FileRange("a", 0, 101), FileRange("b", 200, 800)]


def test_padding_and_cut_files_are_not_told() -> None:
    """Up to the next multiple of a power of two a writer pads; a cut item is told as cut."""
    assert found(manifest(), SIZES | {"a": 1024, "b": 4096}) == []
    assert [f.where for f in found(manifest(), SIZES | {"a": 1025})] == [FileRange("a", 1000, 25)]
    assert found(manifest(), SIZES | {"b": 100}) == []
    assert found(manifest(), {"b": 1000, "c": 1000}) == []


@pytest.mark.parametrize(("name", "file"), [
    ("torch/dcp_no_flatten", "__2_0.distcp"),
    ("torch/dcp_safetensors", "__1_0.distcp"),
    ("bytecheckpoint/fsdp_dec_4r", "global_step_2/model/__1_0.distcp"),
    ("deepspeed/accelerate_fsdp2", "pytorch_model_fsdp_0/__0_0.distcp"),
])  # fmt: skip
def test_a_real_file_that_goes_on(name: str, file: str, tmp_path: Path) -> None:
    """Whole items again behind the last one: every tensor is what it was, and the file is said not to be."""
    folder = Path(copytree(FIXTURES / name / "ckpt", tmp_path / "x"))
    assert [f for f in verify(folder).findings if f.kind == "unowned-bytes"] == []
    raw = (folder / file).read_bytes()
    (folder / file).write_bytes(raw + raw[: len(raw) // 2 + 1])
    report = verify(folder)
    [finding] = [f for f in report.findings if f.kind == "unowned-bytes"]
    assert report.is_ok
    assert finding.where == FileRange(file, len(raw), len(raw) // 2 + 1)
