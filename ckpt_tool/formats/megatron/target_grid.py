"""A target grid is the parallel run that a checkpoint is written for, as Megatron-LM's arguments describe it.

Knows names of mesh axes and of arguments, nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ckpt_tool.formats._pickle.nodes import Stub
from ckpt_tool.formats.base import WriteRequest, WriterOptions
from ckpt_tool.records import dataclass

__all__ = ["TargetGrid", "target_args"]


@dataclass(frozen=True, slots=True)
class TargetGrid:
    """Sizes of a run."""

    tp: int
    pp: int
    cp: int
    ep: int
    world_size: int
    vpp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    etp: int | None = None
    """Tensor-parallel ranks of experts, where that was said."""

    @classmethod
    def of(cls, mesh: Mapping[str, int]) -> TargetGrid:
        """The grid of a mesh; every axis besides ``tp``, ``pp`` and ``cp`` holds data-parallel ranks.

        With ``etp``, experts' ranks are another grid over the same ranks: ``ep`` is then no axis beside the others.

        >>> TargetGrid.of({"pp": 2, "edp": 2, "ep": 2, "tp": 4}).data_parallel_size
        4
        >>> TargetGrid.of({"tp": 2, "dp": 2, "ep": 4, "etp": 1}).world_size
        4
        """
        sizes = {axis: mesh.get(axis, 1) for axis in ("tp", "pp", "cp", "ep")}
        axes = {axis: size for axis, size in mesh.items() if "etp" not in mesh or axis not in ("ep", "etp")}
        return cls(**sizes, world_size=prod(axes.values()), etp=mesh.get("etp"))

    @classmethod
    def of_request(cls, request: WriteRequest) -> TargetGrid:
        """The grid of what is to be laid out, virtual and uneven stages included."""
        return cls.of(dict(zip(request.mesh_axes, request.mesh_sizes, strict=True))).with_options(request.options)

    def with_options(self, options: WriterOptions) -> TargetGrid:
        """The grid with virtual and uneven stages, and with experts' own."""
        ep, etp = options.expert_grid or (self.ep, self.etp)
        return replace(
            self, vpp=options.vpp, first_stage_layers=options.first_stage_layers,
            last_stage_layers=options.last_stage_layers, ep=ep, etp=etp,
        )  # fmt: skip

    @property
    def data_parallel_size(self) -> int:
        """Ranks that read different data."""
        return self.world_size // (self.tp * self.pp * self.cp)

    def expert_tensor_size(self, args: Mapping[str, Any]) -> int:
        """Tensor-parallel ranks of experts: as many as of the rest, by Megatron's own default, or the source's number.

        ``args`` are the source's.
        """
        if self.etp is not None:
            return self.etp
        stated = args.get("expert_tensor_parallel_size")
        follows = type(stated) is not int or stated == args.get("tensor_model_parallel_size")
        return self.tp if follows else stated or self.tp

    def parts_experts(self, args: Mapping[str, Any]) -> bool:
        """Whether experts have an optimizer of their own (mcore 0.19, ``tensor_parallel/layers.py``)."""
        return self.ep > 1 or self.expert_tensor_size(args) != self.tp


def target_args(args: Stub, grid: TargetGrid, **flags: Any) -> Stub:
    """A copy of a run's arguments that says of itself what a run of ``grid`` would.

    Sizes that every version compares on loading are set always, others where the source's version has them.

    Args:
        args: the source's, unchanged.
        grid: the target.
        flags: further arguments to set always.
    """
    known: Mapping[str, Any] = args.state if isinstance(args.state, dict) else {}
    values: dict[str, Any] = {**known, **_sizes(grid)}
    values |= {name: value for name, value in _others(known, grid).items() if name in known}
    copy = type(args).__new__(type(args), *args.args, **args.kwargs)
    copy.made, copy.entries, copy.items, copy.state = args.made, args.entries, args.items, {**values, **flags}
    return copy


def _sizes(grid: TargetGrid) -> dict[str, Any]:
    sizes = {} if grid.etp is None else {"expert_tensor_parallel_size": grid.etp}
    return {
        **sizes,
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": grid.pp,
        "virtual_pipeline_model_parallel_size": grid.vpp if grid.vpp > 1 else None,
        "context_parallel_size": grid.cp,
        "expert_model_parallel_size": grid.ep,
        "data_parallel_size": grid.data_parallel_size,
        "world_size": grid.world_size,
    }


def _others(known: Mapping[str, Any], grid: TargetGrid) -> dict[str, Any]:
    """Arguments that follow from the sizes, or that name the process which saved."""
    tp_before = known.get("tensor_model_parallel_size")
    n_layers, n_chunks = known.get("num_layers"), grid.pp * grid.vpp
    is_even = type(n_layers) is int and n_layers % n_chunks == 0 and grid.vpp > 1
    values: dict[str, Any] = {
        "transformer_pipeline_model_parallel_size": grid.pp,
        "num_layers_per_virtual_pipeline_stage": n_layers // n_chunks if is_even and type(n_layers) is int else None,
        "num_virtual_stages_per_pipeline_rank": grid.vpp if grid.vpp > 1 else None,
        "decoder_first_pipeline_num_layers": grid.first_stage_layers,
        "decoder_last_pipeline_num_layers": grid.last_stage_layers,
        "pipeline_model_parallel_layout": None,
        "inprocess_active_world_size": grid.world_size,
        "rank": 0,
        "local_rank": 0,
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
    }
    # Megatron's own default: experts are cut as the rest is.
    for name in ("expert_tensor_parallel_size", "tensor_parallel_num_weight_shards",
                 "expert_tensor_parallel_num_weight_shards"):  # fmt: skip
        if known.get(name) == tp_before and (grid.etp is None or not name.startswith("expert")):
            values[name] = grid.tp
    return values
