"""The mesh that a conversion is for, as its arguments say it: sizes of the known axes, or all axes in a text."""

from __future__ import annotations

from ckpt_tool.errors import LayoutError, UsageError
from ckpt_tool.layout.mesh import Mesh, default_mesh, parse_mesh
from ckpt_tool.layout.place import AXES
from ckpt_tool.sizes import counted

__all__ = ["DATA_AXES", "asked_mesh", "data_size", "mesh_of"]

DATA_AXES = frozenset({"dp", "edp", "dp_replicate", "dp_shard", "fsdp", "cp"})
"""Axes whose ranks hold the same model-parallel part."""


def asked_mesh(text: str | None, *, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1) -> Mesh:
    """The mesh of all axes in a text, or that of the sizes.

    Raises:
        UsageError: a text that cannot be read, an axis that means nothing, sizes that do not go together.
    """
    try:
        mesh = parse_mesh(text) if text is not None else default_mesh(tp=tp, pp=pp, dp=dp, ep=ep)
    except LayoutError as error:
        raise UsageError(error.message, where=error.where, hint=error.hint) from None
    for axis in mesh.axes:
        if axis not in AXES:
            raise UsageError(f"mesh {mesh} has an axis {axis!r}", hint=f"known are {', '.join(sorted(AXES))}")
    return mesh


def mesh_of(
    text: str | None, to: str, *, tp: int, pp: int, dp: int, ep: int, etp: int | None
) -> tuple[Mesh, tuple[int, int] | None]:
    """The mesh, and how experts are spread over its ranks where that is no axis: ``(ep, etp)``.

    Args:
        text: all axes in rank order, instead of the sizes.
        to: name of the target format.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        dp: data-parallel ranks.
        ep: expert-parallel ranks.
        etp: tensor-parallel ranks of experts, for a target of Megatron; None for as many as of the rest.

    Raises:
        UsageError: sizes beside a text, ``etp`` for another target than Megatron's, axes that do not go together, or
            ranks that are no multiple of those that experts need.
    """
    if text is not None:
        if (tp, pp, dp, ep, etp) != (1, 1, 1, 1, None):
            raise UsageError(
                "--mesh already names the sizes of all axes", hint="leave out --tp, --pp, --dp, --ep and --etp"
            )
        return asked_mesh(text), None
    if etp is None:
        return asked_mesh(None, tp=tp, pp=pp, dp=dp, ep=ep), None
    if not to.startswith("megatron"):
        raise UsageError("experts of their own tensor-parallel size are Megatron's alone", hint="leave out --etp")
    if tp * dp % (ep * etp):
        raise UsageError(
            f"a stage has {counted(tp * dp, 'rank')} (tp={tp}, dp={dp}), experts need a multiple of {ep * etp:,} "
            f"(ep={ep}, etp={etp})",
            hint=f"use --dp {ep * etp}",
        )
    return asked_mesh(None, tp=tp, pp=pp, dp=dp), (ep, etp)


def data_size(mesh: Mesh) -> int:
    """Number of data-parallel ranks: those that read different data."""
    size = 1
    for axis, n in zip(mesh.axes, mesh.sizes, strict=True):
        if (axis in DATA_AXES and axis != "cp") or axis == "ep":
            size *= n
    return size
