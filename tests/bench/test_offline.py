"""Offline conversions beside `cp` and torch's own tools: wall time, peak memory and start-up, whole processes.

``CKPT_BENCH_GB`` sets the size (1.5), ``CKPT_BENCH_ROUNDS`` the measured rounds (5).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.measure import Row, beyond_start, interleaved, report

pytestmark = pytest.mark.bench

GIGABYTES = float(os.environ.get("CKPT_BENCH_GB", "1.5"))
ROUNDS = int(os.environ.get("CKPT_BENCH_ROUNDS", "5"))
HERE = Path(__file__).parent
CKPT = [sys.executable, "-m", "ckpt_tool"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
DCP_TO_TORCH = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]


READS_ALL = ("ckpt verify --full", "ckpt verify --write", "ckpt verify --manifest")
_COLD = ("cat, 2 cores", "ckpt verify --full", "ckpt verify --write-manifest")
WITHOUT_ISAL = "import sys; sys.modules['isal'] = None; from ckpt_tool.cli.app import main; sys.exit(main())"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source checkpoint in ``source``."""
    base = tmp_path_factory.mktemp("bench")
    argv = [*TORCHRUN, "--nproc_per_node=4", str(HERE / "make_dcp.py"), str(base / "source"), str(GIGABYTES)]
    subprocess.run(argv, check=True, capture_output=True)
    return base


def ckpt(name: str, base: Path, target: str, *words: str) -> Row:
    """A row for one of our commands."""
    return Row(name, [*CKPT, words[0], str(base / "source"), str(base / target), *words[1:]], base / target)


def test_reshard_against_cp_and_torch(folder: Path) -> None:
    """Shard(0) over 4 ranks to TP 4, start-up included, page cache warm."""
    source = str(folder / "source")
    rows = [
        Row("cp -r", ["cp", "-r", source, str(folder / "cp")], folder / "cp"),
        ckpt("ckpt reshard to rank files", folder, "rank", "reshard", "--tp", "4", "--to", "rank-files", "--no-fsync"),
        ckpt("ckpt reshard to DCP with CRCs", folder, "dcp", "reshard", "--tp", "4", "--to", "dcp", "--no-fsync"),
        Row("cp -r; sync", ["sh", "-c", f"cp -r {source} {folder}/cp && sync"], folder / "cp"),
        ckpt("ckpt reshard to DCP with fsync", folder, "dcp", "reshard", "--tp", "4", "--to", "dcp"),
    ]
    report(f"reshard: {GIGABYTES} GB, FSDP 4 to TP 4", interleaved(rows, n_rounds=ROUNDS), peer="cp -r")
    torch_rows = [
        ckpt("ckpt reshard to DCP with CRCs", folder, "dcp", "reshard", "--tp", "4", "--to", "dcp", "--no-fsync"),
        Row(
            "torch DCP load and save, 2 ranks",
            [*TORCHRUN, "--nproc_per_node=2", str(HERE / "reshard_with_torch.py"), source, str(folder / "torch")],
            folder / "torch",
        ),
    ]
    report(
        f"reshard-torch: {GIGABYTES} GB", interleaved(torch_rows, n_rounds=min(ROUNDS, 3)),
        peer="ckpt reshard to DCP with CRCs",
    )  # fmt: skip


def test_reshard_of_what_is_not_in_memory(folder: Path) -> None:
    """The same with a source that storage has to give: what a copy, and who waits for it, find on another day."""
    rows = [
        Row("cp -r", ["cp", "-r", str(folder / "source"), str(folder / "cp")], folder / "cp"),
        ckpt("ckpt reshard to rank files", folder, "rank", "reshard", "--tp", "4", "--to", "rank-files", "--no-fsync"),
        ckpt("ckpt reshard to DCP with CRCs", folder, "dcp", "reshard", "--tp", "4", "--to", "dcp", "--no-fsync"),
    ]
    cold = [replace(row, reads_cold=folder / "source") for row in rows]
    report(f"reshard-cold: {GIGABYTES} GB, FSDP 4 to TP 4", interleaved(cold, n_rounds=ROUNDS), peer="cp -r")


def test_export_against_dcp_to_torch_save(folder: Path) -> None:
    """The weights as safetensors; torch's converter always takes everything, so ours is measured with all too."""
    rows = [
        ckpt("ckpt export weights", folder, "st", "export", "--no-fsync"),
        ckpt("ckpt export --all", folder, "all", "export", "--all", "--names", "source", "--no-fsync"),
        Row(
            "torch dcp_to_torch_save",
            [*DCP_TO_TORCH, str(folder / "source"), str(folder / "all.pt")],
            folder / "all.pt",
        ),
    ]
    report(f"export: {GIGABYTES} GB", interleaved(rows, n_rounds=min(ROUNDS, 3)), peer="ckpt export weights")


def test_memory_follows_the_budget(folder: Path) -> None:
    """Peak memory with a small and with the default budget."""
    rows = [
        ckpt(f"ckpt reshard --memory {memory}", folder, "dcp", "reshard", "--tp", "4", "--memory", memory, "--no-fsync")
        for memory in ("64MiB", "1GiB")
    ]
    report("memory: budget", interleaved(rows, n_rounds=1), peer="ckpt reshard --memory 1GiB")


def test_start_up() -> None:
    """What a command costs before it does anything."""
    rows = [
        Row("python -c pass", [sys.executable, "-c", "pass"]),
        Row("ckpt --version", [*CKPT, "--version"]),
        Row("ckpt --help", [*CKPT, "--help"]),
        Row("ckpt inspect (small)", [*CKPT, "inspect", "fixtures/torch/dcp_fsdp2_4r_fp32/ckpt"]),
        Row("python -c 'import torch'", [sys.executable, "-c", "import torch"]),
    ]
    report("start-up: warm", interleaved(rows, n_rounds=max(ROUNDS, 5)), peer="python -c pass")


def test_verify_speed(folder: Path) -> None:
    """Checking every byte beside reading every byte, by `cat` on one core and on two.

    Rows of commands are whole processes; those called net are without what `verify --quick` takes to start and to read
    the metadata.
    """
    source = folder / "source"
    for name, words in (("rank", ("--tp", "4", "--to", "rank-files")), ("safetensors", ("--to", "safetensors"))):
        argv = [*CKPT, "reshard", str(source), str(folder / name), *words, "--no-digest", "--no-fsync"]
        subprocess.run(argv, check=True, capture_output=True)
    written = [
        Row("ckpt verify", [*CKPT, "verify", str(source)]),
        Row("ckpt verify --full, 1 worker", [*CKPT, "verify", str(source), "--full", "--workers", "1"]),
        Row("ckpt verify --full, zlib", [sys.executable, "-c", WITHOUT_ISAL, "verify", str(source), "--full"]),
        Row("ckpt verify --write-manifest", [*CKPT, "verify", str(source), "--write-manifest", str(folder / "m.json")]),
        Row("ckpt verify --manifest", [*CKPT, "verify", str(source), "--manifest", str(folder / "m.json")]),
    ]
    for kind, others in (("source", written), ("rank", []), ("safetensors", [])):
        _report_verify(kind, folder / kind, others)


def _report_verify(kind: str, checkpoint: Path, others: Sequence[Row]) -> None:
    rows = [
        Row("cat, 2 cores", ["sh", "-c", _cats(checkpoint)]),
        Row("cat, 1 core", ["sh", "-c", f"cat {checkpoint}/* > /dev/null"]),
        Row("ckpt verify --quick", [*CKPT, "verify", str(checkpoint), "--quick"]),
        Row("ckpt verify --full", [*CKPT, "verify", str(checkpoint), "--full"]),
        *others,
    ]
    cold = [replace(row, name=f"{row.name}, cold", reads_cold=checkpoint) for row in rows if row.name in _COLD]
    figures = interleaved([*rows, *cold], n_rounds=max(ROUNDS, 7))
    quick = next(figure for figure in figures if figure.name == "ckpt verify --quick")
    warm = [figure for figure in figures if not figure.name.endswith(", cold")]
    beyond = [beyond_start(figure, quick) for figure in warm if figure.name.startswith(READS_ALL)]
    report(f"verify-{kind}: {GIGABYTES} GB", [*warm, *beyond], peer="cat, 2 cores")
    from_storage = [figure for figure in figures if figure not in warm]
    report(f"verify-{kind}-cold: {GIGABYTES} GB", from_storage, peer="cat, 2 cores, cold")


def _cats(checkpoint: Path) -> str:
    """Both halves of all large files at once."""
    files = sorted(path for path in checkpoint.iterdir() if path.stat().st_size > 1 << 20)
    if len(files) > 1:
        halves = [files[: len(files) // 2], files[len(files) // 2 :]]
        parts = [f"cat {' '.join(map(str, half))}" for half in halves]
    else:
        half = (files[0].stat().st_size >> 21) + 1
        parts = [f"dd if={files[0]} bs=1M {words} status=none" for words in (f"count={half}", f"skip={half}")]
    return " & ".join(f"{part} > /dev/null" for part in parts) + "; wait"


def test_diff_against_cmp(folder: Path) -> None:
    """FSDP 4 as DCP against TP 4 as rank files; `cmp` compares the same bytes, which lie alike for it."""
    source, other = folder / "source", folder / "other"
    argv = [*CKPT, "reshard", str(source), str(other), "--tp", "4", "--to", "rank-files", "--no-fsync"]
    subprocess.run(argv, check=True, capture_output=True)
    copy = folder / "copy"
    subprocess.run(["cp", "-r", str(other), str(copy)], check=True)
    pairs = "; ".join(f"cmp {other / path.name} {copy / path.name}" for path in sorted(other.glob("*.safetensors")))
    rows = [
        Row("cmp", ["sh", "-e", "-c", pairs]),
        Row("ckpt diff", [*CKPT, "diff", str(source), str(other)]),
        Row("ckpt diff --workers 1", [*CKPT, "diff", str(source), str(other), "--workers", "1"]),
        Row("ckpt diff, equal layouts", [*CKPT, "diff", str(other), str(copy)]),
    ]
    report(f"diff: {GIGABYTES} GB, FSDP 4 and TP 4", interleaved(rows, n_rounds=ROUNDS), peer="cmp")
