"""A parameter group says of itself which parameters are in it: whether they decay, are experts', or an embedding.

Source: Megatron-LM core 0.19, ``optimizer/__init__.py``, ``_get_param_groups`` and the overrides of groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["EXPERTS", "in_group", "inner_optimizer", "own_groups"]

EXPERTS = "is_expert_parallel"
_OWN_RATE = "is_decoupled_lr"
_OUTPUT = "output_layer.weight"


def inner_optimizer(optimizer: Any) -> Mapping[str, Any]:
    """Torch's own state dict, out of the mixed-precision wrapper's; empty where there is none."""
    if not isinstance(optimizer, Mapping):
        return {}
    inner = optimizer.get("optimizer", optimizer)
    return inner if isinstance(inner, Mapping) else {}


def own_groups(optimizer: Any) -> list[Mapping[str, Any]]:
    """The parameter groups of an optimizer's entry, wrapped or not."""
    groups = inner_optimizer(optimizer).get("param_groups")
    return [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []


def in_group(
    name: str,
    shape: Sequence[int],
    group: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    *,
    is_expert: bool,
    is_apart: bool,
) -> bool:
    """Whether a parameter belongs to a group.

    Args:
        name: what its module calls it.
        shape: the rank's own.
        group: the group.
        groups: all groups of its optimizer.
        is_expert: whether it is an expert's.
        is_apart: whether experts have an optimizer, and so groups, of their own.

    >>> in_group("decoder.layers.0.mlp.linear_fc1.bias", (8,), {"wd_mult": 0.0}, [], is_expert=False, is_apart=False)
    True
    """
    if is_apart and EXPERTS in group and bool(group[EXPERTS]) != is_expert:
        return False
    if any(other.get(_OWN_RATE) for other in groups):
        has_own_rate = name.startswith("embedding.") or name == _OUTPUT
        if bool(group.get(_OWN_RATE)) != has_own_rate:
            return False
    decays = len(shape) > 1 and not name.endswith(".bias")
    return bool(group.get("wd_mult", 1.0)) == decays
