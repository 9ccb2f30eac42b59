"""What is taken for a DCP checkpoint, and what is said of the rest."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ckpt_tool.formats.base import Source
from ckpt_tool.formats.dcp.reader import READER
from ckpt_tool.storage.open import open_store
from tests.formats.conformance import FIXTURES
from tests.formats.dcp.build import row_cut, source

FILES = row_cut().files()
CHECKPOINT = FIXTURES / "torch/dcp_no_flatten/ckpt"


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (
            {k: v for k, v in FILES.items() if k != ".metadata"},
            "3 .distcp files but no .metadata: its save did not finish",
        ),
        ({**FILES, ".metadata": pickle.dumps([1])}, ".metadata is a pickle of something else, not DCP metadata"),
        ({**FILES, ".metadata": b"<html>"}, ".metadata is no pickle, not DCP metadata"),
        ({**FILES, ".metadata": b""}, ".metadata is an empty file, not DCP metadata"),
        ({f"step_5/{k}": v for k, v in FILES.items()}, "no .metadata at the top, but 1 below: memory:/step_5"),
        ({"a.txt": b"?"}, "no .metadata and no __0.metadata"),
    ],
    ids=["unfinished", "pickle", "html", "empty", "below", "nothing"],
)
def test_what_is_missing_is_said(files: dict[str, bytes], why: str) -> None:
    """A folder that is no checkpoint gets a reason."""
    probe = READER.probe(source(files))
    assert probe.confidence == 0
    assert probe.why.startswith(why)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_one_file_of_a_checkpoint(name: str) -> None:
    """A single file of a checkpoint is known for what it is, and the answer names its folder."""
    probe = READER.probe(Source(*open_store(CHECKPOINT / name)))
    assert 0 < probe.confidence <= 0.5
    assert str(CHECKPOINT) in probe.why


def test_a_single_stranger(tmp_path: Path) -> None:
    """A single file of another name is none of ours."""
    (tmp_path / "a.pt").write_bytes(b"PK")
    assert READER.probe(Source(*open_store(tmp_path / "a.pt"))).confidence == 0
