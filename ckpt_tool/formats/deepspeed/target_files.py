"""The files of a target of DeepSpeed: model states and each rank's optimizer, as pickles around the request's boxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from ckpt_tool.formats.deepspeed.target_facts import (
    UNIVERSAL_INFO,
    UNIVERSAL_VERSION,
    WRITTEN_VERSION,
    model_facts,
    sizes,
)
from ckpt_tool.formats.deepspeed.target_parts import TargetParts
from ckpt_tool.formats.deepspeed.target_state import STEP
from ckpt_tool.formats.deepspeed.target_vectors import TargetVector
from ckpt_tool.formats.deepspeed.vectors import MASTER
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.records import dataclass, field

__all__ = ["TargetFiles"]

_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")
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
        boxes = request.boxes
        self._position = parts.positions(boxes)
        self._first: dict[str, WrittenFile] = {}
        if parts.is_elastic and parts.is_stage3:
            raise Unsupported(
                "an elastic checkpoint has no hyperparameters, without which stage 3 does not load",
                hint="say --zero-stage 1 or 2, which load it as the elastic checkpoint that it is",
            )
        # Rows of the request by rank and tensor, in the order of their place.
        order = np.lexsort((self._position, boxes.tensor, boxes.rank))
        self._order = order
        self._key = boxes.rank[order].astype(np.int64) * len(request.tensors) + boxes.tensor[order]

    def files(self) -> Iterator[WrittenFile]:
        """Model states, then optimizers, by rank."""
        ranks = range(self._parts.zero.world_size)
        for rank in ranks if self._parts.is_stage3 else (0,):
            yield self._model_file(rank)
        for rank in ranks:
            yield self._optimizer_file(rank)

    # ------------------------------------------------------------------------------------------------ model states

    def _model_file(self, rank: int) -> WrittenFile:
        parts, tensors, info = self._parts, self._request.tensors, self._request.info
        contents = _Contents()
        module, fragments = OrderedMap(), OrderedMap()
        frozen = {name: tensors.shape_of(parts.state.weights[name]) for name in parts.frozen}
        if parts.is_stage3:
            trained = [name for vector in parts.vectors for name in vector.shapes]
            module.update({name: self._placeholder(contents) for name in trained})
        for name, row in parts.state.weights.items():
            shape = tensors.shape_of(row)
            if parts.is_stage3 and name in frozen:
                per_rank = -(-int(tensors.numel[row]) // parts.zero.world_size)
                module[name] = self._placeholder(contents)
                fragments[name] = self._filled(contents, [row], rank, (per_rank,))
            else:
                module[name] = self._filled(contents, [row], rank, shape)
                if name in frozen:
                    fragments[name] = module[name]
        for second, first in info.get("shared", {}).items():
            if first in module and second not in module:
                module[second] = self._placeholder(contents) if parts.is_stage3 else module[first]
        others = [
            (path, self._filled(contents, [row], rank, tensors.shape_of(row))) for path, row in parts.state.others
        ]
        facts = model_facts(
            parts.state,
            info,
            others,
            shapes=[vector.shapes for vector in parts.vectors],
            dp_world_size=parts.zero.world_size,
        )
        is_listed = parts.zero.stage >= 2
        root = {
            "module": module,
            **facts,
            "ds_config": dict(parts.config),
            "frozen_param_shapes": sizes(frozen) if is_listed else None,
            "frozen_param_fragments": fragments if is_listed else None,
            UNIVERSAL_INFO: {"universal_checkpoint_version": UNIVERSAL_VERSION},
        }
        name = f"{f'zero_pp_rank_{rank}_' if parts.is_stage3 else ''}mp_rank_00_model_states.pt"
        return self._written("model", self._folder + name, root, contents)

    def _written(self, kind: str, path: str, root: Any, contents: _Contents) -> WrittenFile:
        """A file; at stage 3 all ranks' have one object, which is pickled once."""
        first = self._first.get(kind)
        if first is not None and self._parts.is_stage3:
            return first.again(path, contents.storages)
        self._first[kind] = WrittenFile.packed(path, root, contents.storages)
        return self._first[kind]

    def _placeholder(self, contents: _Contents) -> TensorRef:
        """A weight whose elements are elsewhere."""
        return contents.tensor(self._parts.model_dtype, (0,), Storage(0))

    # -------------------------------------------------------------------------------------------------- optimizers

    def _optimizer_file(self, rank: int) -> WrittenFile:
        parts, info = self._parts, self._request.info
        contents = _Contents()
        masters: list[TensorRef] = []
        states: dict[int, dict[str, Any]] = {}
        for number, vector in enumerate(parts.vectors):
            masters.append(self._vector(contents, vector, MASTER, rank, vector.lean_length(rank)))
            states[number] = {name: contents.value(value) for name, value in self._values(vector).items()}
            length = vector.lean_length(rank) if self._parts.is_elastic else vector.length
            for state in vector.states[1:]:
                states[number][state] = self._vector(contents, vector, state, rank, length)
        inner: Any = {"state": states, "param_groups": list(self._groups())}
        given = nest(parts.state.optimizer) if parts.state.optimizer else {}
        own = dict(given) if isinstance(given, dict) else {}
        version = str(info.get("deepspeed_version") or WRITTEN_VERSION)
        own |= {"zero_stage": parts.zero.stage}
        if parts.is_stage3:
            own.pop("clip_grad", None)
            own.setdefault("loss_scaler", self._loss_scaler())
            own = {"dynamic_loss_scale": False, "overflow": False, **own}
            own |= {
                "partition_count": parts.zero.world_size,
                "optimizer_state_dict": inner,
                "fp32_flat_groups": masters,
            }
        else:
            if self._parts.is_elastic:
                inner = list(states.values())
                own["base_optimizer_state_step"] = self._step()
            own |= {
                "base_optimizer_state": inner,
                "single_partition_of_fp32_groups": masters,
                "group_paddings": [vector.length - vector.lean_length(rank) for vector in parts.vectors],
                "param_alignment_paddings": [list(vector.paddings) for vector in parts.vectors],
                "partition_count": [parts.zero.world_size] * len(parts.vectors),
                "ds_version": version,
                "param_slice_mappings": [_addresses(vector, rank) for vector in parts.vectors],
            }
        root = {"optimizer_state_dict": own, "ds_config": dict(parts.config), "ds_version": version}
        prefix = "bf16_" if parts.is_bf16 else ""
        path = f"{self._folder}{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        return self._written("optimizer", path, root, contents)

    def _vector(self, contents: _Contents, vector: TargetVector, state: str, rank: int, length: int) -> TensorRef:
        return self._filled(contents, [own.states[state] for own in vector.parameters], rank, (length,))

    def _filled(self, contents: _Contents, tensors: Sequence[int], rank: int, shape: tuple[int, ...]) -> TensorRef:
        """A tensor of ``shape`` around all boxes that a rank has of ``tensors``."""
        request = self._request
        dtype = request.tensors.dtypes[tensors[0]]
        rows = self._rows_of(rank, tensors)
        starts = self._position[rows] * dtype.itemsize
        lengths = np.prod(request.boxes.sizes[rows], axis=1, dtype=np.int64) * dtype.itemsize
        nbytes = dtype.nbytes(int(np.prod(shape, dtype=np.int64)))
        order = np.argsort(starts, kind="stable")
        rows, starts, lengths = rows[order], starts[order], lengths[order]
        storage = Storage(nbytes, tuple(rows.tolist()), tuple(starts.tolist()), tuple(lengths.tolist()))
        return contents.tensor(dtype, shape, storage)

    def _rows_of(self, rank: int, tensors: Sequence[int]) -> Int64Array:
        """Rows of the request's boxes that a rank has of ``tensors``, one tensor behind the other."""
        keys = rank * len(self._request.tensors) + np.array(tensors, dtype=np.int64)
        first, last = np.searchsorted(self._key, keys), np.searchsorted(self._key, keys + 1)
        counts = last - first
        at = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        return self._order[at].astype(np.int64)

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

    def _groups(self) -> Iterator[dict[str, Any]]:
        """Groups with the numbers of their vectors."""
        for number, group in enumerate(self._parts.state.groups):
            own = [position for position, vector in enumerate(self._parts.vectors) if vector.group == number]
            if own or self._parts.is_stage3:
                yield {**group.hyperparameters, "params": own}

    def _step(self) -> int:
        """The one step of an elastic checkpoint."""
        steps = {int(values[STEP]) for vector in self._parts.vectors if STEP in (values := self._values(vector))}
        if len(steps) != 1:
            raise LayoutError(f"an elastic checkpoint has one step, got {sorted(steps)}")
        return steps.pop()

    def _loss_scaler(self) -> Stub:
        """What DeepSpeed has without fp16."""
        if self._parts.model_dtype.name == "float16":
            raise Unsupported(
                "no loss scaler, without which stage 3 of an fp16 run does not load",
                hint="say --zero-stage 1 or 2, which start it afresh",
            )
        scaler: Stub = _LOSS_SCALER()
        scaler.made = "newobj"
        scaler.state = {"cur_scale": 1.0, "dynamic": False}
        return scaler


def _addresses(vector: TargetVector, rank: int) -> OrderedMap:
    """Where the rank's part of each parameter is in its vector."""
    found = OrderedMap()
    slices = vector.slices(rank)
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
