"""A tag folder is one saved step; its file names say which rank of which axis wrote what.

Names are those of ``deepspeed/runtime/engine.py`` and ``pipe/module.py`` (0.5 to 0.19; before, there was no underscore
in ``mp_rank_00optim_states``). ``pp_rank`` in the name of an optimizer file is the *data-parallel* rank; ``mp_rank``
counts pipeline stages times tensor-parallel ranks, stage first.
Only names are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ckpt_tool.geometry.absent import absent_places
from ckpt_tool.numerals import numeral
from ckpt_tool.records import dataclass
from ckpt_tool.storage.store import Listing

__all__ = [
    "LATEST",
    "LATEST_UNIVERSAL",
    "ExpertFile",
    "LayerFile",
    "ModelFile",
    "OptimFile",
    "TagFiles",
    "tag_files",
    "tags_below",
    "what_file",
]

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
_MAX_EXPERTS = 4096
"""As many names of absent experts of a layer are listed at most: their number is as the input says."""

_N, _N2 = numeral(most=7), numeral(2, most=7)
_MODEL = re.compile(rf"(?:zero_pp_rank_(?P<dp>{_N})_)?mp_rank_(?P<mp>{_N2})_model_states\.pt")
_OPTIM = re.compile(
    rf"(?P<prefix>bf16_|fp16_)?zero_pp_rank_(?P<dp>{_N})_mp_rank_(?P<mp>{_N2})(?P<tail>_?optim_states\.pt)"
)
_LAYER = re.compile(rf"layer_(?P<layer>{_N2})-(?:model_(?P<tp>{_N2})-)?model_states\.pt")
_EXPERT = re.compile(rf"(?:layer_(?P<layer>{_N})_)?expert_(?P<expert>{_N})_mp_rank_(?P<mp>{_N2})_model_states\.pt")
_EXPERT_OPTIM = re.compile(rf"expp_rank_{_N}_mp_rank_{_N2}_optim_states\.pt")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """``mp_rank_00_model_states.pt`` (stages 0 to 2), ``zero_pp_rank_0_mp_rank_00_model_states.pt`` (stage 3)."""

    path: str
    mp: int
    dp: int | None
    """None where the file is that of all data-parallel ranks."""


@dataclass(frozen=True, slots=True)
class OptimFile:
    """``[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt``: one data-parallel rank's partition."""

    path: str
    mp: int
    dp: int


@dataclass(frozen=True, slots=True)
class LayerFile:
    """``layer_03-model_00-model_states.pt``: one layer of a pipeline."""

    path: str
    layer: int
    tp: int | None


@dataclass(frozen=True, slots=True)
class ExpertFile:
    """``layer_0_expert_2_mp_rank_00_model_states.pt``: one expert, by its global number."""

    path: str
    mp: int
    layer: int
    """Number among the layers with experts."""
    expert: int


@dataclass(frozen=True, slots=True)
class TagFiles:
    """The files of one tag folder, each kind sorted by its numbers."""

    folder: str
    """Path of the folder with a slash behind it, empty for the root."""
    models: tuple[ModelFile, ...]
    optims: tuple[OptimFile, ...]
    layers: tuple[LayerFile, ...]
    experts: tuple[ExpertFile, ...]
    expert_optims: tuple[str, ...]
    """Optimizer states of experts without ZeRO."""
    offloaded: tuple[str, ...]
    """Swap files of states that were on NVMe."""

    @property
    def is_any(self) -> bool:
        """Whether there is a file that only DeepSpeed names so."""
        return bool(self.models or self.optims)

    @property
    def mp_ranks(self) -> tuple[int, ...]:
        """Model-parallel ranks that have a file, sorted."""
        return tuple(sorted({file.mp for file in self.models} | {file.mp for file in self.optims}))

    def missing_optims(self, dp_world_size: int, mp_world_size: int) -> list[str]:
        """Paths of partitions that should be there; none when no optimizer was saved at all."""
        if not self.optims:
            return []
        known = {(file.mp, file.dp) for file in self.optims}
        sample = _OPTIM.fullmatch(self.optims[0].path.rpartition("/")[2])
        prefix, tail = (sample["prefix"] or "", sample["tail"]) if sample else ("", "_optim_states.pt")
        return [
            f"{self.folder}{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}{tail}"
            for mp, dp in absent_places(known, (mp_world_size, dp_world_size)).first
        ]

    def missing_models(self, dp_world_size: int, mp_world_size: int) -> list[str]:
        """Paths of model files that should be there, given how the present ones are named."""
        is_split = any(file.dp is not None for file in self.models)
        return self.model_paths(dp_world_size, mp_world_size, is_split=is_split)

    def model_paths(self, dp_world_size: int, mp_world_size: int, *, is_split: bool) -> list[str]:
        """The same where it is known whether each data-parallel rank has a file of its own."""
        known = {(file.mp, file.dp or 0) for file in self.models if is_split == (file.dp is not None)}
        return [
            f"{self.folder}{f'zero_pp_rank_{dp}_' if is_split else ''}mp_rank_{mp:02d}_model_states.pt"
            for mp, dp in absent_places(known, (mp_world_size, dp_world_size if is_split else 1)).first
        ]

    def missing_layers(self, layers: Iterable[int], tp_world_size: int) -> list[str]:
        """Paths of files of these layers and of those that are there, of each tensor-parallel rank that writes its own.

        >>> tag_files(["layer_00-model_states.pt"], "").missing_layers([0, 2], 1)
        ['layer_02-model_states.pt']
        """
        is_cut = any(file.tp is not None for file in self.layers)
        known = {(file.layer, file.tp or 0) for file in self.layers}
        return [
            f"{self.folder}layer_{layer:02d}-{f'model_{tp:02d}-' if is_cut else ''}model_states.pt"
            for layer in sorted({*layers, *(layer for layer, _ in known)})
            for tp in range(tp_world_size if is_cut else 1)
            if (layer, tp) not in known
        ]

    def missing_experts(self, counts: Sequence[int]) -> list[str]:
        """Paths of files of experts, given how many each layer has; of each model-parallel rank that has some.

        >>> tag_files([f"layer_0_expert_{n}_mp_rank_00_model_states.pt" for n in (0, 2)], "").missing_experts([3])
        ['layer_0_expert_1_mp_rank_00_model_states.pt']
        """
        is_numbered = not any(file.path.startswith(f"{self.folder}expert_") for file in self.experts)
        ranks = sorted({file.mp for file in self.experts or self.models})
        known = {(file.layer, ranks.index(file.mp), file.expert) for file in self.experts}
        return [
            f"{self.folder}{f'layer_{layer}_' if is_numbered else ''}expert_{expert}_mp_rank_{ranks[at]:02d}"
            "_model_states.pt"
            for layer, count in enumerate(counts)
            for at, expert in absent_places(
                [(at, expert) for own, at, expert in known if own == layer], (len(ranks), count), at_most=_MAX_EXPERTS
            ).first
        ]


def tag_files(paths: Iterable[str], folder: str) -> TagFiles:
    """The files of DeepSpeed right below ``folder`` (with its slash) among ``paths``.

    >>> found = tag_files(["s/zero_pp_rank_10_mp_rank_01_optim_states.pt", "s/mp_rank_00_model_states.pt"], "s/")
    >>> found.optims[0].dp, found.optims[0].mp, found.models[0].dp
    (10, 1, None)
    """
    models, optims, layers, experts, expert_optims, offloaded = [], [], [], [], [], []
    for path in paths:
        if not path.startswith(folder):
            continue
        name = path[len(folder) :]
        if name.startswith("offloaded_tensors/"):
            offloaded.append(path)
        elif found := _MODEL.fullmatch(name):
            models.append(ModelFile(path, int(found["mp"]), None if found["dp"] is None else int(found["dp"])))
        elif found := _OPTIM.fullmatch(name):
            optims.append(OptimFile(path, int(found["mp"]), int(found["dp"])))
        elif found := _LAYER.fullmatch(name):
            layers.append(LayerFile(path, int(found["layer"]), None if found["tp"] is None else int(found["tp"])))
        elif found := _EXPERT.fullmatch(name):
            experts.append(ExpertFile(path, int(found["mp"]), int(found["layer"] or 0), int(found["expert"])))
        elif _EXPERT_OPTIM.fullmatch(name):
            expert_optims.append(path)
    return TagFiles(
        folder=folder,
        models=tuple(sorted(models, key=lambda file: (file.mp, -1 if file.dp is None else file.dp))),
        optims=tuple(sorted(optims, key=lambda file: (file.mp, file.dp))),
        layers=tuple(sorted(layers, key=lambda file: (file.layer, file.tp or 0))),
        experts=tuple(sorted(experts, key=lambda file: (file.layer, file.expert, file.mp))),
        expert_optims=tuple(sorted(expert_optims)),
        offloaded=tuple(offloaded),
    )


def tags_below(listing: Listing) -> tuple[str, ...]:
    """Folders right below the root that hold files of DeepSpeed."""
    found = {
        path.partition("/")[0]
        for path in listing.sizes
        if path.count("/") == 1
        and (_MODEL.fullmatch(path.partition("/")[2]) or _OPTIM.fullmatch(path.partition("/")[2]))
    }
    return tuple(sorted(found))


def what_file(name: str) -> str | None:
    """What one file of a tag folder holds, for messages; None when its name is not one of DeepSpeed's.

    >>> what_file("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt")
    'the optimizer partition of data-parallel rank 3, model-parallel rank 0'
    """
    if found := _OPTIM.fullmatch(name):
        return f"the optimizer partition of data-parallel rank {found['dp']}, model-parallel rank {int(found['mp'])}"
    if found := _MODEL.fullmatch(name):
        of = "" if found["dp"] is None else f"data-parallel rank {found['dp']}, "
        return f"the model state of {of}model-parallel rank {int(found['mp'])}"
    if found := _LAYER.fullmatch(name):
        return f"layer {int(found['layer'])} of a pipeline"
    if found := _EXPERT.fullmatch(name):
        return f"expert {found['expert']} of a mixture of experts"
    return "the optimizer state of some experts" if _EXPERT_OPTIM.fullmatch(name) else None
