"""Loading in a job: every layout bit for bit, both ways of reading, each byte read once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.job import workers

pytestmark = pytest.mark.dist

WORLD_SIZES = (2, 4)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank of a job of each size got."""
    folder = tmp_path_factory.mktemp("layouts")
    found = {}
    for size in WORLD_SIZES:
        workers.start(workers.layouts, size, folder)
        found[size] = [_told(folder / f"{size}.{rank}.json") for rank in range(size)]
    return found


def _told(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return told


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("way", workers.EXCHANGES)
@pytest.mark.parametrize("case", workers.CASES)
def test_bits_are_those_of_the_truth(loaded: dict[int, list[dict[str, Any]]], case: str, way: str, size: int) -> None:
    """Each rank's local tensors are bit for bit what torch cuts from the truth, however they were read."""
    assert [rank[case][way]["different"] for rank in loaded[size]] == [[]] * size


@pytest.mark.parametrize("case", sorted(workers.UNCUT))
def test_each_rank_reads_its_own_bytes(loaded: dict[int, list[dict[str, Any]]], case: str) -> None:
    """Without an exchange a rank reads exactly the bytes of its boxes, metadata aside."""
    for rank in loaded[4]:
        assert rank[case]["none"]["recorded"] == rank[case]["none"]["needed"]


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("way", ["shared-memory", "all-to-all"])
@pytest.mark.parametrize("case", workers.CASES)
def test_an_exchange_reads_each_byte_once(
    loaded: dict[int, list[dict[str, Any]]], case: str, way: str, size: int
) -> None:
    """With an exchange the ranks together read every byte of the state once, whoever needs it."""
    cases = [rank[case][way] for rank in loaded[size]]
    assert sum(each["recorded"] for each in cases) == cases[0]["distinct"]
    assert [each["recorded"] for each in cases] == [each["report"]["read_nbytes"] for each in cases]


def test_reads_are_balanced(loaded: dict[int, list[dict[str, Any]]]) -> None:
    """Replicated state is read in shares of about equal size."""
    shares = [rank["fsdp x tp to replicas"]["all-to-all"]["recorded"] for rank in loaded[4]]
    assert max(shares) - min(shares) <= 0.05 * sum(shares)


def test_what_is_sent_is_received(loaded: dict[int, list[dict[str, Any]]]) -> None:
    """Bytes sent and received add up, and buffers stay within the budget of 1 MiB."""
    for case in workers.CASES:
        reports = [rank[case]["all-to-all"]["report"] for rank in loaded[4]]
        assert sum(each["sent_nbytes"] for each in reports) == sum(each["received_nbytes"] for each in reports)
        assert max(each["max_buffer_nbytes"] for each in reports) <= 1 << 20


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_auto_shares_what_is_slow_to_read(loaded: dict[int, list[dict[str, Any]]], size: int) -> None:
    """On slow storage replicated state is read once and exchanged, state that nobody shares is not; all ranks agree."""
    for rank in loaded[size]:
        way, why, is_equal = rank["choices"]["replicas"]
        assert (way, is_equal) == ("shared-memory", True)
        assert f"each byte would be read {size:.2f} times; reading for oneself at" in why
        assert [rank["choices"]["rows"][part] for part in (0, 2)] == ["none", True]
        assert rank["choices"] == loaded[size][0]["choices"]


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("model", ["fsdp2", "fsdp2 x tp", "fsdp1"])
def test_real_models(loaded: dict[int, list[dict[str, Any]]], model: str, size: int) -> None:
    """A model sharded by torch's own FSDP2, by tensor parallelism under it, or by FSDP1, holds the truth."""
    for rank in loaded[size]:
        assert rank["models"][model]["different"] == []
        assert rank["models"][model]["n_tensors"] > 30


def test_strided_shards_were_among_them(loaded: dict[int, list[dict[str, Any]]]) -> None:
    """FSDP2 over tensor parallelism on one dimension makes strided shards."""
    assert any("_StridedShard" in each for each in loaded[4][0]["models"]["fsdp2 x tp"]["placements"])
    assert "ShardedTensor" in loaded[4][0]["models"]["fsdp1"]["placements"]
