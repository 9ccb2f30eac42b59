"""A live sharded state dict of real megatron-core is filled as Megatron itself fills it.

``CKPT_PEER_MEGATRON`` names the python of an environment with megatron-core 0.16 or later, torch, and what this package
needs; run with ``-m peer``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ckpt_tool.api.trust.verify import verify

pytestmark = pytest.mark.peer

HERE = Path(__file__).parent


def run(action: str, folder: Path, n_ranks: int) -> str:
    """What a job printed."""
    argv = [
        os.environ["CKPT_PEER_MEGATRON"], "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
        f"--nproc_per_node={n_ranks}", str(HERE / "megatron_job.py"), action, str(folder),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by Megatron on two ranks."""
    folder = tmp_path_factory.mktemp("megatron") / "saved"
    run("save", folder, 2)
    return folder


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_loads_as_megatron_does(saved: Path, n_ranks: int) -> None:
    """Tensors, objects and what is local, in any number of ranks, are what Megatron loads."""
    assert "ALIKE 4 tensors, 1 values" in run("load", saved, n_ranks)


@pytest.fixture(scope="module")
def saved_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by `ckpt_tool.save` on two ranks."""
    folder = tmp_path_factory.mktemp("megatron") / "saved_here"
    run("save-ours", folder, 2)
    return folder


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_megatron_loads_what_a_job_saved(saved_here: Path, n_ranks: int) -> None:
    """Tensors, objects and the common state, in any number of ranks; the digests beside it prove the same content."""
    assert "SAVED" in run("load-theirs", saved_here, n_ranks)
    report = verify(saved_here, level="full", manifest=f"{saved_here}.digests.json")
    assert report.is_ok, [finding.message for finding in report.findings]
