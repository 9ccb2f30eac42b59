"""Options that only some targets have: given for another target they are refused, never passed over."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tool.errors import UsageError
from ckpt_tool.formats.base import ArrangingWriter, PlacingWriter, Writer
from ckpt_tool.layout.mesh import Mesh
from ckpt_tool.sizes import counted

__all__ = ["check_target_options"]

_WHOLE_FORMATS = frozenset({"safetensors", "torch-save", "npz", "lightning", "gguf", "nanotron", "deepspeed-universal"})
_OF_TARGETS: dict[str, tuple[str, str]] = {
    "zero_stage": ("deepspeed", "has no stages of ZeRO"),
    "config": ("megatron", "takes no config.json of a model"),
    "arguments": ("megatron", "keeps no arguments of a Megatron run"),
    "mcore_version": ("megatron", "is not written for a version of megatron-core"),
    "sidecar": ("dcp", "has no metadata as Arrow columns"),
}
"""The target that has an option, by its name or what that begins with, and what is said of the others."""
_FLAGS = {"arguments": "--arg"}
_OF_STAGES = ("first_stage_layers", "last_stage_layers", "vpp")


def check_target_options(
    to: str, writer: Writer, mesh: Mesh, *, names: str, rank_state: str | None, given: Mapping[str, object]
) -> None:
    """Nothing, when the target has what the options ask for.

    Args:
        to: the format as it was asked for.
        writer: what writes it.
        mesh: of the target.
        names: whose names it gets.
        rank_state: what to do with states of single ranks.
        given: other options by their names; those that are None, false or empty were not given.

    Raises:
        UsageError: it has not.
    """
    if writer.name in _WHOLE_FORMATS and mesh.world_size > 1:
        raise UsageError(
            f"{to} holds whole tensors, not the parts of {counted(mesh.world_size, 'rank')}",
            hint="use --to dcp or --to rank-files, or ckpt export for whole tensors",
        )
    has_own_names = isinstance(writer, PlacingWriter | ArrangingWriter)
    if has_own_names and names != "source" and not (names == "hf" and isinstance(writer, ArrangingWriter)):
        raise UsageError(f"{to} has names of its own", hint="leave out --names")
    if rank_state == "emit" and not writer.name.startswith("megatron"):
        raise UsageError("random states are made for targets of Megatron alone", hint="leave out --rng emit")
    for option, (target, why_not) in _OF_TARGETS.items():
        if given.get(option) and not writer.name.startswith(target):
            raise UsageError(f"{to} {why_not}", hint=f"leave out {_flag(option)}, or write --to {target}")
    if dict(zip(mesh.axes, mesh.sizes, strict=True)).get("pp", 1) == 1:
        for option in _OF_STAGES:
            if given.get(option) is not None:
                flag = _flag(option)
                raise UsageError(
                    f"{flag} is about pipeline stages, and there is one", hint=f"add --pp N, or leave out {flag}"
                )


def _flag(option: str) -> str:
    return _FLAGS.get(option, f"--{option.replace('_', '-')}")
