"""Weights of a source that are the same bytes as others, and need not be stored again: rows of its tensors."""

from __future__ import annotations

from ckpt_tool.formats.deepspeed.target_state import TargetState
from ckpt_tool.formats.deepspeed.vectors import MASTER
from ckpt_tool.manifest.alias import same_bytes
from ckpt_tool.manifest.model import Manifest

__all__ = ["own_masters", "second_names"]


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
