"""Optimizer state of per-rank files: ``distrib_optim.pt``, flat buffers gathered over data-parallel ranks.

A buffer has its parameters in reverse order of the model's state dict, and the weights' own places in their shared
storage tell where each began in memory; what is stored lacks the padding between buckets. Source: Megatron-LM
``optimizer/distrib_optimizer.py``, ``get_parameter_state_dp_zero``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import FormatError, LayoutError
from ckpt_tool.formats._pickle.nodes import Global
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats.megatron.buckets import BucketEnds, coalesced_starts
from ckpt_tool.formats.megatron.parallel import view
from ckpt_tool.formats.megatron.rank_model import Member
from ckpt_tool.sizes import counted

__all__ = ["buffers_of", "states_of", "stored_buffers"]

Buffer = tuple[int, str, Mapping[str, TensorRef], int]
"""Model chunk, element type of the weights, flat state by slot, number of elements."""
_NUMEL = "numel_unpadded"


def stored_buffers(state: Any, n_chunks: int, where: str) -> list[Buffer]:
    """The buffers in one optimizer's state, in order.

    Raises:
        FormatError: not the layout of Megatron-LM since 2023, or the numbers contradict each other.
    """
    if not isinstance(state, Mapping) or not state.get("buckets_coalesced"):
        raise FormatError(
            "expected optimizer state with 'buckets_coalesced', as Megatron-LM writes it since 2023",
            where=where,
            hint="convert it once with that Megatron-LM: --ckpt-convert-update-legacy-dist-opt-format",
        )
    numbered = sorted(key for key in state if type(key) is int)
    if len(numbered) % n_chunks:
        raise FormatError(f"{counted(len(numbered), 'buffer')} of {counted(n_chunks, 'model chunk')}", where=where)
    found: list[Buffer] = []
    for position, number in enumerate(numbered):
        chunk = position * n_chunks // len(numbered)
        for dtypes, slots in state[number].items():
            total = slots.get(_NUMEL)
            flat = {slot: tensor for slot, tensor in slots.items() if isinstance(tensor, TensorRef)}
            if type(total) is not int or not flat or any(tensor.shape != (total,) for tensor in flat.values()):
                raise FormatError(f"buffer {number}: has tensors of other sizes than {total}", where=where)
            found.append((chunk, _dtype_name(dtypes), flat, total))
    return found


def buffers_of(members: Sequence[Member], dtype: str, *, experts: bool | None) -> list[Member]:
    """Parameters of one buffer, in its order; ``experts`` None for dense and experts' together."""
    return [
        member
        for member in reversed(members)
        if member.cut != "buffer"
        and member.tensor.dtype.name == dtype
        and (experts is None or member.is_expert == experts)
    ]


def states_of(
    members: Sequence[Member], flat: Mapping[str, TensorRef], total: int, ends: BucketEnds, where: str
) -> Iterator[tuple[Member, str, TensorRef]]:
    """The state of each parameter: the member, the slot, and the part of the flat buffer, in the member's shape.

    Raises:
        LayoutError: sizes and places do not tell where each parameter lies.
    """
    storages = {member.tensor.storage.key for member in members}
    starts_in_memory = [member.tensor.offset for member in members] if len(storages) == 1 else None
    numels = [member.tensor.numel for member in members]
    apart = [number for number, member in enumerate(members) if member.is_shared]
    try:
        starts = coalesced_starts(numels, total, ends, starts_in_memory, apart)
    except LayoutError as error:
        raise LayoutError(error.message, where=where) from None
    if starts is None:
        raise LayoutError(
            f"no split into buckets gives the {counted(total, 'element')} that are stored, of "
            f"{counted(len(members), 'parameter')} with {sum(numels):,}",
            where=where,
        )
    for member, start in zip(members, starts, strict=True):
        for slot, tensor in flat.items():
            yield member, slot, view(tensor, start, member.tensor.shape)


def _dtype_name(dtypes: Any) -> str:
    """The weights' element type, of the pair of it and the gradients'."""
    first = dtypes[0] if isinstance(dtypes, tuple) and dtypes else dtypes
    if isinstance(first, DType):
        return first.name
    return first.last if isinstance(first, Global) else str(first)
