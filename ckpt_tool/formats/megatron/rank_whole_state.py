"""Optimizer state of per-rank files without the distributed optimizer: torch's own state, by numbers of parameters.

Numbers run through the parameter groups. A group has its parameters in the order of the model's, those that decay in
one, biases and vectors in another (``wd_mult``); fp32 masters stand beside, group by group. That reading counts only
when every shape fits. Source: Megatron-LM ``optimizer/optimizer.py``, ``Float16OptimizerWithFloat16Params``, and
``optimizer/__init__.py``, ``_get_param_groups``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats.megatron.parameter_groups import in_group, inner_optimizer
from ckpt_tool.formats.megatron.rank_model import Member
from ckpt_tool.sizes import counted

__all__ = ["HALF_WIDTHS", "has_whole_state", "whole_states", "without_whole_state"]

HALF_WIDTHS = ("bfloat16", "float16")
"""Element types of weights that have a master."""
_MASTERS = ("fp32_from_fp16_params", "fp32_params")
_STATE = "state"


def has_whole_state(optimizer: Any) -> bool:
    """Whether an ``optimizer`` entry of a model file holds state itself."""
    if isinstance(optimizer, list):
        return any(has_whole_state(one) for one in optimizer)
    return bool(inner_optimizer(optimizer).get(_STATE))


def without_whole_state(optimizer: Any) -> Any:
    """The entry without its tensors: groups with hyperparameters, and the step that all parameters share."""
    if isinstance(optimizer, list):
        return [without_whole_state(one) for one in optimizer]
    if not isinstance(optimizer, Mapping):
        return optimizer
    kept = {key: value for key, value in optimizer.items() if key not in _MASTERS}
    if isinstance(kept.get("optimizer"), Mapping):
        kept["optimizer"] = without_whole_state(kept["optimizer"])
    states = kept.pop(_STATE, None)
    first = next(iter(states.values()), None) if isinstance(states, Mapping) else None
    if isinstance(first, Mapping) and "step" in first:
        kept[_STATE] = {"common_step": first["step"]}
    return kept


def whole_states(
    optimizer: Any, members: Sequence[Member], *, is_apart: bool, where: str
) -> Iterator[tuple[Member, str, TensorRef]]:
    """The state of each parameter of a rank: the member, the slot, and the tensor.

    Args:
        optimizer: the entry of the model file; a list holds dense and expert parameters' optimizers.
        members: tensors of all model chunks of the rank, in the order of the file.
        is_apart: whether experts have an optimizer of their own.
        where: names the file in messages.

    Raises:
        LayoutError: numbers and shapes do not fit the model's parameters.
    """
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    for number, one in enumerate(several):
        own = [m for m in members if m.cut != "buffer" and (len(several) == 1 or m.is_expert == (number == 1))]
        inner = inner_optimizer(one)
        groups, states = inner.get("param_groups"), inner.get(_STATE)
        if not isinstance(groups, list) or not isinstance(states, Mapping):
            raise LayoutError("the optimizer's entry has no param_groups or no state", where=where)
        masters: list[Any] = next((one[name] for name in _MASTERS if isinstance(one.get(name), list)), [])
        if not all(isinstance(group, Mapping) for group in groups):
            raise LayoutError("a parameter group is no dict", where=where)
        for position, group in enumerate(groups):
            numbers = group.get("params", ())
            chosen = [
                m
                for m in own
                if in_group(m.name, m.tensor.shape, group, groups, is_expert=m.is_expert, is_apart=is_apart)
            ]
            of_group = masters[position] if position < len(masters) else []
            halves = [number for number, m in enumerate(chosen) if m.tensor.dtype.name in HALF_WIDTHS]
            owners = range(len(chosen)) if len(of_group) == len(chosen) else halves
            if len(chosen) != len(numbers) or (of_group and len(of_group) != len(owners)):
                raise LayoutError(
                    f"parameter group {position} has {counted(len(numbers), 'parameter')}, {len(chosen):,} of the "
                    "model fit it",
                    where=where,
                )
            master = dict(zip(owners, of_group, strict=bool(of_group)))
            for index, (member, key) in enumerate(zip(chosen, numbers, strict=True)):
                slots = {"param": master.get(index), **states.get(key, {})}
                for slot, tensor in slots.items():
                    if slot == "step" or not isinstance(tensor, TensorRef):
                        continue
                    if tensor.shape != member.tensor.shape:
                        raise LayoutError(
                            f"{slot} of parameter {key} is {list(tensor.shape)}, {member.name!r} is "
                            f"{list(member.tensor.shape)}",
                            where=where,
                        )
                    yield member, slot, tensor
