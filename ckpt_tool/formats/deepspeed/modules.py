"""Weights as they are stored: which file and which model-parallel rank holds which name of the module.

A pipeline has one file per layer, whose keys lack the layer's number; a mixture of experts has one file per expert.
At stage 3 the module's parameters are placeholders of no elements. Where their bytes are is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._torch_file.archive import TorchFile
from ckpt_tool.formats._torch_file.entries import Entry, entries_of
from ckpt_tool.formats.deepspeed.opened import Checkpoint, ModelState
from ckpt_tool.formats.deepspeed.vectors import group_names
from ckpt_tool.records import dataclass, field

__all__ = ["HeldFile", "Weights", "weights_of"]

Shape = tuple[int, ...]
_TIED = "tied_modules."


@dataclass
class HeldFile:
    """What one file holds of the module."""

    file: TorchFile
    mp: int
    items: list[tuple[str, Entry]] = field(default_factory=list)
    """By name in the module."""
    notes: list[str] = field(default_factory=list)


@dataclass
class Weights:
    """What all files hold of the module."""

    files: list[HeldFile] = field(default_factory=list)
    is_stage3: bool = False
    shapes: dict[int, dict[str, Shape]] = field(default_factory=dict)
    """Of shards, by model-parallel rank and name; of everything whose shape is told, stored or not."""
    trained: dict[int, dict[str, Shape]] = field(default_factory=dict)
    """The part of ``shapes`` that the optimizer has."""
    placeholders: dict[int, dict[str, DType]] = field(default_factory=dict)
    """Names without elements, in module order, with the dtype of the weights that are not there."""
    buffers: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    """Names of tied layers, by the name that their layer file alone would give them."""

    def stored(self, mp: int) -> set[str]:
        """Names of tensors that are stored for a rank."""
        return {name for held in self.files if held.mp == mp for name, entry in held.items if entry.is_tensor}

    @property
    def dtype(self) -> DType | None:
        """Of the model's parameters, as far as one is seen."""
        for dtypes in self.placeholders.values():
            for name, dtype in dtypes.items():
                if name not in self.buffers:
                    return dtype
        for held in self.files:
            for name, entry in held.items:
                if isinstance(entry.value, TensorRef) and name in self.trained.get(held.mp, {}):
                    return entry.value.dtype
        return None


def weights_of(found: Checkpoint) -> Weights:
    """Everything that model, layer and expert files hold.

    Raises:
        FormatError: a stored weight does not have the shape that the optimizer recorded.
    """
    result = Weights(
        is_stage3=found.optims[0].is_per_parameter if found.optims else found.first.dp is not None,
        buffers={name for model in found.models for name in model.buffers},
        aliases={alias: owner for model in found.models for alias, owner in model.aliases.items()},
    )
    for mp in sorted({model.mp for model in found.models}):
        model = found.model_of(mp)
        if model is not None:
            _add_model(result, found, model)
    _add_layers(result, found)
    for expert, file in found.experts:
        _add_file(result, HeldFile(file, expert.mp), ((entry.fqn, entry) for entry in entries_of(file.root).items))
    return result


def _add_model(result: Weights, found: Checkpoint, model: ModelState) -> None:
    trained: dict[str, Shape] = {}
    for number, shapes in enumerate(model.groups or ()):
        by_name = group_names(found, model.mp, number)
        n_repeats = len(by_name) // max(len(shapes), 1)
        trained.update(zip(by_name, list(shapes.values()) * n_repeats, strict=True))
    result.trained[model.mp] = trained
    result.shapes[model.mp] = {**trained, **model.frozen}
    result.placeholders[model.mp] = {}
    module = model.root.get("module")
    if isinstance(module, Mapping):
        entries = entries_of(module, prefix=("module",))
        held = HeldFile(model.file, model.mp, notes=entries.notes)
        _add_file(result, held, ((entry.fqn.removeprefix("module."), entry) for entry in entries.items))


def _add_file(result: Weights, held: HeldFile, entries: Iterator[tuple[str, Entry]]) -> None:
    known = result.shapes.setdefault(held.mp, {})
    for name, entry in entries:
        value = entry.value
        if isinstance(value, TensorRef) and _is_placeholder(result, held.mp, name, value):
            result.placeholders.setdefault(held.mp, {})[name] = value.dtype
            continue
        if isinstance(value, TensorRef) and known.setdefault(name, value.shape) != value.shape:
            raise FormatError(
                f"has shape {list(value.shape)}, the optimizer recorded {list(known[name])}",
                where=f"{held.file.path}: {name}",
            )
        held.items.append((name, entry))
    result.files.append(held)


def _is_placeholder(result: Weights, mp: int, name: str, value: TensorRef) -> bool:
    """Whether elements are missing: a shape of (0,) that is not the parameter's own."""
    if value.shape != (0,) or name in result.buffers:
        return False
    shape = result.shapes[mp].get(result.aliases.get(name, name))
    return prod(shape) > 0 if shape is not None else result.is_stage3


def _add_layers(result: Weights, found: Checkpoint) -> None:
    """Layer files; a layer whose names the optimizer does not know, but whose keys end one tied name, is that one."""
    trained = {name for shapes in result.trained.values() for name in shapes}
    layers = [(layer, file, entries_of(file.root)) for layer, file in found.layers]
    own_names = {f"{layer.layer}.{entry.fqn}" for layer, _, entries in layers for entry in entries.items}
    tied: dict[str, list[str]] = {}
    for name in trained - own_names:
        if name.startswith(_TIED):
            tied.setdefault(name.removeprefix(_TIED).partition(".")[2], []).append(name)
    unknown: dict[str, list[str]] = {}
    for name in own_names - trained:
        unknown.setdefault(name.partition(".")[2], []).append(name)
    result.renamed = {
        names[0]: tied[key][0] for key, names in unknown.items() if len(names) == 1 and len(tied.get(key, ())) == 1
    }
    for layer, file, entries in layers:
        by_rank: dict[int, list[tuple[str, Entry]]] = {}
        for entry in entries.items:
            own = f"{layer.layer}.{entry.fqn}"
            name = result.renamed.get(own, own)
            tp = layer.tp or 0
            ranks = [mp for mp, shapes in result.trained.items() if name in shapes and mp % found.tp_world_size == tp]
            by_rank.setdefault(min(ranks, default=tp), []).append((name, entry))
        for mp, items in by_rank.items():
            _add_file(result, HeldFile(file, mp, notes=entries.notes), iter(items))
