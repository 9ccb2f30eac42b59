"""Element types that a target format lacks: all of them at once, and what can be done about these."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import Unsupported
from ckpt_tool.manifest.tables import SECTIONS, TensorTable
from ckpt_tool.sizes import counted

__all__ = ["check_types"]


def check_types(
    tensors: TensorTable, lacks: str, has: Callable[[DType, tuple[int, ...]], bool], *, other: str | None = None
) -> None:
    """Nothing, when the format has elements of all types.

    Args:
        tensors: what is to be written.
        lacks: what the message says before the list, such as "zarr has no elements of".
        has: whether the format has a type, at a shape.
        other: a format that has all types of torch, where there is one to choose.

    Raises:
        Unsupported: it has not. The message names each type with a tensor of it, the hint what goes on: only floating
            weights are ever cast.
    """
    found: dict[str, tuple[DType, str]] = {}
    n_refused, are_cast = 0, True
    for row, kind in enumerate(tensors.dtypes):
        if has(kind, tensors.shape_of(row)):
            continue
        n_refused += 1
        found.setdefault(kind.name, (kind, tensors.fqns[row]))
        are_cast &= kind.is_castable and SECTIONS[tensors.section[row]] == "model"
    if not found:
        return
    listed = ", ".join(f"{name} ({fqn!r})" for name, (_, fqn) in found.items())
    raise Unsupported(
        f"{lacks} {listed}; {counted(n_refused, 'tensor')} in all", hint=_hint(found, other, are_cast=are_cast)
    )


def _hint(found: Mapping[str, tuple[DType, str]], other: str | None, *, are_cast: bool) -> str:
    ways = ["leave them out with " + " ".join(f"--exclude dtype:{name}" for name in found)]
    if are_cast:
        ways.insert(0, "cast them with --dtype fp32")
    kinds = [kind for kind, _ in found.values()]
    if other is not None and all(kind.kind not in {"quantized", "opaque"} for kind in kinds):
        ways.append(f"choose --to {other}")
    elif all(kind.safetensors is not None for kind in kinds):  # from a header, and back into one
        ways.append("choose what keeps types that it does not know: --to safetensors of export, rank-files of reshard")
    return ", or ".join(ways)
