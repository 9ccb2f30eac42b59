"""Parts of the torch_dist writer: the target's grid and arguments, its boxes, its optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.dtypes import dtype
from ckpt_tool.formats._pickle.nodes import Global, Stub
from ckpt_tool.formats.megatron.target_boxes import target_boxes
from ckpt_tool.formats.megatron.target_grid import TargetGrid, target_args
from ckpt_tool.formats.megatron.target_optimizer import combined, parts_of
from ckpt_tool.manifest.model import Blob, TensorMeta
from ckpt_tool.manifest.tables import TensorTable


def namespace(**values: Any) -> Stub:
    """A run's arguments."""
    stub: Stub = Global("argparse", "Namespace").stub()
    stub.state = values
    return stub


def table(**shapes: tuple[int, ...]) -> TensorTable:
    """Weights by key; double underscores stand for dots."""
    keys = {key.replace("__", "."): shape for key, shape in shapes.items()}
    return TensorTable.from_records(
        TensorMeta(f"model.{key}", dtype("float32"), shape, "model", ("model", key)) for key, shape in keys.items()
    )


def group(**values: Any) -> dict[str, Any]:
    """A parameter group."""
    return {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "lr": 0.1, "step": 10, **values}


def test_every_other_axis_is_data_parallel() -> None:
    """Axes besides tp, pp and cp multiply to the data-parallel size, whatever they are called."""
    grid = TargetGrid.of({"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 4})
    assert (grid.tp, grid.pp, grid.cp, grid.ep, grid.data_parallel_size, grid.world_size) == (4, 2, 2, 1, 6, 96)


def test_arguments_are_copied() -> None:
    """The source's arguments stay; sizes are set always, the rest where the source's version has it."""
    args = namespace(tensor_model_parallel_size=2, rank=7, seed=1)
    copy = target_args(args, TargetGrid.of({"pp": 1, "dp": 3, "tp": 4}), no_save_rng=True)
    assert args.state == {"tensor_model_parallel_size": 2, "rank": 7, "seed": 1}
    assert (copy.cls, copy.made) == (args.cls, args.made)
    assert copy.state == {
        "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None, "expert_model_parallel_size": 1, "data_parallel_size": 3,
        "world_size": 12, "rank": 0, "seed": 1, "no_save_rng": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("etp", "tp_before", "mesh", "expected"),
    [
        (None, 2, {"tp": 4}, (4, False)),
        (2, 2, {"tp": 4}, (4, False)),
        (1, 2, {"tp": 4}, (1, True)),
        (2, 2, {"tp": 2, "ep": 2}, (2, True)),
    ],
)
def test_experts_follow_the_rest(
    etp: int | None, tp_before: int, mesh: dict[str, int], expected: tuple[int, bool]
) -> None:
    """Experts are cut as the rest is unless the source cuts them otherwise; either way tells their optimizer."""
    args = {"expert_tensor_parallel_size": etp, "tensor_model_parallel_size": tp_before}
    grid = TargetGrid.of(mesh)
    assert (grid.expert_tensor_size(args), grid.parts_experts(args)) == expected


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 9), st.integers(1, 9), st.booleans())
def test_boxes_cover_each_tensor_once(
    tp: int,
    n_layers: int,
    n_experts: int,
    rows: int,
    columns: int,
    swiglu: bool,
) -> None:
    """Whatever the sizes, each element is in one box of its tensor, and each box has a rank of the target."""
    tensors = table(
        embedding__word_embeddings__weight=(rows, columns),
        decoder__layers__mlp__linear_fc1__weight=(n_layers, rows, columns),
        decoder__layers__0__mlp__linear_fc1__weight_w=(rows, columns),
        decoder__layers__mlp__experts__experts__linear_fc2__weight=(n_layers, n_experts, rows, columns),
        decoder__layers__0__mlp__experts__experts__3__linear_fc1__weight=(rows, columns),
        unheard__of=(),
    )
    boxes = target_boxes(tensors, TargetGrid.of({"dp": 2, "tp": tp}), {"swiglu": swiglu})
    for row in range(len(tensors)):
        count = np.zeros(tensors.shape_of(row), dtype=np.int64)
        for box in np.flatnonzero(boxes.tensor == row).tolist():
            ndim = count.ndim
            begin, size = boxes.offsets[box, :ndim].tolist(), boxes.sizes[box, :ndim].tolist()
            count[tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))] += 1
        assert (count == 1).all()
    assert set(boxes.rank.tolist()) <= set(range(2 * tp))


def test_groups_of_ranks_are_united() -> None:
    """Model-parallel ranks' objects give one entry; a group that only some of them have is kept."""
    name = "optimizer.distributed.dp_group_idx_{}.optimizer/shard_0_1"
    blobs = [
        Blob(name.format(rank), "torch_save", None, {"param_groups": groups}, is_loaded=True)
        for rank, groups in enumerate([[group()], [group(), group(wd_mult=0.0)]])
    ]
    bucket = Blob("optimizer.distributed.dp_group_idx_0.per_bucket_numel/shard_0_1", "torch_save", None, [{}])
    parts = parts_of({"param_state_sharding_type": "dp_reshardable"}, [*blobs, bucket])
    assert parts == [
        {
            "param_state_sharding_type": "dp_reshardable",
            "optimizer": {"param_groups": [group(), group(wd_mult=0.0)]},
        }
    ]


def test_optimizers_in_any_container_are_one_list() -> None:
    """One entry, a list, a dict by number, and objects called ``chained_1`` are read alike."""
    dense, experts = {"optimizer": {"param_groups": [group()]}}, {"optimizer": {"param_groups": [group(lr=0.2)]}}
    chained = Blob(
        "chained_1.optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1", "torch_save", None, experts["optimizer"],
        is_loaded=True,
    )  # fmt: skip
    assert parts_of(dense, []) == [dense]
    assert parts_of([dense, experts], []) == [dense, experts]
    assert parts_of({1: experts, 0: dense}, []) == [dense, experts]
    assert parts_of({0: dense, 1: {}}, [chained]) == [dense, experts]
    assert parts_of(None, []) == []


def test_experts_optimizer_is_made_and_unmade() -> None:
    """Experts' groups are those of the rest, marked; numbers of parameters never go over."""
    whole = [{"optimizer": {"param_groups": [group(params=[0, 1]), group(wd_mult=0.0, params=[2])]}}]
    two = combined(whole, is_distributed=True, has_expert_optimizer=True)
    marked = [group(is_expert_parallel=True), group(wd_mult=0.0, is_expert_parallel=True)]
    assert two == {
        0: {
            "optimizer": {"param_groups": [group(), group(wd_mult=0.0)]},
            "param_state_sharding_type": "fully_reshardable",
        },
        1: {"optimizer": {"param_groups": marked}, "param_state_sharding_type": "fully_reshardable"},
    }
    assert combined([two[0], two[1]], is_distributed=True, has_expert_optimizer=False) == two[0]


def test_undistributed_entry_keeps_its_form() -> None:
    """Without the distributed optimizer there is no sharding type, and the step that all share stays."""
    part = {"optimizer": {"param_groups": [group()], "state": {"common_step": 10}}}
    assert combined([part], is_distributed=False, has_expert_optimizer=False) == part
