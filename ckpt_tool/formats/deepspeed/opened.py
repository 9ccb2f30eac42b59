"""A checkpoint of DeepSpeed, opened: the fields of its files' pickles, checked for their types, and nothing decided.

Field names are those of DeepSpeed 0.3 to 0.19 (``runtime/engine.py``, ``zero/stage_1_and_2.py``, ``zero/stage3.py``,
``bf16_optimizer.py``). Enums, loss scalers and slice addresses are stand-ins; nothing is imported for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpt_tool.errors import FormatError, NotFound, Unsupported
from ckpt_tool.formats._json import read_json
from ckpt_tool.formats._pickle.nodes import Stub
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._torch_file.archive import TorchFile, open_torch_files
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.deepspeed.autoep import apart, packed_experts, paddings_apart
from ckpt_tool.formats.deepspeed.names import ExpertFile, LayerFile, ModelFile, TagFiles
from ckpt_tool.formats.deepspeed.ranks import tp_world_size_of, world_sizes
from ckpt_tool.formats.deepspeed.sharding import KNOWN_KEYS
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, some_of

__all__ = [
    "INFO_FILE",
    "INFO_KEY",
    "Checkpoint",
    "ModelState",
    "OptimState",
    "is_vector",
    "mapping",
    "number_of",
    "open_checkpoint",
    "open_models",
]

INFO_FILE = "universal_checkpoint_info.json"
INFO_KEY = "universal_checkpoint_info"
_MAX_NUMEL = 1 << 60
_MAX_LISTED = 1 << 16
Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelState:
    """One ``*_model_states.pt``."""

    file: TorchFile
    mp: int
    dp: int | None
    root: Mapping[str, Any]
    groups: tuple[Mapping[str, Shape], ...] | None
    """``param_shapes``: shapes by name in flat order, for each group (stage 3: sub-group); None without ZeRO."""
    buffers: frozenset[str]
    frozen: Mapping[str, Shape]
    fragments: Mapping[str, Any]
    """Stage 3: this rank's slice of each frozen parameter."""
    aliases: Mapping[str, str]
    """Second names of shared parameters."""


@dataclass(frozen=True)
class OptimState:
    """One ``*_optim_states.pt``."""

    file: TorchFile
    mp: int
    dp: int
    fields: Mapping[str, Any]
    """``optimizer_state_dict``."""
    stage: int
    fp32: tuple[TensorRef, ...]
    """Masters: one vector per group (stage 3: sub-group)."""
    states: tuple[Mapping[str, Any], ...]
    """Of each group: vectors and scalars by name."""
    param_groups: tuple[Mapping[str, Any], ...]
    partition_count: tuple[int, ...]
    """Per group; one entry at stage 3, none when the file does not tell."""
    paddings: tuple[tuple[int, ...], ...] | None
    """Padding behind each parameter of each group."""

    @property
    def is_per_parameter(self) -> bool:
        """Whether every parameter was cut by itself (stage 3)."""
        return self.stage == 3


@dataclass(frozen=True)
class Checkpoint:
    """All files of one tag folder."""

    files: TagFiles
    models: tuple[ModelState, ...]
    optims: tuple[OptimState, ...]
    layers: tuple[tuple[LayerFile, TorchFile], ...]
    experts: tuple[tuple[ExpertFile, TorchFile], ...]
    mp_world_size: int
    tp_world_size: int
    dp_world_size: int
    universal_info: object
    """The record of how tensor-parallel shards join, None where there is none."""
    universal_info_in: str

    @property
    def opened(self) -> list[TorchFile]:
        """Every file."""
        own = [*(state.file for state in self.models), *(state.file for state in self.optims)]
        return [*own, *(file for _, file in self.layers), *(file for _, file in self.experts)]

    @property
    def first(self) -> ModelState:
        """The model state of the lowest rank."""
        return self.models[0]

    @property
    def ds_config(self) -> Mapping[str, Any]:
        """The configuration of the run; empty where it was not saved."""
        found = self.first.root.get("ds_config")
        return found if isinstance(found, Mapping) else {}

    def model_of(self, mp: int) -> ModelState | None:
        """The model state of a model-parallel rank, that of its lowest data-parallel rank."""
        return next((state for state in self.models if state.mp == mp), None)

    def global_rank(self, mp: int, dp: int) -> int:
        """Axes are pipeline, data, tensor, the last one fastest (``runtime/pipe/topology.py``)."""
        stage, tp = divmod(mp, self.tp_world_size)
        return (stage * self.dp_world_size + dp) * self.tp_world_size + tp


def open_checkpoint(source: Source, files: TagFiles) -> Checkpoint:
    """All files opened: three requests each.

    Raises:
        NotFound: without a model state nothing tells the parameters' names.
        Unsupported: states that are not in these files, or a layout that cannot be read.
    """
    if files.offloaded:
        raise Unsupported(
            f"{counted(len(files.offloaded), 'file')} of states that were offloaded to NVMe: they are not in the "
            "checkpoint's own files",
            where=files.offloaded[0],
            hint="save again with offload_optimizer and offload_param device cpu or none",
        )
    models = open_models(source, files)
    optim_files = open_torch_files(source, [file.path for file in files.optims])
    optims = [_optim(opened, file.mp, file.dp) for file, opened in zip(files.optims, optim_files, strict=True)]
    _check_ranks(optims)
    layers = list(zip(files.layers, open_torch_files(source, [f.path for f in files.layers]), strict=True))
    experts = list(zip(files.experts, open_torch_files(source, [f.path for f in files.experts]), strict=True))
    root = models[0].root
    packed = packed_experts(root, models[0].file.path)
    if packed:
        models, optims = _experts_apart(models, optims, packed)
    counts = [count for state in optims for count in state.partition_count]
    mp_world_size, dp_world_size = world_sizes(files, root, models[0].file.path, counts)
    info, info_in = _universal_info(source, files, models)
    return Checkpoint(
        files=files,
        models=tuple(models),
        optims=tuple(optims),
        layers=tuple(layers),
        experts=tuple(experts),
        mp_world_size=mp_world_size,
        tp_world_size=tp_world_size_of(root, files, mp_world_size),
        dp_world_size=dp_world_size,
        universal_info=info,
        universal_info_in=info_in,
    )


def _experts_apart(
    models: Sequence[ModelState], optims: Sequence[OptimState], packed: Mapping[str, int]
) -> tuple[list[ModelState], list[OptimState]]:
    """The states with each expert's part of a tensor of several as a parameter."""
    names = [list(group) for group in models[0].groups or ()]
    parted = [
        replace(model, groups=tuple(apart(group, packed, model.file.path) for group in model.groups))
        if model.groups is not None
        else model
        for model in models
    ]
    padded = [
        replace(
            state,
            paddings=tuple(
                paddings_apart(padding, own, packed) for padding, own in zip(state.paddings, names, strict=False)
            ),
        )
        if state.paddings
        else state
        for state in optims
    ]
    return parted, padded


def _check_ranks(optims: Sequence[OptimState]) -> None:
    """Nothing, when each rank has one partition, and all are of one layout."""
    first: dict[tuple[int, int], OptimState] = {}
    for state in optims:
        other = first.setdefault((state.mp, state.dp), state)
        if other is not state:
            raise FormatError(
                f"a second partition of data-parallel rank {state.dp}, beside {other.file.path}",
                where=state.file.path,
                hint="files of two runs are mixed: move those of one away",
            )
        if state.is_per_parameter != optims[0].is_per_parameter:
            raise FormatError(
                f"a partition of stage {state.stage}, beside one of stage {optims[0].stage}", where=state.file.path
            )


def open_models(source: Source, files: TagFiles, only: Sequence[ModelFile] | None = None) -> list[ModelState]:
    """The model states, all or ``only`` some: three requests each.

    Raises:
        NotFound: there is none; it has the files that should be there.
    """
    if not files.models:
        expected = _absent_models(source, files)
        raise NotFound(
            f"no model states, which name the parameters; missing files: {some_of(expected, 4)}",
            where=source.listing.url,
            hint="fetch them too: they are small at stage 3 and hold the weights at stages 1 and 2",
            files=tuple(expected),
        )
    wanted = files.models if only is None else only
    opened = open_torch_files(source, [file.path for file in wanted])
    return [_model(found, file.mp, file.dp) for file, found in zip(wanted, opened, strict=True)]


def _absent_models(source: Source, files: TagFiles) -> list[str]:
    """Paths of model states where there is none: at stage 3, which one partition tells, each rank has its own.

    Where there is no partition, as in a universal checkpoint, the first rank's.
    """
    if not files.optims:
        return files.model_paths(1, 1, is_split=False)
    first = files.optims[0]
    state = _optim(open_torch_files(source, [first.path])[0], first.mp, first.dp)
    dp_world_size = max([1 + max(file.dp for file in files.optims), *state.partition_count])
    return files.model_paths(min(dp_world_size, _MAX_LISTED), max(files.mp_ranks) + 1, is_split=state.is_per_parameter)


def _universal_info(source: Source, files: TagFiles, models: Sequence[ModelState]) -> tuple[object, str]:
    """The record in the first file that has one; else a file of the user's beside them."""
    for model in models:
        if model.root.get(INFO_KEY):
            return model.root[INFO_KEY], model.file.path
    for path in (files.folder + INFO_FILE, INFO_FILE):
        if path in source.listing:
            return _own_rules(read_json(source, path), path), path
    return None, ""


def _own_rules(info: object, path: str) -> object:
    """A file of the user's, whose rules must be known ones: a misspelt one would leave shards joined as by default.

    Raises:
        FormatError: a rule that is none.
    """
    strange = [str(key) for key in info if key not in KNOWN_KEYS] if isinstance(info, Mapping) else []
    if strange:
        known = ", ".join(KNOWN_KEYS)
        raise FormatError(f"{strange[0]!r} is no rule of a {INFO_KEY}", where=path, hint=f"known are {known}")
    return info


def _model(file: TorchFile, mp: int, dp: int | None) -> ModelState:
    root = mapping(file.root, "the saved object", file.path)
    groups = root.get("param_shapes")
    if groups is not None and not isinstance(groups, (list, tuple)):
        groups = [groups]  # one dict, before groups were told apart
    return ModelState(
        file=file,
        mp=mp,
        dp=dp,
        root=root,
        groups=None if groups is None else tuple(_shapes(group, "param_shapes", file.path) for group in groups),
        buffers=frozenset(map(str, _listed(root.get("buffer_names"), "buffer_names", file.path))),
        frozen=_shapes(root.get("frozen_param_shapes") or {}, "frozen_param_shapes", file.path),
        fragments=mapping(root.get("frozen_param_fragments") or {}, "frozen_param_fragments", file.path),
        aliases={
            str(alias): str(owner)
            for alias, owner in mapping(root.get("shared_params") or {}, "shared_params", file.path).items()
        },
    )


def _shapes(value: object, what: str, where: str) -> dict[str, Shape]:
    found = {}
    for name, shape in mapping(value, what, where).items():
        lengths = tuple(shape) if isinstance(shape, (list, tuple)) else None
        if lengths is None or any(type(n) is not int or n < 0 for n in lengths) or prod(lengths) > _MAX_NUMEL:
            raise FormatError(f"{what} of {name!r}: expected a shape, got {shape!r:.80}", where=where)
        found[str(name)] = lengths
    return found


def _optim(file: TorchFile, mp: int, dp: int) -> OptimState:
    where = file.path
    root = mapping(file.root, "the saved object", where)
    fields = mapping(root.get("optimizer_state_dict"), "optimizer_state_dict", where)
    if "fp32_flat_groups" in fields:
        stage = 3
        fp32 = _vectors(fields["fp32_flat_groups"], "fp32_flat_groups", where)
        base: Any = mapping(fields.get("optimizer_state_dict") or {}, "optimizer_state_dict", where)
    elif "single_partition_of_fp32_groups" in fields:
        stage = number_of(fields.get("zero_stage")) or 1  # BF16_Optimizer does not say
        fp32 = _vectors(fields["single_partition_of_fp32_groups"], "single_partition_of_fp32_groups", where)
        base = fields.get("base_optimizer_state") or {}
    else:
        raise Unsupported(
            f"no partitions of ZeRO among its fields: {', '.join(map(str, list(fields)[:8]))}", where=where
        )
    counts = fields.get("partition_count")
    counts = [counts] if type(counts) is int else counts or ()
    paddings = _listed(fields.get("param_alignment_paddings"), "param_alignment_paddings", where)
    param_groups = _listed(base.get("param_groups") if isinstance(base, Mapping) else None, "param_groups", where)
    return OptimState(
        file=file,
        mp=mp,
        dp=dp,
        fields=fields,
        stage=stage,
        fp32=fp32,
        states=_states(base, len(fp32), where),
        param_groups=tuple(group for group in param_groups if isinstance(group, Mapping)),
        partition_count=_ints(counts, "partition_count", where),
        paddings=None if not paddings else tuple(_ints(group, "param_alignment_paddings", where) for group in paddings),
    )


def _states(base: object, n_groups: int, where: str) -> tuple[Mapping[str, Any], ...]:
    """States by group, of a state dict keyed by number or (``elastic_checkpoint``) of a list."""
    if isinstance(base, (list, tuple)):
        found = [mapping(entry, "state of a group", where) for entry in base]
        return (*found, *({} for _ in range(n_groups - len(found))))[:n_groups]
    keyed = mapping(mapping(base, "base_optimizer_state", where).get("state") or {}, "state", where)
    return tuple(mapping(keyed.get(number) or {}, "state of a group", where) for number in range(n_groups))


def mapping(value: object, what: str, where: str) -> Mapping[Any, Any]:
    """``value``.

    Raises:
        FormatError: it is no dict.
    """
    if not isinstance(value, Mapping):
        raise FormatError(f"{what}: expected a dict, got {type(value).__name__}", where=where)
    return value


def _listed(value: object, what: str, where: str) -> Sequence[Any]:
    if value is not None and not isinstance(value, (list, tuple)):
        raise FormatError(f"{what}: expected a list, got {type(value).__name__}", where=where)
    return value or ()


def _vectors(value: object, what: str, where: str) -> tuple[TensorRef, ...]:
    if not isinstance(value, (list, tuple)) or any(not is_vector(entry) for entry in value):
        raise FormatError(f"{what}: expected a list of flat tensors, got {type(value).__name__}", where=where)
    return tuple(value)


def is_vector(value: object) -> bool:
    """Whether ``value`` is a packed tensor of one dimension."""
    return isinstance(value, TensorRef) and len(value.shape) == 1 and value.is_contiguous


def _ints(value: object, what: str, where: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or any(type(n) is not int or not 0 <= n < _MAX_NUMEL for n in value):
        raise FormatError(f"{what}: expected a list of numbers, got {value!r:.80}", where=where)
    return tuple(value)


def number_of(value: object) -> int | None:
    """An integer, also as the argument of an enum that was not imported."""
    if isinstance(value, Stub) and len(value.args) == 1:
        value = value.args[0]
    return value if type(value) is int else None
