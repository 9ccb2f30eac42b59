"""Blocks that a conversion shares with its source: which they are, and on XFS and Btrfs that they cost no room.

Marked ``reflink`` are tests that make and mount a file system, which wants root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.edit import edit
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.diff import diff
from ckpt_tool.dtypes import DTYPES
from ckpt_tool.engine import clones
from ckpt_tool.engine.clones import shared_runs
from ckpt_tool.formats._safetensors.header import build_header
from ckpt_tool.geometry.box import Box
from ckpt_tool.plan.build import make_plan
from ckpt_tool.storage.local import target as local_target
from tests.synthetic import limits, make_source, make_target

BLOCK = 8


@pytest.mark.parametrize("gap", [0, 3, 5])
def test_runs_are_whole_blocks_of_both(monkeypatch: pytest.MonkeyPatch, gap: int) -> None:
    """What is said to be shared is the same bytes on both sides, whole blocks, and all there is of them."""
    monkeypatch.setattr(clones, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(clones, "_LEAST_BYTES", BLOCK)
    dice = np.random.default_rng(gap)
    arrays = {f"w{i}": dice.integers(0, 255, (13 + i, 7), dtype=np.uint8) for i in range(9)}
    source = make_source(
        arrays, {fqn: [Box((0, 0), (5, 7)), Box((5, 0), (a.shape[0] - 5, 7))] for fqn, a in arrays.items()}
    )
    cuts = {
        fqn: [Box((r, 0), (min(3 + gap, a.shape[0] - r), 7)) for r in range(0, a.shape[0], 3 + gap)]
        for fqn, a in arrays.items()
    }
    target = make_target(source.manifest, cuts, n_files=2)
    plan = make_plan(source.manifest, target, limits=limits(tile=1 << 20))
    files = {entry.path: bytearray(entry.nbytes) for entry in target.files}
    for row in range(len(target.chunks)):
        chunk = target.chunks.record(row, target.tensors, target.files)
        data = arrays[chunk.fqn][chunk.box.slices]
        files[chunk.where.path][chunk.where.offset : chunk.where.offset + data.size] = data.tobytes()
    runs = shared_runs(plan)
    assert len(runs.write)
    for row, write in enumerate(runs.write.tolist()):
        to = int(plan.writes.file_offset[write] + runs.start[row])
        back, n = int(runs.file_offset[row]), int(runs.length[row])
        assert (to % BLOCK, back % BLOCK, n % BLOCK) == (0, 0, 0)
        there = files[plan.target.files.paths[plan.writes.file[write]]][to : to + n]
        assert source.files[plan.source.files.paths[runs.file[row]]][back : back + n] == there
        assert runs.start[row] + n <= plan.writes.length[write]


def weights(n: int = 6, rows: int = 512) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """About a megabyte each."""
    dice = np.random.default_rng(1)
    return {f"model.layers.{i}.weight": dice.standard_normal((rows, 513), dtype=np.float32) for i in range(n)}


@pytest.mark.parametrize("digest", ["beside", None])
def test_shared_pieces_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str | None) -> None:
    """With a system that shares, all whole blocks are shared and the file is the same as without."""
    shared: list[int] = []

    def clone_range(source_fd: int, target_fd: int, source_offset: int, target_offset: int, nbytes: int) -> bool:
        assert (source_offset % 4096, target_offset % 4096, nbytes % 4096) == (0, 0, 0)
        shared.append(nbytes)
        return os.pwrite(target_fd, os.pread(source_fd, nbytes, source_offset), target_offset) == nbytes

    truth = weights()
    save_file(truth, tmp_path / "model.safetensors", metadata={"format": "pt", "odd": "x" * 41})
    total = sum(array.nbytes for array in truth.values())
    options: dict[str, Any] = {"max_shard_nbytes": 3 << 20, "share_blocks": True, "digest": digest, "durable": False}
    monkeypatch.setattr(local_target, "clone_range", lambda *_: False)
    written = export(tmp_path / "model.safetensors", tmp_path / "written", **options)
    monkeypatch.setattr(local_target, "clone_range", clone_range)
    result = export(tmp_path / "model.safetensors", tmp_path / "shared", **options)
    assert (written.report.shared_nbytes, [note[:18] for note in written.notes]) == (0, ["no block is shared"])
    assert (result.report.shared_nbytes + 4096, result.notes) == (sum(shared), ())  # the trial is one block
    assert total - 4 * 8192 * len(truth) <= sum(shared) < total
    names = sorted(os.listdir(tmp_path / "shared"))
    assert len(names) == 4
    for name in names:
        assert (tmp_path / "shared" / name).read_bytes() == (tmp_path / "written" / name).read_bytes()
    found = {
        k: v
        for name in names
        if name.endswith(".safetensors")
        for k, v in load_file(tmp_path / "shared" / name).items()
    }
    assert {name: array.tobytes() for name, array in found.items()} == {n: a.tobytes() for n, a in truth.items()}


def test_casts_and_strides_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not the source's bytes is never shared."""

    def refuse(*_: object) -> bool:
        raise AssertionError("shared")

    monkeypatch.setattr(local_target.LocalTarget, "can_share", lambda *_: True)
    monkeypatch.setattr(local_target.LocalTarget, "share", refuse)
    save_file(weights(2), tmp_path / "model.safetensors")
    export(
        tmp_path / "model.safetensors", tmp_path / "cast.safetensors", dtype="bf16", share_blocks=True, durable=False
    )
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nmatch = "model\\\\.layers\\\\.[0-9]+\\\\.weight"\nkind = "row"\n')
    reshard(tmp_path / "model.safetensors", tmp_path / "columns", tp=2, rules=rules, to="rank-files", durable=False)
    with open_checkpoint(tmp_path / "columns") as columns:
        assert {tuple(sizes) for sizes in columns.manifest.chunks.sizes.tolist()} == {(512, 257), (512, 256)}


@pytest.mark.parametrize("length", [1, 63, 64, 100])
def test_the_payload_takes_the_place_of_most_bytes(length: int) -> None:
    """However long the JSON is; without origins it begins at a multiple of 64."""
    kinds = [
        ("a" * length, DTYPES["float32"], (10,)),
        ("b", DTYPES["float32"], (1000,)),
        ("c", DTYPES["float32"], (900,)),
    ]
    data, header = build_header(kinds, {})
    assert (len(data), len(data) % 64) == (header.data_start, 0)
    data, header = build_header(kinds, {}, {"a" * length: 8, "b": 5000, "c": 12288 + 5000 + 4000})
    places = {entry.name: header.data_start + entry.start for entry in header.entries}
    assert places["b"] % 4096 == 5000 % 4096
    assert places["c"] % 4096 == (5000 + 4000) % 4096
    assert len(data) - length < 2 * 4096
    assert build_header(kinds, {}, {"b": 5001})[1].data_start % 64 == 0  # at no multiple of 8: it could not be mapped


@pytest.fixture(params=["xfs", "btrfs"])
def shares(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty file system that shares blocks."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    with image.open("wb") as file:
        file.truncate(512 << 20)
    mount.mkdir()
    subprocess.run([f"mkfs.{request.param}", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)


def taken(folder: Path, work: Callable[[], object]) -> int:
    """Bytes of the file system that it takes."""
    os.sync()
    before = shutil.disk_usage(folder).free
    work()
    os.sync()
    return before - shutil.disk_usage(folder).free


@pytest.mark.reflink
def test_a_file_system_that_shares(shares: Path) -> None:
    """Tensors in other files cost no room where places in blocks agree; bytes are those of the truth."""
    truth = weights(40)
    total = sum(array.nbytes for array in truth.values())
    source = shares / "model.safetensors"
    save_file(truth, source, metadata={"odd": "x" * 41})

    def rewritten(name: str, **options: Any) -> int:
        return taken(shares, lambda: export(source, shares / name, max_shard_nbytes=9 << 20, **options))

    assert rewritten("shared", share_blocks=True) < total // 20
    longer: dict[str, str | None] = {"note": "y" * 9000}
    assert taken(shares, lambda: edit(source, shares / "edited.safetensors", metadata=longer)) < total // 20
    assert rewritten("written") > total * 9 // 10
    reshard(shares / "shared", shares / "ranks", dp=2, to="dcp")
    for folder in ("shared", "written"):
        found = {k: v for path in (shares / folder).glob("*.safetensors") for k, v in load_file(path).items()}
        assert {name: array.tobytes() for name, array in found.items()} == {n: a.tobytes() for n, a in truth.items()}
    assert diff(shares / "ranks", source).is_same
    assert diff(shares / "edited.safetensors", source).is_same
    source.unlink()  # what was shared stays
    assert diff(shares / "ranks", shares / "shared").is_same
