"""Sections D, G and I of the collected reports, as far as they concern these formats: runs, storage, values.

Told by a test elsewhere, of which those here are at most the view through the command:

=====  ===========================================================================================
R104   storage/test_remote.py (listings), storage/test_open.py
R106   storage/test_urls.py (slashes stay), storage/test_stream_target.py (the deciding file last, no rename)
R113   engine/test_run.py (kills at chosen points), storage/test_local_target.py (kills at every system call)
R116   verify/test_content.py, test_bits.py
=====  ===========================================================================================
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import save_file

from tests.formats.dcp.build import Checkpoint
from tests.reports.conftest import FIXTURES, Ckpt
from tests.reports.made import as_bytes, boxes, dcp

REPOSITORY = Path(__file__).parents[2]
FSDP2 = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"
MEGABYTE = 1 << 20


def contents(folder: Path) -> dict[str, bytes]:
    """Files by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_r58_more_ranks_than_heads(ckpt: Ckpt, tmp_path: Path) -> None:
    """R58: 2 heads of K over TP 4, and Q, K and V in one tensor, are cut by rows whatever the heads, and back."""
    tensors = {
        "model.layers.0.self_attn.k_proj.weight": np.arange(4 * 16, dtype=np.float32).reshape(4, 16),
        "model.layers.0.fused_qkv.weight": np.arange(24 * 16, dtype=np.float32).reshape(24, 16),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    rules = """
[[rule]]
match = '.*(?:k_proj|fused_qkv)[.]weight'
kind = "column"
"""
    (tmp_path / "rules.toml").write_text(rules, "utf-8")
    words = ["--tp", "4", "--rules", tmp_path / "rules.toml", "--to", "rank-files"]
    assert ckpt("reshard", tmp_path / "m.safetensors", tmp_path / "out", *words).status == 0
    k, qkv = tensors
    assert boxes(tmp_path / "out", k) == [(rank, [rank, 0], [1, 16]) for rank in range(4)]
    assert boxes(tmp_path / "out", qkv) == [(rank, [6 * rank, 0], [6, 16]) for rank in range(4)]
    assert ckpt("export", tmp_path / "out", tmp_path / "back.safetensors").status == 0
    assert as_bytes(tmp_path / "back.safetensors") == as_bytes(tmp_path / "m.safetensors")


CONVERT = """
import sys
from ckpt_tool.cli.app import main
def high_water():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10
small, large = (main(["reshard", sys.argv[1 + i], sys.argv[3 + i], *sys.argv[5:]]) or high_water() for i in range(2))
print(large - small)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("words", [["--tp", "2", "--default", "shard0", "--to", "rank-files"], ["--dp", "3"]], ids=str)
def test_r67_memory(tmp_path: Path, words: list[str]) -> None:
    """R67: 64 tensors of 8 MB are resharded with --memory 64MiB; the process grows by no more, the bytes are the same.

    What it grows by is taken between a reshard of small tensors, which loads all modules, and the large one.
    """
    numbers = np.random.default_rng(0).integers(0, 2**32, 2 * MEGABYTE, dtype=np.uint32)
    for name, n_rows in (("small", 8), ("large", 2 * MEGABYTE // 1024)):
        whole = numbers[: n_rows * 1024].reshape(n_rows, 1024)
        (tmp_path / name).mkdir()
        for file in range(4):
            tensors = {f"w{file * 16 + number}": np.roll(whole, number, axis=0) for number in range(16)}
            save_file(tensors, tmp_path / name / f"model-{file + 1:05d}-of-00004.safetensors")
    paths = [tmp_path / name for name in ("small", "large", "small_out", "large_out")]
    command = [*map(str, paths), *words, "--memory", "64MiB", "--no-fsync", "-q"]
    run = subprocess.run(
        [sys.executable, "-c", CONVERT, *command], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert int(run.stdout.split()[-1]) <= 64 * MEGABYTE
    assert sum(path.stat().st_size for path in paths[3].iterdir()) > 512 * MEGABYTE
    assert as_bytes(paths[3]) == as_bytes(paths[1])


class PagedFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """An object store that lists two keys at a time, as S3 lists a thousand, and has no rename."""

    protocol = "paged"
    store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own way
    pseudo_dirs = [""]  # noqa: RUF012
    n_pages = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("paged://")))

    def find(self, path: str, *args: Any, detail: bool = False, **options: Any) -> Any:
        """All keys, collected page by page as clients of object stores do."""
        keys = list(super().find(path, *args, detail=True, **options).items())
        pages = [keys[at : at + 2] for at in range(0, len(keys), 2)]
        type(self).n_pages += len(pages)
        found = dict(entry for page in pages for entry in page)
        return found if detail else sorted(found)

    def mv(self, *_: Any, **__: Any) -> None:
        """Object stores have none."""
        raise NotImplementedError("no rename")


@pytest.fixture
def paged() -> Iterator[type[PagedFileSystem]]:
    """The store, registered for its scheme and empty."""
    fsspec.register_implementation("paged", PagedFileSystem, clobber=True)
    PagedFileSystem.store.clear()
    yield PagedFileSystem
    PagedFileSystem.store.clear()


def test_r104_listings_of_many_pages(ckpt: Ckpt, paged: type[PagedFileSystem]) -> None:
    """R104: a checkpoint of five files, listed two at a time, is whole; without one of them it is not."""
    store = paged()
    for path in FSDP2.iterdir():
        store.pipe(f"/bucket/step/{path.name}", path.read_bytes())
    assert ckpt("verify", "paged://bucket/step").status == 0
    assert paged.n_pages >= 3
    assert as_bytes("paged://bucket/step") == as_bytes(FSDP2)
    store.rm("/bucket/step/__3_0.distcp")
    found = ckpt("verify", "paged://bucket/step")
    assert (found.status, "__3_0.distcp" in found.text) == (1, True)


def test_r106_no_rename(ckpt: Ckpt, paged: type[PagedFileSystem]) -> None:
    """R106: a target on an object store is written under its final names, .metadata last; its URL keeps its slashes."""
    done = ckpt("reshard", FSDP2, "paged://bucket/run//step-5", "--dp", "2", "--json")
    assert done.status == 0
    assert done.json["target_url"] == "paged://bucket/run//step-5"
    assert [key.rsplit("/", 1)[1] for key in paged.store] == ["__0_0.distcp", "__1_0.distcp", ".metadata"]
    assert all(key.startswith("/bucket/run//step-5/") for key in paged.store)
    assert as_bytes("paged://bucket/run//step-5") == as_bytes(FSDP2)


def test_r112_the_plan_is_what_runs(ckpt: Ckpt, tmp_path: Path) -> None:
    """R112: the plan of a dry run lists every read and write, and is the plan of the run itself, byte for byte."""
    words = ["reshard", FSDP2, tmp_path / "out", "--tp", "2", "--default", "replicate", "--plan-json"]
    assert ckpt(*words, tmp_path / "dry.json", "--dry-run").status == 0
    assert ckpt(*words, tmp_path / "run.json").status == 0
    assert (tmp_path / "dry.json").read_text("utf-8") == (tmp_path / "run.json").read_text("utf-8")
    plan = json.loads((tmp_path / "dry.json").read_text("utf-8"))
    for tile in plan["tiles"]:
        read = b"".join((FSDP2 / path).read_bytes()[at : at + n] for path, at, n in tile["reads"])
        written = b"".join((tmp_path / "out" / path).read_bytes()[at : at + n] for path, at, n in tile["writes"])
        assert sorted(read) == sorted(written)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_r113_killed_and_resumed(ckpt: Ckpt, tmp_path: Path) -> None:
    """R113: killed at ten random moments a conversion leaves nothing under the final name; resumed, the same bytes."""
    source = tmp_path / "source.safetensors"
    save_file({f"w{n}": np.random.default_rng(n).random((512, 2048), np.float32) for n in range(12)}, source)
    words = ["export", str(source), "--to", "torch-save", "-q"]
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "ckpt_tool", *words[:2], str(tmp_path / "whole"), *words[2:]], cwd=REPOSITORY, check=True
    )
    seconds, expected = time.perf_counter() - started, contents(tmp_path / "whole")
    moments, out, n_killed = random.Random(113), tmp_path / "out", 0
    command = [sys.executable, "-m", "ckpt_tool", *words[:2], str(out), *words[2:], "--resume"]
    for _ in range(10):
        run = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
        time.sleep(moments.uniform(0.3, 1) * seconds)
        run.send_signal(signal.SIGKILL)
        if run.wait() == 0:
            break
        n_killed += 1
        if out.exists():  # killed after the last step of all
            break
        assert out.with_name("out.partial").exists() or not any(tmp_path.glob("out*"))
    if not out.exists():
        assert ckpt(*words[:2], out, *words[2:], "--resume").status == 0
    assert n_killed
    assert contents(out) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source.safetensors", "whole"]


def test_r116_where_the_nan_is(ckpt: Ckpt, tmp_path: Path) -> None:
    """R116: one NaN, at element 12,345 and in the third of four files, is named with tensor, index, file and byte."""
    whole = torch.ones(20_000)
    whole[12_345] = torch.nan

    def add(made: Checkpoint) -> None:
        made.tensor("w", (20_000,), [(r, (r * 5000,), whole[r * 5000 : r * 5000 + 5000].clone()) for r in range(4)])

    source = dcp(tmp_path / "source", add)
    found = ckpt("verify", source, "--full", "--json")
    assert found.status == 1
    (finding,) = [finding for finding in found.json["findings"] if finding["kind"] == "nan"]
    assert (finding["fqn"], finding["file"], finding["length"]) == ("w", "__2_0.distcp", 4)
    assert "the first at index [12345]" in finding["message"]
    data = (source / "__2_0.distcp").read_bytes()
    assert np.isnan(np.frombuffer(data, np.float32, 1, finding["offset"])).all()


def test_r118_weights_without_the_optimizer(ckpt: Ckpt, tmp_path: Path) -> None:
    """R118: an export of the weights reads no byte of optimizer state."""
    optimizer: dict[str, list[tuple[int, int]]] = {}
    for chunk in ckpt("inspect", FSDP2, "--json", "--shards").json["chunks"]:
        if chunk["fqn"].startswith("optim."):
            optimizer.setdefault(chunk["file"], []).append((chunk["offset"], chunk["offset"] + chunk["length"]))
    assert ckpt("export", FSDP2, tmp_path / "out", "--plan-json", tmp_path / "plan.json").status == 0
    reads = [read for tile in json.loads((tmp_path / "plan.json").read_text())["tiles"] for read in tile["reads"]]
    assert sum(length for _, _, length in reads) == sum(len(data) for _, _, data in as_bytes(tmp_path / "out").values())
    assert [(path, at) for path, at, n in reads for lo, hi in optimizer.get(path, []) if at < hi and lo < at + n] == []
