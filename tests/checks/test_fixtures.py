"""Real checkpoints are whole: no error at any level, and only the warnings that their writers earned."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tool.api.checkpoint import Checkpoint, open_checkpoint
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.cli.app import main
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.detect import detect
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.storage.open import open_store
from tests.storage.recording import RecordingStore

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
FOLDERS = sorted(
    str(path.relative_to(FIXTURES))
    for path in [*FIXTURES.glob("torch/*/ckpt"), *FIXTURES.glob("deepspeed/hf*/ckpt"), *FIXTURES.glob("ckpt/*/ckpt")]
    if path.parent.name != "pt_files"
)
FILES = sorted(
    str(path.relative_to(FIXTURES))
    for path in FIXTURES.glob("torch/pt_files/ckpt/*.pt")
    if path.name != "torchscript.pt"  # a program, no checkpoint
)
# What torch itself did: consolidation zeroes tensors without dimensions, and a total_size of 0 was written.
EARNED = {
    "torch/hf_dcp_consolidated/ckpt": ["differs-from-shard"],
    "torch/hf_pytorch_bin/ckpt": ["total-size"],
    "torch/hf_dcp_sharded/ckpt": ["unproven-shape"],  # the format records no global shape
    "torch/pt_files/ckpt/extra_zip.pt": ["absent-weight"],  # a meta tensor
}


@pytest.mark.parametrize("path", [*FOLDERS, *FILES])
def test_real_checkpoint_is_whole(path: str) -> None:
    """Every byte of a checkpoint that a real program wrote is looked at, and nothing is wrong."""
    report = verify(FIXTURES / path, level="full")
    bad = [finding for finding in report.findings if finding.severity > Severity.INFO]
    assert [finding.kind for finding in bad] == EARNED.get(path, []), bad
    assert report.is_ok
    assert report.n_tensors > 0


@pytest.mark.parametrize(
    "path", ["torch/dcp_fsdp2_4r_fp32/ckpt", "torch/verl_2d/ckpt", "torch/pt_files/ckpt/train_namespace.pt"]
)
def test_zip_checksums_cover_the_payload(path: str) -> None:
    """Torch writes a CRC of every storage: all payload is covered, and each byte is read about once."""
    with open_checkpoint(FIXTURES / path) as checkpoint:
        payload = int(checkpoint.resolve().chunks.length.sum())
    report = verify(FIXTURES / path, level="full")
    assert report.covered_nbytes >= payload
    total = sum(p.stat().st_size for p in (FIXTURES / path).rglob("*")) or (FIXTURES / path).stat().st_size
    assert report.checked_nbytes <= total * 1.01


@pytest.mark.parametrize("path", ["torch/dcp_fsdp2_4r_fp32/ckpt", "torch/hf_sharded/ckpt", "torch/verl_2d/ckpt"])
def test_quick_reads_no_byte_beyond_the_metadata(path: str) -> None:
    """At the quick level an open checkpoint costs no request at all."""
    inner, listing = open_store(FIXTURES / path)
    store = RecordingStore(inner)
    source = Source(store, listing)
    reader = detect(source)
    manifest = reader.read(source)
    with Checkpoint(path, source, reader, manifest, 1 << 24) as checkpoint:
        store.clear()
        report = verify(checkpoint, level="quick")
        assert (store.calls, report.checked_nbytes, report.is_ok) == ((), 0, True)


def test_files_without_a_checksum_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """What no checksum covers is said: metadata of DCP, all of safetensors; nothing of torch's zips."""
    expected = {
        "torch/dcp_no_flatten": (".metadata",),
        "torch/dcp_no_collectives": tuple(f"__{rank}.metadata" for rank in range(4)),
        "torch/hf_single": ("model.safetensors",),
        "torch/verl_2d": (),
    }
    for name, files in expected.items():
        assert verify(FIXTURES / name / "ckpt", level="full").unproven_files == files, name
    assert main(["verify", "--full", str(FIXTURES / "torch/dcp_no_flatten/ckpt")]) == 0
    assert "no checksum in .metadata" in " ".join(capsys.readouterr().out.split())
