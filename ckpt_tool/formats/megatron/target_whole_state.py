"""An optimizer's entry in a rank's file without the distributed optimizer: groups with numbers, and state by number.

The inverse of ``rank_whole_state``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._torch_file.written import Storage, fresh_tensor
from ckpt_tool.formats.megatron.parameter_groups import in_group, inner_optimizer, own_groups
from ckpt_tool.formats.megatron.rank_rows import ParameterState
from ckpt_tool.formats.megatron.target_common import COMMON_STEP
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.sizes import counted

__all__ = ["with_states"]

_MASTER = "param"


def with_states(
    entry: Any, states: Sequence[ParameterState], tensors: TensorTable, held: list[Storage], *, is_apart: bool
) -> Any:
    """The entry with the state of a rank's parameters; their storages are appended to ``held``.

    Args:
        entry: from ``target_optimizer.combined``: one optimizer's groups, or a list for dense and expert parameters.
        states: of the rank's parameters, in the order of registration.
        tensors: of the request.
        held: storages of the rank's file.
        is_apart: whether experts have an optimizer of their own.

    Raises:
        LayoutError: the groups do not say to which of them a parameter belongs.
    """
    if not isinstance(entry, list):
        return _with_states(entry, states, tensors, held, is_apart=is_apart)
    return [
        _with_states(part, [s for s in states if s.held.is_expert == bool(n)], tensors, held, is_apart=is_apart)
        for n, part in enumerate(entry)
    ]


def _with_states(
    part: dict[str, Any],
    states: Sequence[ParameterState],
    tensors: TensorTable,
    held: list[Storage],
    *,
    is_apart: bool,
) -> dict[str, Any]:
    groups, inner = own_groups(part), inner_optimizer(part)
    step = (inner.get("state") or {}).get(COMMON_STEP)
    numbered: dict[int, dict[str, Any]] = {}
    masters: list[list[TensorRef]] = []
    filled: list[dict[str, Any]] = []

    def tensor(state: ParameterState, slot: str) -> TensorRef:
        row, storage = state.slots[slot]
        held.append(storage)
        shape = tensors.shape_of(row) if slot == "step" else state.held.shape
        return fresh_tensor(len(held) - 1, tensors.dtypes[row], shape)

    for group in groups:
        chosen = [
            state
            for state in states
            if in_group(
                state.held.name, state.held.shape, group, groups, is_expert=state.held.is_expert, is_apart=is_apart
            )
        ]
        first = len(numbered)
        for number, state in enumerate(chosen, start=first):
            numbered[number] = {slot: tensor(state, slot) for slot in state.slots if slot != _MASTER}
            if step is not None and not isinstance(step, TensorRef):
                numbered[number]["step"] = step
        masters.append([tensor(state, _MASTER) for state in chosen if _MASTER in state.slots])
        filled.append({**group, "params": list(range(first, len(numbered)))})
    if len(numbered) != len(states):
        raise LayoutError(
            f"the optimizer's {counted(len(groups), 'parameter group', 'fit')} {len(numbered):,} of a rank's "
            f"{len(states):,} parameters, by wd_mult, is_expert_parallel and is_decoupled_lr",
            hint="write the weights alone: --include 'model.*'",
        )
    own = {**inner, "state": numbered, "param_groups": filled}
    if inner is part:
        return own
    return {**part, "optimizer": own, "fp32_from_fp16_params": masters}
