"""Sinks: what is written, where, and in how many calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.storage.local.target import LocalTarget


def test_headers_that_follow_each_other_are_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a zip with one tensor: what stands before the payload, the payload, and what stands behind it, once."""
    writes: list[tuple[int, int]] = []
    original = LocalTarget.write

    def noted(target: LocalTarget, path: str, offset: int, buffer: bytes | bytearray | memoryview) -> None:
        writes.append((offset, offset + len(buffer)))
        original(target, path, offset, buffer)

    monkeypatch.setattr(LocalTarget, "write", noted)
    weights = torch.arange(6.0)
    torch.save({"w": weights}, tmp_path / "source.pt")
    reshard(tmp_path / "source.pt", tmp_path / "out.pt", to="torch-save", durable=False)
    assert torch.equal(torch.load(tmp_path / "out.pt")["w"], weights)
    payload, head, rear = writes
    assert (head[0], head[1], payload[1], rear[1]) == (0, payload[0], rear[0], (tmp_path / "out.pt").stat().st_size)
