"""Over all real checkpoints here: equal values have equal digests, whatever their format, cut and name."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from ckpt_tool.api.digest import digests
from ckpt_tool.manifest.digest import ContentDigest
from tests.reports.made import as_bytes

FIXTURES = Path(__file__).parents[2] / "fixtures"
TRUTHS = sorted(FIXTURES.glob("*/*/truth.safetensors"))
BELOW = {"torchtitan_dp2tp2": "checkpoint/step-3"}
# What the program that saved had in memory and did not write, with how many of it.
NOT_STORED = {
    "ds_z3_bf16": 14,  # bf16 weights: ZeRO-3 stores their fp32 masters
    "ds_z3_sub": 14,
    "fsdp1_per_rank_pt_2r": 42,  # the optimizer
    "hf_dcp_consolidated": 1,  # torch's consolidation loses values of tensors without dimensions
}


@pytest.fixture(scope="module")
def tables() -> dict[Path, dict[str, ContentDigest]]:
    """Digests of what each checkpoint holds."""
    places = {truth: truth.parent / "ckpt" / BELOW.get(truth.parent.name, "") for truth in TRUTHS}
    return {truth: digests(place, files="none", n_workers=1).tensors for truth, place in places.items()}


def test_each_checkpoint_has_the_digests_of_its_values(tables: dict[Path, dict[str, ContentDigest]]) -> None:
    """Those of one plain file that holds the same tensors whole; forty checkpoints of thirteen formats."""
    assert len(TRUTHS) > 40
    for truth, found in tables.items():
        there = set(found.values())
        expected = digests(truth, files="none", n_workers=1).tensors
        missing = [fqn for fqn, digest in expected.items() if digest not in there]
        assert len(missing) == NOT_STORED.get(truth.parent.name, 0), (truth, missing[:5])


def test_digests_are_equal_where_values_are_and_only_there(tables: dict[Path, dict[str, ContentDigest]]) -> None:
    """Of every pair of tensors in all checkpoints: type, shape and bytes are equal exactly if the digests are."""
    by_values: dict[tuple[str, tuple[int, ...], bytes], set[ContentDigest]] = defaultdict(set)
    owners: dict[tuple[str, tuple[int, ...], bytes], set[str]] = defaultdict(set)
    for truth, found in tables.items():
        place = truth.parent / "ckpt" / BELOW.get(truth.parent.name, "")
        for fqn, value in as_bytes(place).items():
            if fqn in found:
                by_values[value].add(found[fqn])
                owners[value].add(truth.parent.name)
    assert len(by_values) > 1000
    assert [sorted(owners[value]) for value, several in by_values.items() if len(several) != 1] == []
    assert len({next(iter(digest)) for digest in by_values.values()}) == len(by_values)
    shared = [value for value, names in owners.items() if len(names) > 1 and len(value[2]) > 8]
    assert len(shared) > 100
