"""What laying out costs at the size of large jobs: placing 405B on 8,960 ranks, coverage of 100,000 boxes, items."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from ckpt_tool.formats._zip.layout import item_layout
from ckpt_tool.geometry.cover import coverage
from ckpt_tool.layout.family import builtin_families
from ckpt_tool.layout.mesh import default_mesh
from ckpt_tool.layout.place import place
from tests.strategies import mesh_boxes

pytestmark = pytest.mark.bench

LAYER = {
    "self_attn.q_proj": (16384, 16384), "self_attn.k_proj": (1024, 16384), "self_attn.v_proj": (1024, 16384),
    "self_attn.o_proj": (16384, 16384), "mlp.gate_proj": (53248, 16384), "mlp.up_proj": (53248, 16384),
    "mlp.down_proj": (16384, 53248), "input_layernorm": (16384,), "post_attention_layernorm": (16384,),
}  # fmt: skip


def best(work: Callable[[], object], n_rounds: int = 3) -> float:
    """Least processor seconds of a few rounds."""
    seconds = []
    for _ in range(n_rounds):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return min(seconds)


def test_layout_at_scale() -> None:
    """Prints processor seconds; nothing is asserted of them, machines differ."""
    model = {f"model.layers.{i}.{name}.weight": shape for i in range(126) for name, shape in LAYER.items()}
    rules = builtin_families()["llama"]
    mesh = default_mesh(tp=8, pp=16, dp=70)
    offsets, sizes = mesh_boxes((150, 120, 150), (50, 40, 50), [(axis, axis) for axis in range(3)])
    order = np.random.default_rng(3).permutation(len(offsets))
    work: dict[str, Callable[[], object]] = {
        "place 405B on 8,960 ranks": lambda: place(list(model), list(model.values()), mesh, rules),
        "coverage of 100,000 boxes": lambda: coverage((150, 120, 150), offsets[order], sizes[order]),
        "1,000 items of a kind": lambda: [item_layout(b"x" * 250, (100,)).tail([crc]) for crc in range(1_000)],
    }
    for what, task in work.items():
        print(f"{what}: {best(task):.4f} s")
