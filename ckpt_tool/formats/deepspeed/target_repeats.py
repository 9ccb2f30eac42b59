"""Weights of a source that are the same bytes as others, and need not be stored again: rows of its tensors."""

from __future__ import annotations

from ckpt_tool.formats.deepspeed.target_state import TargetState
from ckpt_tool.formats.deepspeed.vectors import MASTER
from ckpt_tool.manifest.alias import same_bytes, with_aliases
from ckpt_tool.manifest.model import Manifest, TensorMeta

__all__ = ["own_masters", "second_names", "with_masters_apart"]


def with_masters_apart(source: Manifest, state: TargetState) -> Manifest:
    """Weights that are masters for want of others get a second name as such; a cast of the weights leaves it alone."""
    tensors = source.tensors
    aliases = [
        (row, TensorMeta(".".join(map(str, path)), tensors.dtypes[row], tensors.shape_of(row), "optimizer", path))
        for name, row in state.lent.items()
        for path in [(*state.prefix, "state", state.parameters[name].key, MASTER)]
    ]
    return with_aliases(source, aliases)


def second_names(source: Manifest, state: TargetState) -> set[int]:
    """Second names of shared weights, which DeepSpeed records, beside their first."""
    return {
        state.weights[second]
        for second, first in source.info.get("shared", {}).items()
        if {second, first} <= set(state.weights)
        and same_bytes(source.chunks, state.weights[second], state.weights[first])
    }


def own_masters(source: Manifest, state: TargetState) -> set[int]:
    """Weights that are masters under a second name, as stage 3 has no others."""
    shared = source.info.get("shared", {})
    return {
        row
        for name, row in state.weights.items()
        if (own := state.parameters.get(shared.get(name, name))) is not None
        and same_bytes(source.chunks, row, own.states[MASTER])
    }
