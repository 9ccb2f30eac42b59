"""The files of a target of DeepSpeed: model states and each rank's optimizer, as pickles around the request's boxes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._pickle.nodes import Global, OrderedMap, Stub
from ckpt_tool.formats._pickle.same import same_value
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats._torch_file.written import Storage, WrittenFile, fresh_tensor
from ckpt_tool.formats.base import WriteRequest
from ckpt_tool.formats.deepspeed.experts import expert_of, is_expert
from ckpt_tool.formats.deepspeed.fewer_ranks import for_ranks
from ckpt_tool.formats.deepspeed.target_facts import (
    UNIVERSAL_INFO,
    UNIVERSAL_VERSION,
    UNIVERSAL_VERSION_KEY,
    WRITTEN_VERSION,
    model_facts,
    sizes,
)
from ckpt_tool.formats.deepspeed.target_parts import TargetParts
from ckpt_tool.formats.deepspeed.target_ranks import RankParts, Weight, record_of
from ckpt_tool.formats.deepspeed.target_stages import Stages
from ckpt_tool.formats.deepspeed.target_state import STEP
from ckpt_tool.formats.deepspeed.target_vectors import TargetVector
from ckpt_tool.formats.deepspeed.vectors import MASTER
from ckpt_tool.records import dataclass, field

__all__ = ["TargetFiles"]

_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_EXPERT_GROUP = "ep_size_"
_LOSS_SCALER = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")


@dataclass
class _Contents:
    """Storages of one file while its object grows."""

    storages: list[Storage] = field(default_factory=list)

    def tensor(self, dtype: DType, shape: tuple[int, ...], storage: Storage) -> TensorRef:
        """A tensor that fills a storage of its own."""
        self.storages.append(storage)
        return fresh_tensor(len(self.storages) - 1, dtype, shape)

    def value(self, value: Any) -> Any:
        """A state that is one value: an array becomes a tensor of known bytes, anything else stays."""
        if not isinstance(value, np.ndarray):
            return value
        dtype = next((known for known in DTYPES.values() if known.numpy == value.dtype.name), None)
        if dtype is None:
            raise Unsupported(f"a value of numpy's {value.dtype}, which no tensor has")
        return self.tensor(dtype, value.shape, Storage(value.nbytes, data=value.tobytes()))


class TargetFiles:
    """Makes the files of ``parts`` out of a request with its boxes."""

    def __init__(self, parts: TargetParts, request: WriteRequest, folder: str) -> None:
        self._parts = parts
        self._request = request
        self._folder = folder
        self._filled_slots = parts.slots.filled(request.boxes, request.tensors)
        self._first: dict[tuple[str, int], WrittenFile] = {}
        if parts.is_elastic and parts.is_stage3:
            raise Unsupported(
                "an elastic checkpoint has no hyperparameters, without which stage 3 does not load",
                hint="use --zero-stage 1 or 2, which load it as the elastic checkpoint that it is",
            )

    def files(self) -> Iterator[WrittenFile]:
        """Layers and experts, model states, then optimizers, by rank."""
        parts = self._parts
        for own in parts.ranks:
            yield from self._expert_files(own) if parts.stages is None else self._layer_files(own, parts.stages)
        for own in parts.ranks:
            for dp in parts.model_ranks():
                yield self._model_file(own, dp)
        for own in parts.ranks:
            for dp in range(parts.grid.dp):
                yield self._optimizer_file(own.mp, dp)

    # -------------------------------------------------------------------------------------- layers, experts, the rest

    def _layer_files(self, own: RankParts, stages: Stages) -> Iterator[WrittenFile]:
        """Of a pipeline, each layer's weights by the names that they have in it."""
        by_layer: dict[int, list[Weight]] = {}
        for weight in own.weights:
            by_layer.setdefault(stages.layer_of(weight.name), []).append(weight)
        tp = own.mp % self._parts.grid.tp
        axis = f"-model_{tp:02d}" if stages.has_model_axis or self._parts.grid.tp > 1 else ""
        for layer, weights in sorted(by_layer.items()):
            yield self._weights_file(
                f"layer_{layer:02d}{axis}-model_states.pt", own.mp, {stages.key_of(one.name): one for one in weights}
            )

    def _expert_files(self, own: RankParts) -> Iterator[WrittenFile]:
        """Each expert's weights, by their names with its number among all."""
        layers = self._request.info.get("expert_layers", {})
        by_expert: dict[tuple[str, int], dict[str, Weight]] = {}
        for weight in own.weights:
            expert = expert_of(weight.name)
            if expert is not None:
                by_expert.setdefault(expert[:2], {})[weight.name] = weight
        for (prefix, number), weights in by_expert.items():
            if prefix not in layers:
                raise LayoutError(
                    "nothing tells which of the model's layers with experts it is, which names their files",
                    where=prefix,
                    hint="write --to deepspeed-universal, which has no such files",
                )
            yield self._weights_file(
                f"layer_{layers[prefix]}_expert_{number}_mp_rank_{own.mp:02d}_model_states.pt", own.mp, weights
            )

    def _weights_file(self, name: str, mp: int, weights: Mapping[str, Weight]) -> WrittenFile:
        contents = _Contents()
        root = OrderedMap()
        root.update({key: self._weight(contents, one, mp, 0) for key, one in weights.items()})
        return WrittenFile.packed(self._folder + name, root, contents.storages)

    def _weight(self, contents: _Contents, weight: Weight, mp: int, dp: int) -> TensorRef:
        dtype = self._request.tensors.dtypes[weight.row]
        return self._filled(contents, ("weight", mp, dp, weight.name), dtype, weight.shape)

    # ------------------------------------------------------------------------------------------------ model states

    def _model_file(self, own: RankParts, dp: int) -> WrittenFile:
        parts, tensors, info = self._parts, self._request.tensors, self._request.info
        contents = _Contents()
        vectors = [vector for _, vector, _ in parts.vectors_of(own.mp, dp)]
        is_pipeline = parts.stages is not None
        frozen = {one.name: one.shape for one in own.weights if one.name in parts.frozen}
        module, fragments = OrderedMap(), OrderedMap()
        if parts.is_stage3:
            trained = [name for vector in vectors for name in vector.shapes]
            module.update({name: self._placeholder(contents) for name in trained})
        for weight in () if is_pipeline else own.weights:
            name = weight.name
            if is_expert(name):
                continue
            if parts.is_stage3 and name in frozen:
                per_rank = -(-prod(weight.shape) // parts.grid.dp)
                module[name] = self._placeholder(contents)
                fragments[name] = self._weight(contents, replace(weight, shape=(per_rank,)), own.mp, dp)
            else:
                module[name] = self._weight(contents, weight, own.mp, dp)
                if name in frozen:
                    fragments[name] = module[name]
        for second, first in info.get("shared", {}).items():
            if first in module and second not in module:
                module[second] = self._placeholder(contents) if parts.is_stage3 else module[first]
        others = [
            (path, self._filled(contents, ("other", own.mp, dp, row), tensors.dtypes[row], tensors.shape_of(row)))
            for path, row in parts.state.others
        ]
        facts = model_facts(
            parts.state, info, others, shapes=self._shapes(own, vectors), grid=parts.grid, is_pipeline=is_pipeline
        )
        is_listed = parts.zero.stage >= 2
        root = {
            "module": None if is_pipeline else module,
            **facts,
            "ds_config": dict(parts.config),
            "frozen_param_shapes": sizes(frozen) if is_listed else None,
            "frozen_param_fragments": fragments if is_listed else None,
            UNIVERSAL_INFO: self._record(),
        }
        name = f"{f'zero_pp_rank_{dp}_' if parts.is_stage3 else ''}mp_rank_{own.mp:02d}_model_states.pt"
        return self._written("model", own.mp, self._folder + name, root, contents)

    def _shapes(self, own: RankParts, vectors: Sequence[TargetVector]) -> list[Mapping[str, tuple[int, ...]]]:
        """By vector; at stages 1 and 2 by group, of which a pipeline's stage may have no parameter."""
        if self._parts.is_stage3:
            return [vector.shapes for vector in vectors]
        by_group = {vector.group: vector.shapes for vector in vectors}
        return [by_group[number] for number in range(len(own.groups)) if number in by_group]

    def _record(self) -> dict[str, Any]:
        """How shards join, as the target's ranks have them."""
        n_ranks = self._parts.grid.tp
        known = record_of(self._parts.state.model) if n_ranks > 1 else None
        return {UNIVERSAL_VERSION_KEY: UNIVERSAL_VERSION, **for_ranks(known or {}, n_ranks)}

    def _written(self, kind: str, mp: int, path: str, root: Any, contents: _Contents) -> WrittenFile:
        """A file; at stage 3 those of all data-parallel ranks have one object, which is pickled once."""
        first = self._first.get((kind, mp))
        if first is not None and self._parts.is_stage3:
            return first.again(path, contents.storages)
        self._first[kind, mp] = WrittenFile.packed(path, root, contents.storages)
        return self._first[kind, mp]

    def _placeholder(self, contents: _Contents) -> TensorRef:
        """A weight whose elements are elsewhere."""
        return contents.tensor(self._parts.model_dtype, (0,), Storage(0))

    # -------------------------------------------------------------------------------------------------- optimizers

    def _optimizer_file(self, mp: int, dp: int) -> WrittenFile:
        parts, info = self._parts, self._request.info
        contents = _Contents()
        masters: list[TensorRef] = []
        states: dict[int, dict[str, Any]] = {}
        held = parts.vectors_of(mp, dp)
        vectors = [vector for _, vector, _ in held]
        for position, (number, vector, index) in enumerate(held):
            lean = vector.lean_length(index)
            masters.append(self._vector(contents, vector, ("state", number, index, MASTER), lean))
            states[position] = {name: contents.value(value) for name, value in self._values(vector).items()}
            for state in vector.states[1:]:
                length = lean if parts.is_elastic else vector.length
                states[position][state] = self._vector(contents, vector, ("state", number, index, state), length)
        inner: Any = {"state": states, "param_groups": list(self._groups(vectors))}
        given = nest(parts.state.optimizer) if parts.state.optimizer else {}
        own = dict(given) if isinstance(given, dict) else {}
        version = str(info.get("deepspeed_version") or WRITTEN_VERSION)
        own |= {"zero_stage": parts.zero.stage}
        if parts.is_stage3:
            own.pop("clip_grad", None)
            own.setdefault("loss_scaler", self._loss_scaler())
            own = {"dynamic_loss_scale": False, "overflow": False, **own}
            own |= {
                "partition_count": parts.grid.dp,
                "optimizer_state_dict": inner,
                "fp32_flat_groups": masters,
            }
        else:
            if self._parts.is_elastic:
                inner = list(states.values())
                own["base_optimizer_state_step"] = self._step(vectors)
            own |= {
                "base_optimizer_state": inner,
                "single_partition_of_fp32_groups": masters,
                "group_paddings": [vector.length - vector.lean_length(index) for _, vector, index in held],
                "param_alignment_paddings": [list(vector.paddings) for vector in vectors],
                "partition_count": [len(vector.members) for vector in vectors],
                "ds_version": version,
                "param_slice_mappings": [_addresses(vector, index) for _, vector, index in held],
            }
        root = {"optimizer_state_dict": own, "ds_config": dict(parts.config), "ds_version": version}
        prefix = "bf16_" if parts.is_bf16 else ""
        path = f"{self._folder}{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"
        return self._written("optimizer", mp, path, root, contents)

    def _vector(self, contents: _Contents, vector: TargetVector, key: Hashable, length: int) -> TensorRef:
        state = key[-1] if isinstance(key, tuple) else MASTER
        dtype = self._request.tensors.dtypes[vector.parameters[0].states[str(state)]]
        return self._filled(contents, key, dtype, (length,))

    def _filled(self, contents: _Contents, key: Hashable, dtype: DType, shape: tuple[int, ...]) -> TensorRef:
        """A tensor of ``shape`` around all boxes of a slot."""
        rows, position = self._filled_slots.of(key)
        starts = position * dtype.itemsize
        lengths = np.prod(self._request.boxes.sizes[rows], axis=1, dtype=np.int64) * dtype.itemsize
        nbytes = dtype.nbytes(prod(shape))
        storage = Storage(nbytes, tuple(rows.tolist()), tuple(starts.tolist()), tuple(lengths.tolist()))
        return contents.tensor(dtype, shape, storage)

    def _values(self, vector: TargetVector) -> dict[str, Any]:
        """States that all parameters of a vector share."""
        first = vector.parameters[0]
        for own in vector.parameters[1:]:
            for state in {*first.values, *own.values}:
                mine, other = own.values.get(state), first.values.get(state)
                if not _is_same(mine, other):
                    raise LayoutError(
                        f"{state} is {mine}, that of {first.name!r} is {other}: DeepSpeed has one for all parameters "
                        f"of group {vector.group}",
                        where=own.name,
                        hint="parameters that began to be trained at different times have no common step",
                    )
        return first.values

    def _groups(self, vectors: Sequence[TargetVector]) -> Iterator[dict[str, Any]]:
        """Groups with the numbers of their vectors; those of experts are named for the number of ranks with others."""
        for number, group in enumerate(self._parts.state.groups):
            own = [position for position, vector in enumerate(vectors) if vector.group == number]
            if own or self._parts.is_stage3:
                found = {**group.hyperparameters, "params": own}
                if found.get("moe") and str(found.get("name", "")).startswith(_EXPERT_GROUP):
                    found["name"] = f"{_EXPERT_GROUP}{self._parts.grid.ep}"
                yield found

    def _step(self, vectors: Sequence[TargetVector]) -> int:
        """The one step of an elastic checkpoint."""
        steps = {int(values[STEP]) for vector in vectors if STEP in (values := self._values(vector))}
        if len(steps) != 1:
            raise LayoutError(f"an elastic checkpoint has one step, got {sorted(steps)}")
        return steps.pop()

    def _loss_scaler(self) -> Stub:
        """What DeepSpeed has without fp16."""
        if self._parts.model_dtype.name == "float16":
            raise Unsupported(
                "no loss scaler, without which stage 3 of an fp16 run does not load",
                hint="use --zero-stage 1 or 2, which start it afresh",
            )
        scaler: Stub = _LOSS_SCALER()
        scaler.made = "newobj"
        scaler.state = {"cur_scale": 1.0, "dynamic": False}
        return scaler


def _addresses(vector: TargetVector, index: int) -> OrderedMap:
    """Where a partition's part of each parameter is in its vector."""
    found = OrderedMap()
    slices = vector.slices(index)
    for parameter, start, stop, position in zip(
        slices.parameter.tolist(), slices.start.tolist(), slices.stop.tolist(), slices.position.tolist(), strict=True
    ):
        address: Stub = _FRAGMENT()
        address.made = "newobj"
        address.state = {"numel": stop - start, "start": position}
        found[vector.parameters[parameter].name] = address
    return found


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.dtype == second.dtype and first.tobytes() == second.tobytes()
    return same_value(first, second)
