"""Files of two saves under one metadata: what a torn asynchronous save, or two runs in one folder, leaves."""

from __future__ import annotations

import shutil
import struct
import zipfile
from pathlib import Path
from typing import Literal

import pytest
import torch

from ckpt_tool.api.digest import digests
from ckpt_tool.api.manifest_file import write_manifest
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.cli.app import main
from ckpt_tool.errors import CkptError
from ckpt_tool.manifest.finding import Severity
from tests.formats.dcp.build import Checkpoint
from tests.reports.conftest import FIXTURES
from tests.reports.made import put


def saved_at(step: int) -> dict[str, bytes]:
    """Two parameters with their Adam state, each on a rank of its own."""
    made = Checkpoint()
    for rank, name in enumerate(("a", "b")):
        values = torch.arange(64.0) + step
        made.tensor(f"model.{name}", [64], [(rank, [0], values)])
        made.tensor(f"optim.state.{name}.exp_avg", [64], [(rank, [0], values / 7)])
        made.tensor(f"optim.state.{name}.exp_avg_sq", [64], [(rank, [0], values.square())])
        made.tensor(f"optim.state.{name}.step", [], [(rank, [], torch.tensor(float(step)))])
    return dict(made.files())


@pytest.mark.parametrize("rank", [0, 1])
def test_one_file_of_another_step(tmp_path: Path, rank: int) -> None:
    """One rank's file of step 20 in a checkpoint of step 10: the counters of the parameters tell."""
    files = saved_at(10)
    assert verify(put(tmp_path / "whole", files), level="full").is_ok
    mixed = {**files, f"__{rank}_0.distcp": saved_at(20)[f"__{rank}_0.distcp"]}
    report = verify(put(tmp_path / "mixed", mixed), level="full")
    (found,) = [finding for finding in report.findings if finding.kind == "mixed-steps"]
    assert "10 (1:" in found.message
    assert "20 (1:" in found.message
    assert not report.is_ok
    assert main(["verify", str(tmp_path / "mixed"), "--quiet"]) == 1


def test_a_manifest_tells_more(tmp_path: Path) -> None:
    """Where nothing counts steps, the recorded digests still know."""
    files = saved_at(10)
    write_manifest(digests(put(tmp_path / "whole", files), files="crc32"), tmp_path / "m.json")
    mixed = {**files, "__1_0.distcp": saved_at(20)["__1_0.distcp"]}
    report = verify(put(tmp_path / "mixed", mixed), manifest=tmp_path / "m.json")
    wrong = {finding.fqn for finding in report.findings if finding.kind == "digest-mismatch"}
    assert wrong == {"model.b", "optim.state.b.exp_avg", "optim.state.b.exp_avg_sq", "optim.state.b.step"}


@pytest.mark.parametrize("files", ["crc32", "sha256"])
def test_a_manifest_knows_metadata_that_nothing_repeats(tmp_path: Path, files: Literal["crc32", "sha256"]) -> None:
    """A bit of ``.metadata`` that no rule judges (a name, a writer's note) is told by the sum of the file."""
    saved = saved_at(10)
    write_manifest(digests(put(tmp_path / "whole", saved), files=files), tmp_path / "m.json")
    raw, silent = saved[".metadata"], 0
    for at in range(7, len(raw), len(raw) // 40):
        folder = put(tmp_path / "flipped", {**saved, ".metadata": raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]})
        try:
            silent += verify(folder, level="full").is_ok
            assert not verify(folder, manifest=tmp_path / "m.json").is_ok
        except CkptError:
            continue  # it is refused as a whole
    assert silent  # else there would be nothing to prove


@pytest.mark.parametrize("place", ["deepspeed/ds_z1_fp32/ckpt", "torch/verl_4r_bf16/ckpt"])
def test_counters_of_one_rank(tmp_path: Path, place: str) -> None:
    """Each rank keeps a copy of a counter: that of one is another, and no metadata says so."""
    shutil.copytree(FIXTURES / place, tmp_path / "d")
    path = min(p for p in (tmp_path / "d").rglob("*optim*.pt") if "rank_1" in p.name)
    raw = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        values = [(m, struct.unpack("<f", archive.read(m))[0]) for m in archive.infolist() if m.file_size == 4]
    counters = [(member, value) for member, value in values if value in range(1, 10)]
    assert counters
    for member, value in counters:
        lengths = struct.unpack_from("<HH", raw, member.header_offset + 26)
        struct.pack_into("<f", raw, member.header_offset + 30 + sum(lengths), value + 10)
    path.write_bytes(raw)
    (found,) = [each for each in verify(tmp_path / "d").findings if each.kind == "mixed-steps"]
    assert found.severity is Severity.ERROR
    assert f"differ: {counters[0][1] + 10:g} in '{path.relative_to(tmp_path / 'd')}'; " in found.message
