"""Exports and universal checkpoints beside the tools of DeepSpeed and accelerate, on the same files.

``CKPT_PEER_DEEPSPEED`` names the python of an environment with DeepSpeed and accelerate (``make test-deepspeed`` makes
one); without it our rows stand alone. ``CKPT_BENCH_DEEPSPEED_GB`` sets the size (0.5), ``CKPT_BENCH_ROUNDS`` how often.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.bench.measure import Row, interleaved, report
from tests.bench.test_offline import CKPT, HERE, ROUNDS, TORCHRUN

pytestmark = pytest.mark.bench

GIGABYTES = float(os.environ.get("CKPT_BENCH_DEEPSPEED_GB", "0.5"))
PEER = os.environ.get("CKPT_PEER_DEEPSPEED")
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
N_RANKS = "4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ZeRO checkpoints of four ranks in ``zero2`` and ``zero3``, and the weights as DCP in ``weights``."""
    base = tmp_path_factory.mktemp("deepspeed")
    source = str(base / "source")
    argv = [*TORCHRUN, "--nproc_per_node=4", str(HERE / "make_dcp.py"), source, str(GIGABYTES), "groups"]
    subprocess.run(argv, check=True, capture_output=True)
    for stage in ("2", "3"):
        words = ["--to", "deepspeed", "--zero-stage", stage, "--dp", N_RANKS, "--dtype", "bf16", "--no-fsync"]
        subprocess.run([*CKPT, "reshard", source, str(base / f"zero{stage}"), *words], check=True, capture_output=True)
    words = ["--to", "dcp", "--names", "source", "--no-fsync"]
    subprocess.run([*CKPT, "export", source, str(base / "weights"), *words], check=True, capture_output=True)
    return base


def peer(name: str, output: Path, *words: str) -> list[Row]:
    """A row of a tool of the other environment, none without it."""
    return [Row(name, [PEER, *words], output, ENVIRONMENT)] if PEER else []


def compare(title: str, base: Path, source: str, ours: list[list[str]], theirs: list[Row]) -> None:
    """Rows of `cp`, our commands (into ``out``), and the other tools', with ratios to our first command.

    No tool of theirs waits for the disk; what ours take that do is in rows of their own.
    """
    rows = [Row("cp -r", ["cp", "-r", str(base / source), str(base / "cp")], base / "cp")]
    for command, *words in ours:
        argv = [*CKPT, command, str(base / source), str(base / "out"), *words]
        name = f"ckpt {command} {' '.join(words[-1:])}".strip()
        rows += [Row(name, [*argv, "--no-fsync"], base / "out"), Row(f"{name}, fsync", argv, base / "out")]
    report(f"{title}: {GIGABYTES} GB", interleaved([*rows, *theirs], n_rounds=min(ROUNDS, 3)), peer=rows[1].name)


@pytest.mark.parametrize("stage", [2, 3])
def test_export_against_zero_to_fp32(folder: Path, stage: int) -> None:
    """The fp32 weights of all ranks; at stage 2 ours are asked for, as the low-precision ones are stored too."""
    source = f"zero{stage}"
    script = ["-m", "deepspeed.utils.zero_to_fp32", str(folder / source), str(folder / "theirs")]
    compare(
        f"zero_to_fp32-stage{stage}",
        folder,
        source,
        [["export", "--masters"], ["export"]] if stage == 2 else [["export"]],
        peer("zero_to_fp32", folder / "theirs", *script),
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_universal_against_ds_to_universal(folder: Path, stage: int) -> None:
    """Every master and moment of its own file."""
    (tag,) = (path for path in (folder / f"zero{stage}").iterdir() if path.is_dir())
    script = ["-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(tag)]
    script += ["--output_folder", str(folder / "theirs"), "--num_extract_workers", "1", "--num_merge_workers", "1"]
    compare(
        f"ds_to_universal-stage{stage}",
        folder,
        f"zero{stage}",
        [["reshard", "--to", "deepspeed-universal"]],
        peer("ds_to_universal", folder / "theirs", *script),
    )


def test_export_against_merge_weights(folder: Path) -> None:
    """A DCP folder of weights alone, as accelerate's FSDP saves it."""
    script = [
        "-m",
        "accelerate.commands.accelerate_cli",
        "merge-weights",
        str(folder / "weights"),
        str(folder / "theirs"),
    ]
    theirs = peer("accelerate merge-weights", folder / "theirs", *script)
    compare("merge-weights", folder, "weights", [["export"]], theirs)
