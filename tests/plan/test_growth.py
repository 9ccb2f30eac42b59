"""What a plan costs grows with tensors in calls, and with chunks in rows only: counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from math import log2
from types import FrameType
from typing import Any

import pytest

from ckpt_tool.formats.base import WriteRequest
from ckpt_tool.formats.dcp.writer import WRITER
from ckpt_tool.geometry import join
from ckpt_tool.geometry.join import Boxes, Pairs
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.plan.build import make_plan
from ckpt_tool.plan.model import Plan
from tests.bench.layouts import Job, Model, fsdp_job, llama_405b, megatron_job, moe_2t
from tests.synthetic import limits


def first_layers(model: Model, n_layers: int) -> Model:
    """The same model with fewer layers, and a 64th of its height and width."""
    kept = [row for row, layer in enumerate(model.layer.tolist()) if layer < n_layers or layer == model.n_layers]
    shape = model.shape[kept].copy()
    shape[shape >= 64] //= 64
    layer = model.layer[kept].copy()
    layer[layer == model.n_layers] = n_layers
    return Model(
        tuple(model.fqns[row] for row in kept), shape, model.ndim[kept], model.tp_dim[kept], layer, model.expert[kept],
        n_layers, model.n_experts,
    )  # fmt: skip


def laid_out(job: Job) -> Manifest:
    """Every byte's place."""
    return WRITER.lay_out(WriteRequest(job.tensors, job.boxes, job.world_size)).manifest


def plan(source: Job, target: Job) -> Plan:
    """From one job's checkpoint to the other's."""
    return make_plan(laid_out(source), laid_out(target), limits=limits(tile=1 << 20, odd=1 << 20, unit=1 << 20))


def calls(work: Any) -> int:
    """How many Python functions are entered."""
    n: Counter[str] = Counter()

    def count(frame: FrameType, event: str, arg: object) -> None:
        n[event] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return n["call"]


def test_calls_grow_with_files_not_with_chunks() -> None:
    """Eight times the ranks, and chunks, of the same tensors: less than four times the calls."""
    model = first_layers(llama_405b(), 16)
    few, many = ((fsdp_job(model, world_size=n), fsdp_job(model, world_size=n // 2)) for n in (16, 128))
    assert len(many[0].boxes) > 7 * len(few[0].boxes)
    plan(*few)  # what is made once and kept
    assert calls(lambda: plan(*many)) < 4 * calls(lambda: plan(*few))


def test_joined_rows_grow_as_chunks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exponent of rows and pairs that joins look at, over chunks, is one."""
    looked_at = 0
    once = join._join

    def counted(left: Boxes, right: Boxes, n_keys: int) -> Pairs:
        nonlocal looked_at
        pairs = once(left, right, n_keys)
        looked_at += len(left) + len(right) + len(pairs)
        return pairs

    monkeypatch.setattr(join, "_join", counted)
    model = first_layers(llama_405b(), 8)
    work, chunks = [], []
    for ranks in (16, 32, 64, 128):
        looked_at = 0
        made = plan(fsdp_job(model, world_size=ranks), fsdp_job(model, world_size=ranks // 2))
        work.append(looked_at)
        chunks.append(len(made.source.chunks) + len(made.target.chunks))
    exponent = (log2(work[-1]) - log2(work[0])) / (log2(chunks[-1]) - log2(chunks[0]))
    assert exponent <= 1.05


@pytest.mark.parametrize("with_experts", [False, True])
def test_bucket_flat_slices_are_planned_whole(with_experts: bool) -> None:
    """Optimizer slices as Megatron cuts them, with and without experts: each byte read once, every chunk filled."""
    model = first_layers(moe_2t() if with_experts else llama_405b(), 8)
    source = megatron_job(model, tp=2, pp=4, dp=8, ep=8 if with_experts else 1)
    target = megatron_job(model, tp=4, pp=2, dp=6, ep=4 if with_experts else 1)
    made = plan(source, target)
    nbytes = int(made.source.tensors.nbytes.sum())
    assert (made.stats.read_nbytes, made.stats.needed_nbytes, made.stats.written_nbytes) == (nbytes, nbytes, nbytes)
    assert int(made.target.chunks.length.sum()) == nbytes
