"""A full check by processes that map the files finds what threads find that read them, whatever happens to a file."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckpt_tool.api.trust.verify import verify
from ckpt_tool.checks import blocks
from ckpt_tool.checks.report import VerifyReport
from ckpt_tool.formats.base import Checksum
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.storage import shares
from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.mapped import mapped
from tests.checks.synthetic import FakeReader, checkpoint_of, chunk, kinds, make, tensor

# The process of the tests has threads of numpy's, which hold nothing that is used here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
NAMES = ("float32", "bfloat16", "float16", "float64", "complex64", "uint8")


def written(folder: Path) -> tuple[Manifest, list[Checksum]]:
    """Tensors of many types in two files, on any byte; half of them hold large values."""
    rng = np.random.default_rng(3)
    tensors, chunks, sums = [], [], []
    for number, path in enumerate(("a.bin", "b.bin")):
        data = bytearray(b"x" * number)
        for row, name in enumerate(NAMES):
            meta = tensor(f"optimizer.state.exp_avg.{path[0]}{row}", (50_000,), name)
            width = meta.dtype.bits // 8
            values = rng.standard_normal(width * 12_500).astype("f4") * (10 if row % 2 else 0.01)
            raw = np.frombuffer(values.tobytes(), np.uint8).copy()
            if name != "float32":  # a byte below the exponent's highest bit is a number in all types
                raw &= 0x3F
            raw[-2:] = 0xFF if number == 0 else 0  # the exponent of the last element
            tensors.append(meta)
            chunks.append(chunk(meta.fqn, Box((0,), (50_000,)), FileRange(path, len(data), len(raw))))
            sums.append(Checksum(chunks[-1].where, zlib.crc32(raw.data) ^ (row == 1), meta.fqn))
            data += raw.tobytes() + b"?" * (row % 3)
        (folder / path).write_bytes(data)
    return make(tensors, chunks), sums


def report_of(folder: Path, manifest: Manifest, sums: Sequence[Checksum], n_workers: int = 2) -> VerifyReport:
    """A full verification in blocks of 64 KiB."""
    store = LocalStore(str(folder))
    checkpoint = checkpoint_of(manifest, {}, FakeReader(manifest, sums), store)
    found = verify(checkpoint, level="full", memory_budget_bytes=256 << 10, n_workers=n_workers)
    store.close()
    return found


@pytest.fixture
def by_processes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Processes are forked, however little there is to do; says so in the list that it is."""
    used: list[bool] = []

    def share_out(*args: Any, **others: Any) -> Any:
        used.append(others["in_copies"])
        return original(*args, **others)

    original = shares.share_out
    monkeypatch.setattr(blocks, "share_out", share_out)
    monkeypatch.setattr(blocks, "can_share", lambda *_: True)
    monkeypatch.setattr(blocks, "_STRETCH_BYTES", 200 << 10)
    return used


def test_processes_find_what_threads_find(
    tmp_path: Path, by_processes: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are no numbers, checksums that do not fit: the same findings, with the same places."""
    manifest, sums = written(tmp_path)
    found = report_of(tmp_path, manifest, sums)
    monkeypatch.setattr(blocks, "can_share", lambda *_: False)
    expected = report_of(tmp_path, manifest, sums)
    assert by_processes == [True, False]
    assert found.findings == expected.findings
    assert (found.checked_nbytes, found.covered_nbytes) == (expected.checked_nbytes, expected.covered_nbytes)
    assert sorted(kinds(found.findings)) == sorted(
        [("crc-mismatch", f"optimizer.state.exp_avg.{path}1") for path in "ab"]
        + [("nan", f"optimizer.state.exp_avg.a{row}") for row in range(5)]
    )


@pytest.mark.parametrize("cut", [0, 70_001])
def test_a_file_that_shrinks_under_its_mapping(
    tmp_path: Path, by_processes: list[bool], monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """The process that looks at it is ended by the system; what is left of the file is checked, the rest unreadable.

    That it is another file in the end, of which nothing is to be told, is looked at by nobody here.
    """
    manifest, sums = written(tmp_path)
    monkeypatch.setattr("ckpt_tool.api.trust.verify.unchanged", lambda _: nullcontext())

    def shrinking(*args: Any) -> npt.NDArray[np.uint8] | None:
        window = mapped(*args)
        os.truncate(tmp_path / "b.bin", cut)
        return window

    monkeypatch.setattr(blocks, "mapped", shrinking)
    found = report_of(tmp_path, manifest, sums)
    assert by_processes == [True]
    unreadable = [finding for finding in found.findings if finding.kind == "unreadable"]
    assert {finding.where.path for finding in unreadable if finding.where is not None} == {"b.bin"}
    assert ("crc-mismatch", "optimizer.state.exp_avg.a1") in kinds(found.findings)
    assert ("nan", "optimizer.state.exp_avg.a0") in kinds(found.findings)
