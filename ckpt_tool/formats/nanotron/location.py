"""Which files of a folder are nanotron's, by their names: a run with its tracker, or one step."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_tool.formats.base import Source
from ckpt_tool.geometry.absent import absent_places
from ckpt_tool.numerals import numeral
from ckpt_tool.records import dataclass

__all__ = [
    "METADATA",
    "ONE_RANK",
    "ModelFile",
    "OptimizerFile",
    "lacking_files",
    "model_file",
    "optimizer_file",
    "step_folder",
]

METADATA = "checkpoint_metadata.json"
ONE_RANK = "_pp-rank-0-of-1_tp-rank-0-of-1"
"""In the name of a file with all of a parameter that tensor-parallel ranks cut."""
_TRACKER = "latest.txt"
_MAX_TRACKER_NBYTES = 64
_N = numeral()
_RANKS = rf"_pp-rank-(?P<pp>{_N})-of-{_N}_tp-rank-(?P<tp>{_N})-of-{_N}(?:_exp-rank-(?P<exp>{_N})-of-{_N})?"
_MODEL = re.compile(rf"model/(?P<module>.+)/model_(?P<leaf>(?:(?!_pp-rank-)[^/])+)(?:{_RANKS})?\.safetensors")
_OPTIMIZER = re.compile(
    rf"optimizer/optimizer_pp-(?P<pp>{_N})-of-(?P<n_pp>{_N})(?:_dp-(?P<dp>{_N})-of-(?P<n_dp>{_N}))?"
    rf"_tp-(?P<tp>{_N})-of-(?P<n_tp>{_N})(?:_exp-(?P<exp>{_N})-of-{_N})?\.pt"
)

_RANK = re.compile(rf"(?<=_)(?P<axis>dp|tp|exp|tp-rank|exp-rank|pp)-(?P<rank>{_N})-of-(?P<n>{_N})")
"""A rank in a name, of an axis along which all ranks have a file; a parameter is of one pipeline stage."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One parameter, or one rank's part of it."""

    path: str
    name: str
    ranks: tuple[int, int, int] | None
    """Pipeline, tensor and expert rank; None for a parameter that all ranks have."""


@dataclass(frozen=True, slots=True)
class OptimizerFile:
    """The optimizer's state of one rank."""

    path: str
    pp: int
    dp: int | None
    """None where data-parallel ranks hold the same."""
    tp: int
    exp: int
    n_dp: int
    n_tp: int


def model_file(path: str) -> ModelFile | None:
    """What a path says, None when it is no parameter's.

    >>> found = model_file("model/model/norm/pp_block/model_weight.safetensors")
    >>> found.name, found.ranks
    ('model.norm.pp_block.weight', None)
    """
    match = _MODEL.fullmatch(path)
    if match is None:
        return None
    ranks = None if match["tp"] is None else (int(match["pp"]), int(match["tp"]), int(match["exp"] or 0))
    return ModelFile(path, f"{match['module'].replace('/', '.')}.{match['leaf']}", ranks)


def optimizer_file(path: str) -> OptimizerFile | None:
    """What a path says, None when it is no optimizer's."""
    match = _OPTIMIZER.fullmatch(path)
    if match is None:
        return None
    dp = None if match["dp"] is None else int(match["dp"])
    numbers = (int(match["tp"]), int(match["exp"] or 0), int(match["n_dp"] or 1), int(match["n_tp"]))
    return OptimizerFile(path, int(match["pp"]), dp, *numbers)


def lacking_files(paths: Iterable[str]) -> list[str]:
    """Files of ranks that the names of others tell of.

    >>> lacking_files(["model/a/model_w_pp-rank-0-of-2_tp-rank-1-of-2.safetensors"])
    ['model/a/model_w_pp-rank-0-of-2_tp-rank-0-of-2.safetensors']
    """
    grids: dict[tuple[str, tuple[int, ...]], set[tuple[int, ...]]] = {}
    for path in paths:
        if "{" not in path and (model_file(path) or optimizer_file(path)):
            axes = list(_RANK.finditer(path))
            grid = (_RANK.sub(r"\g<axis>-{}-of-\g<n>", path), tuple(int(found["n"]) for found in axes))
            grids.setdefault(grid, set()).add(tuple(int(found["rank"]) for found in axes))
    return [
        text.format(*ranks)
        for (text, sizes), present in sorted(grids.items())
        for ranks in absent_places(present, sizes).first
    ]


def step_folder(source: Source) -> str | None:
    """The folder of the step: ``""`` for the root itself, else the one that the tracker names; None for another format.

    One small request where there is a tracker.
    """
    sizes = source.listing.sizes
    if source.listing.entry is not None:
        return None
    if METADATA in sizes and _has_model(sizes, ""):
        return ""
    if not 0 < sizes.get(_TRACKER, 0) <= _MAX_TRACKER_NBYTES:
        return None
    step = source.read_whole(_TRACKER).decode(errors="replace").strip()
    return step if step.isdecimal() and f"{step}/{METADATA}" in sizes and _has_model(sizes, f"{step}/") else None


def _has_model(paths: Iterable[str], prefix: str) -> bool:
    return any(path.startswith(f"{prefix}model/") and path.endswith(".safetensors") for path in paths)
