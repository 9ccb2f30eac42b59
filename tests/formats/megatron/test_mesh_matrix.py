"""Each form that is read, written for each mesh of a small cluster: weights, masters and both moments are the truth.

With ``-m matrix`` (``make test-megatron``) every source on every mesh, in both containers; else each source on
one, from all over the list. That Megatron has the same truth of the same sources, where it can, and which
it cannot do, `test_itself` shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.formats.megatron.target_boxes import weight_key
from tests.formats.conformance import Truth
from tests.formats.megatron.places import (
    CHECKPOINTS,
    by_layer,
    dense_shapes,
    expert_shapes,
    padded_for,
    truth_from_seed,
)

Mesh = dict[str, int]
TARGETS = ("megatron-dist", "megatron-legacy")
# Rows of the vocabulary are those of the source's tensor-parallel size.
DENSE = {
    "td_full_t2p2d2": 112, "td_dpr_t2p2d2": 112, "td_dpzero_t2p2": 112, "td_nodist_t2": 112, "td_full_t4p1": 128,
    "old012_fsms_t2p1d2": 112, "old012_fsms_t1d3": 104, "old012_zarr_t2p1d1": 112, "dpr_vpp_p2": 104,
    "dpr_uneven_p2": 104, "legacy_t2p2": 112, "legacy_vpp_p2v2": 104, "legacy_uneven_p2": 104, "legacy_nodist_t2": 112,
}  # fmt: skip
EXPERTS = {
    "moe_seq_e2": 104, "moe_dpr_e2": 104, "td_dpzero_moe_e2": 104, "legacy_moe_e2": 104, "dpr_etp1_t2e2": 112,
    "legacy_etp1_t2e2": 112, "legacy_nodist_etp1_t2e2": 112,
}  # fmt: skip
SINGLE = "td_full_t4p1"
"""Its layers are tensors of their own; distributed targets keep them so."""
PLAIN_VOCABULARY = ("old012_fsms_t2p1d2", "old012_fsms_t1d3", "old012_zarr_t2p1d1")
"""Their arguments say nothing of the vocabulary: it keeps its rows."""


def meshes() -> Iterator[Mesh]:
    """TP, PP and DP of a dense model of 4 layers, with virtual stages where there are layers for them."""
    for tp, pp, dp in product((1, 2, 4), (1, 2, 4), (1, 2, 3)):
        yield {"tp": tp, "pp": pp, "dp": dp}
    for tp, dp in product((1, 2, 4), (1, 2, 3)):
        yield {"tp": tp, "pp": 2, "dp": dp, "vpp": 2}


def expert_meshes() -> Iterator[Mesh]:
    """The same with expert parallelism, for 4 experts in 2 layers; experts cut as the rest is, or not at all."""
    for tp, pp, dp, ep in product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 4)):
        if dp % ep == 0:
            yield {"tp": tp, "pp": pp, "dp": dp, "ep": ep}
            if tp > 1:
                yield {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "etp": 1}


def all_cases() -> Iterator[tuple[str, Mesh, str]]:
    """Every source on every mesh in both containers."""
    yield from product(DENSE, meshes(), TARGETS)
    yield from product(EXPERTS, expert_meshes(), TARGETS)


def some_cases() -> Iterator[tuple[str, Mesh, str]]:
    """Each source on a mesh of its own."""
    for names, some in ((DENSE, [*meshes()]), (EXPERTS, [*expert_meshes()])):
        for number, name in enumerate(names):
            yield name, some[(7 * number + 3) % len(some)], TARGETS[number % 2]


def truth_of(name: str, tp: int, to: str) -> Mapping[str, Truth]:
    """What must come out."""
    shapes = dense_shapes(4, DENSE[name]) if name in DENSE else expert_shapes(2, EXPERTS[name], 4)
    truth = truth_from_seed(shapes)
    if name == SINGLE and to == "megatron-dist":
        truth = by_layer(truth)
    return truth() if name in PLAIN_VOCABULARY else padded_for(truth(), tp)


def assert_comes_out(name: str, mesh: Mesh, to: str, target: Path) -> None:
    """The checkpoint, written for the mesh and read back, is the truth."""
    options: dict[str, Any] = {**mesh, "digest": None, "durable": False}
    reshard(CHECKPOINTS / name / "ckpt", target, to=to, **options)
    truth = truth_of(name, mesh["tp"], to)
    with open_checkpoint(target) as checkpoint:
        found = {
            meta.fqn: Truth(meta.dtype.name, meta.shape, np.ascontiguousarray(checkpoint[meta.fqn].numpy()).tobytes())
            for meta in checkpoint.manifest.tensors
            if weight_key(meta.path) is not None
        }
    assert found == truth


def shown(value: object) -> str:
    """A mesh as an id of a test."""
    return "-".join(f"{axis}{size}" for axis, size in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("name", "mesh", "to"), [*some_cases()], ids=shown)
def test_each_source(name: str, mesh: Mesh, to: str, tmp_path: Path) -> None:
    """Each of them on one mesh."""
    assert_comes_out(name, mesh, to, tmp_path / "out")


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "mesh", "to"), [*all_cases()], ids=shown)
def test_each_source_on_each_mesh(name: str, mesh: Mesh, to: str, tmp_path: Path) -> None:
    """All of them."""
    assert_comes_out(name, mesh, to, tmp_path / "out")
