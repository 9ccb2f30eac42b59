"""What a target's model states say besides the module: counters, the program's own values, names and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.formats._pickle.nodes import OrderedMap, Size
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats.deepspeed.opened import INFO_KEY as UNIVERSAL_INFO
from ckpt_tool.formats.deepspeed.target_grid import Grid
from ckpt_tool.formats.deepspeed.target_state import TargetState
from ckpt_tool.manifest.model import KeyPath

__all__ = [
    "UNIVERSAL_INFO",
    "UNIVERSAL_VERSION",
    "UNIVERSAL_VERSION_KEY",
    "WRITTEN_VERSION",
    "config_of",
    "model_facts",
    "sizes",
    "step_of",
]

UNIVERSAL_VERSION_KEY = "universal_checkpoint_version"
UNIVERSAL_VERSION = 0.4
WRITTEN_VERSION = "0.19.8"
"""The release of DeepSpeed whose files are written, and which is named where the source names none."""


def model_facts(
    state: TargetState,
    info: Mapping[str, Any],
    tensors: Sequence[tuple[KeyPath, Any]],
    *,
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    grid: Grid,
    is_pipeline: bool = False,
) -> dict[str, Any]:
    """A model state without ``module``.

    Args:
        state: what is written.
        info: what the source says beyond tensors.
        tensors: tensors that are neither weights nor states, described for the pickle, by their keys.
        shapes: of trained parameters in flat order, by flat vector.
        grid: ranks of the target.
        is_pipeline: whether tied parameters are told by their names.
    """
    entries = [*state.model, *tensors]
    values = nest(entries, int_keyed=info.get("int_keyed_dicts", ())) if entries else {}
    shared = info.get("shared", {})
    step = step_of(state, info)
    return {
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "global_steps": step or 0,
        "skipped_steps": 0,
        "ds_config": {},
        "ds_version": info.get("deepspeed_version", WRITTEN_VERSION),
        **(values if isinstance(values, dict) else {}),
        "buffer_names": [name for name in info.get("buffers", ()) if name in state.weights],
        "optimizer": None,
        "param_shapes": [sizes(own) for own in shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(shared) if isinstance(shared, Mapping) and not is_pipeline else {},
        "dp_world_size": grid.dp,
        "mp_world_size": grid.mp,
        "checkpoint_parallel_dimensions": {"pp_degree": grid.pp, "tp_degree": grid.tp},
    }


def step_of(state: TargetState, info: Mapping[str, Any]) -> int | None:
    """The source's step, or else its optimizer's."""
    known = info.get("step")
    return known if type(known) is int else state.step


def sizes(shapes: Mapping[str, tuple[int, ...]]) -> OrderedMap:
    """``torch.Size`` by name."""
    found = OrderedMap()
    found.update({name: Size(shape) for name, shape in shapes.items()})
    return found


def config_of(entries: Sequence[tuple[KeyPath, Any]]) -> dict[str, Any]:
    """The configuration of the source's run, among its objects; empty when it has none."""
    own = [(path[1:], value) for path, value in entries if path[:1] == ("ds_config",) and len(path) > 1]
    found = nest(own) if own else {}
    return found if isinstance(found, dict) else {}
