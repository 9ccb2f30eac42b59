"""A part is a box of a global tensor together with the live memory on this rank that holds it.

A leaf is one tensor of a state dict, whatever class it has, as its parts. Nothing is copied: a part's view shares the
memory of the tensor that the framework holds, so that writing into the view changes the model. Knows no checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from ckpt_tool.dtypes import DType
from ckpt_tool.dtypes import dtype as dtype_named
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.frameworks import dtensor, megatron, sharded_tensor
from ckpt_tool.frameworks.wrapped import with_memory
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.records import dataclass

__all__ = ["Leaf", "Part", "megatron_leaf", "tensor_leaf"]

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank holds of a tensor, one box of it."""

    box: Box
    """In global coordinates; may be empty."""
    view: torch.Tensor
    """The elements of the box, of its sizes, with any strides; shares memory with the live tensor."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a state dict."""

    path: KeyPath
    dtype: DType
    shape: tuple[int, ...]
    """Global shape."""
    parts: tuple[Part, ...]
    """Boxes held here; none on a rank outside of the tensor's mesh."""
    fqn: str
    """Keys joined by dots, as DCP names flattened entries."""
    may_differ: bool = False
    """Whether the saved tensor may be longer or shorter, of which what both have is loaded (a padded vocabulary)."""


def tensor_leaf(path: KeyPath, value: object, known: dtensor.Known) -> Leaf | None:
    """``value`` as a leaf, None when it is no tensor of any known class. Costs no copy and no communication.

    A plain tensor, parameter or buffer is held whole by every rank that has it. To be called without gradients.

    Args:
        path: where the value lies in its state.
        value: anything.
        known: empty, or what calls for other tensors of the state have left in it.

    Raises:
        Unsupported: a tensor that holds no plain strided memory of its own (sparse, nested, quantized, meta, freed), or
            whose placement says that its value is still to be reduced.
        LayoutError: the local tensor is not of the size that its placement gives this rank.
    """
    fqn = ".".join(map(str, path))
    if type(value) in _PLAIN_TYPES and isinstance(value, torch.Tensor):
        shape, kind = _lengths(value, fqn), value.dtype
        held = [(Box.whole(shape), value)]
    elif dtensor.is_dtensor(value):
        shape, kind = dtensor.shape_and_dtype(value)
        held = dtensor.parts_of(value, where=fqn, known=known)
    elif sharded_tensor.is_sharded_tensor(value):
        shape, kind = sharded_tensor.shape_and_dtype(value)
        held = sharded_tensor.parts_of(value)
    elif isinstance(value, torch.Tensor):
        shape, kind = _lengths(value, fqn), value.dtype
        held = [(Box.whole(shape), value)]
    else:
        return None
    parts = tuple([Part(box, _plain(view, fqn)) for box, view in held])
    return Leaf(path, _dtype_of(kind), shape, parts, fqn)


def megatron_leaf(values: Sequence[Any]) -> Leaf:
    """One tensor of a Megatron state: all that the wrappers of one key hold of it. Costs no copy.

    Raises:
        Unsupported: as `tensor_leaf`, or a wrapper without a tensor.
        LayoutError: the wrappers of the key do not agree.
    """
    first = values[0]
    shape, kind, key = tuple(first.global_shape), first.dtype, str(first.key)
    for value in values[1:]:
        if (tuple(value.global_shape), value.dtype) != (shape, kind):
            raise LayoutError(
                f"two parts of this tensor do not agree: {kind} {list(shape)}, and {value.dtype} "
                f"{list(value.global_shape)}",
                where=key,
            )
    parts = [Part(box, _plain(view, key)) for value in values for box, view in megatron.parts_of(value)]
    may_differ = bool(getattr(first, "allow_shape_mismatch", False))
    return Leaf((key,), _dtype_of(kind), shape, tuple(parts), key, may_differ)


def _lengths(value: torch.Tensor, where: str) -> tuple[int, ...]:
    """The shape of a tensor that has one."""
    try:
        return tuple(value.shape)
    except RuntimeError as error:  # torch's own says neither which tensor it is nor what to do
        if value.is_nested:
            kind, hint = "nested", "unbind() gives the tensors in it, values() of a jagged one all their elements"
        else:
            kind, hint = "lazy", "its module makes it at the first forward: run one before"
        raise Unsupported(f"a {kind} tensor has no shape", where=where, hint=hint) from error


@lru_cache(maxsize=64)
def _dtype_of(kind: torch.dtype) -> DType:
    return dtype_named(str(kind))


def _plain(view: torch.Tensor, where: str) -> torch.Tensor:
    """``view`` without its history, after a look at what kind of memory it has."""
    view = with_memory(view, where)
    kind, hint = "", None
    if view.device.type == "meta":
        kind, hint = "meta", "give it memory with to_empty(device=...)"
    elif view.layout != torch.strided:
        kind, hint = str(view.layout).removeprefix("torch."), "to_dense() gives one that has"
    elif view.is_quantized:
        kind, hint = "quantized", "dequantize() gives one that has, int_repr() its numbers"
    elif view.is_neg():
        kind, hint = "negated", "resolve_neg() gives one that has"
    if kind:
        raise Unsupported(f"a {kind} tensor has no memory of plain elements", where=where, hint=hint)
    return view.detach()
