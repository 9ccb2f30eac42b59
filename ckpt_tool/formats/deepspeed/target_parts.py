"""The parts of a target of DeepSpeed: which boxes of tensors each data-parallel rank stores, and where in a vector.

Boxes come out of a request again as they went in, in any order: a box and its rank tell its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.formats._pickle.same import same_value
from ckpt_tool.formats.base import BoxTable
from ckpt_tool.formats.deepspeed.partition import per_parameter_slices
from ckpt_tool.formats.deepspeed.target_facts import config_of
from ckpt_tool.formats.deepspeed.target_state import TargetState
from ckpt_tool.formats.deepspeed.target_vectors import TargetVector, ZeroConfig, target_vectors
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.geometry.flat import flat_boxes_columns
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.model import Blob
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.records import dataclass

__all__ = ["TargetParts"]


@dataclass(frozen=True)
class TargetParts:
    """What is written, and how it is cut."""

    tensors: TensorTable
    state: TargetState
    zero: ZeroConfig
    vectors: tuple[TargetVector, ...]
    config: Mapping[str, Any]
    """``ds_config`` of the target."""
    model_dtype: DType
    """Of trained weights."""
    is_bf16: bool
    """Whether the run has ``bf16.enabled``, which file names tell."""
    frozen: tuple[str, ...]
    """Parameters that the optimizer does not have."""
    is_from_deepspeed: bool
    differing: tuple[str, ...]
    """Objects of which ranks have different values."""

    @classmethod
    def of(
        cls, tensors: TensorTable, blobs: Sequence[Blob], info: Mapping[str, Any], *, world_size: int
    ) -> TargetParts:
        """The parts for ``world_size`` data-parallel ranks at ``info["zero_stage"]``.

        Raises:
            Unsupported: see `TargetState.of` and `target_vectors`.
            LayoutError: see `target_vectors`.
        """
        state = TargetState.of(tensors, blobs, info)
        stage = int(info["zero_stage"])
        given = config_of(state.model)
        dtype = DTYPES[str(info["model_dtype"])]
        is_bf16 = _is_enabled(given, "bf16") if given else dtype.name == "bfloat16"
        base: dict[str, Any] = given or {"bf16": {"enabled": is_bf16}, "fp16": {"enabled": dtype.name == "float16"}}
        found = base.get("zero_optimization")
        config = {**base, "zero_optimization": {**(found if isinstance(found, Mapping) else {}), "stage": stage}}
        zero = ZeroConfig.of(config, stage=stage, world_size=world_size, itemsize=dtype.itemsize)
        vectors = tuple(target_vectors(state, tensors, zero))
        frozen = tuple(name for name in info.get("frozen", ()) if name in state.weights)
        own = "deepspeed_version" in info
        return cls(tensors, state, zero, vectors, config, dtype, is_bf16, frozen, own, tuple(_differing(blobs, state)))

    @property
    def is_elastic(self) -> bool:
        """Whether the source has no hyperparameters, as runs with ``elastic_checkpoint`` save."""
        return not any(group.hyperparameters for group in self.state.groups)

    @property
    def is_stage3(self) -> bool:
        """Whether parameters are cut by themselves, and every rank has a model state."""
        return self.zero.stage == 3

    def boxes(self) -> BoxTable:
        """Each rank's part of every vector; weights on the first rank, at stage 3 on all; frozen ones cut there too."""
        blocks: list[tuple[Int64Array, Int64Array, Int64Array, int]] = []
        ranks = range(self.zero.world_size)
        for vector in self.vectors:
            rows = {state: _rows(vector, state) for state in vector.states}
            for rank in ranks:
                found = vector.pieces(rank)
                blocks += [(own[found.parameter], found.offsets, found.sizes, rank) for own in rows.values()]
        cut = np.array([self.state.weights[name] for name in self.frozen], dtype=np.int64)
        every = [*self.state.weights.values(), *(row for _, row in self.state.others)]
        whole = np.array([row for row in every if self.tensors.numel[row]], dtype=np.int64)
        if self.is_stage3:
            whole = whole[~np.isin(whole, cut)]
            for rank in ranks:
                slices = per_parameter_slices(self.tensors.numel[cut], self.zero.world_size, rank)
                shape = self.tensors.shape[cut[slices.parameter]]
                row, offsets, sizes, _ = flat_boxes_columns(slices.start, slices.stop, shape)
                blocks.append((cut[slices.parameter[row]], offsets, sizes, rank))
        for rank in ranks if self.is_stage3 else (0,):
            blocks.append((whole, np.zeros_like(self.tensors.shape[whole]), self.tensors.shape[whole], rank))
        width = self.tensors.shape.shape[1]
        return BoxTable(
            tensor=np.concatenate([rows for rows, _, _, _ in blocks]).astype(np.int32),
            offsets=np.concatenate([_widened(offsets, width, 0) for _, offsets, _, _ in blocks]),
            sizes=np.concatenate([_widened(sizes, width, 1) for _, _, sizes, _ in blocks]),
            rank=np.concatenate([np.full(len(rows), rank, dtype=np.int32) for rows, _, _, rank in blocks]),
        )

    def positions(self, boxes: BoxTable) -> Int64Array:
        """int64[n]: the element of its rank's vector or fragment at which each box begins; 0 of a whole tensor."""
        numel = self.tensors.numel
        strides = contiguous_strides_columns(self.tensors.shape)
        flat = (boxes.offsets * strides[boxes.tensor]).sum(axis=1)
        start, per_rank = np.zeros(len(numel), dtype=np.int64), np.zeros(len(numel), dtype=np.int64)
        for vector in self.vectors:
            for state in vector.states:
                rows = _rows(vector, state)
                if vector.flat.starts is not None:
                    start[rows], per_rank[rows] = vector.flat.starts, vector.length
                else:
                    per_rank[rows] = -(-numel[rows] // self.zero.world_size)
                    start[rows] = np.cumsum(per_rank[rows]) - per_rank[rows]
        if self.is_stage3:
            cut = [self.state.weights[name] for name in self.frozen]
            per_rank[cut] = -(-numel[cut] // self.zero.world_size)
        found: Int64Array = start[boxes.tensor] + flat - boxes.rank * per_rank[boxes.tensor]
        return found

    def notes(self) -> Iterator[str]:
        """What a person should know."""
        if not self.is_from_deepspeed:
            yield (
                "parameters of a group stand in the order of the source's optimizer: DeepSpeed loads them by position, "
                "so the run must give them to its optimizer in that order"
            )
        if self.is_elastic:
            yield (
                "an elastic checkpoint has no hyperparameters and stays elastic: a run with elastic_checkpoint "
                "loads it and goes on with its own"
            )
        dtypes = {self.tensors.dtypes[row].name for name, row in self.state.weights.items() if self._is_trained(name)}
        if dtypes - {self.model_dtype.name}:
            yield (
                f"weights are stored as fp32 masters, which DeepSpeed rounds to {self.model_dtype.name} when it loads "
                f"them; --dtype {self.model_dtype.name} stores them rounded"
            )
        if self.differing:
            shown = ", ".join(self.differing[:4]) + (" ..." if len(self.differing) > 4 else "")
            yield f"{len(self.differing):,} objects differ between ranks; the first rank's are written: {shown}"

    def _is_trained(self, name: str) -> bool:
        return name in self.state.parameters


def _rows(vector: TargetVector, state: str) -> Int64Array:
    """int64[n_parameters]: the tensors of one state."""
    return np.array([own.states[state] for own in vector.parameters], dtype=np.int64)


def _widened(columns: Int64Array, width: int, fill: int) -> Int64Array:
    found = np.full((len(columns), width), fill, dtype=np.int64)
    found[:, : columns.shape[1]] = columns
    return found


def _is_enabled(config: Mapping[str, Any], key: str) -> bool:
    own = config.get(key)
    return isinstance(own, Mapping) and bool(own.get("enabled"))


def _differing(blobs: Sequence[Blob], state: TargetState) -> Iterator[str]:
    first: dict[str, Blob] = {}
    seen: set[str] = set()
    for blob in blobs:
        known = first.setdefault(blob.fqn, blob)
        if known is blob or blob.fqn in seen or blob.fqn.startswith(state.groups_name):
            continue
        if not same_value(known.value, blob.value):
            seen.add(blob.fqn)
            yield blob.fqn
