"""What a verification asks of storage that is far away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.storage.traffic import counting
from tests.formats.conformance import FIXTURES


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A DCP checkpoint of small tensors in fsspec's memory, and its bytes."""
    reshard(FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt", tmp_path / "dcp", dp=2, durable=False, digest=None)
    store = fsspec.filesystem("memory")
    for path in (tmp_path / "dcp").iterdir():
        store.pipe_file(f"/far/{path.name}", path.read_bytes())
    yield "memory://far", sum(path.stat().st_size for path in (tmp_path / "dcp").iterdir())
    store.rm("/far", recursive=True)


@pytest.mark.parametrize("level", ["default", "full"])
def test_no_byte_is_asked_for_twice(level: str, far: tuple[str, int]) -> None:
    """Headers, checksums and payload of small tensors lie so close that all is read, once, in a few requests."""
    url, nbytes = far
    with counting() as traffic:
        report = verify(url, level=level)
    assert report.is_ok
    assert 0.9 * nbytes < traffic.received_nbytes <= nbytes
    assert traffic.n_requests < 12
