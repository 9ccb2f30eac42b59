"""The writer of Megatron's per-rank files: ``mp_rank_XX[_YYY[_ZZZ]]/model_optim_rng.pt`` and ``distrib_optim.pt``.

What mcore 0.8 to 0.19 save with ``--ckpt-format torch``: one grid alone loads them. The optimizer's state is written as
the distributed optimizer has it, gathered over data-parallel ranks, whatever form the source has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import dtype
from ckpt_tool.errors import LayoutError, Unsupported, UsageError
from ckpt_tool.formats._pickle.nodes import OrderedMap
from ckpt_tool.formats._pickle.walk import storages
from ckpt_tool.formats._torch_file.pieced import PiecedFile, PiecedStorage, StoragePiece
from ckpt_tool.formats._torch_file.written import check_dtypes, fresh_tensor
from ckpt_tool.formats.base import BoxTable, LayOut, Segment, WriteRequest, WriterOptions
from ckpt_tool.formats.megatron.fresh_rng import fresh_random_states
from ckpt_tool.formats.megatron.location import TRACKER
from ckpt_tool.formats.megatron.rank_files import MODEL_FILE, OPTIMIZER_FILE, rank_folder
from ckpt_tool.formats.megatron.rank_target import SLOTS, Flat, Held, RankTarget, rank_targets
from ckpt_tool.formats.megatron.target_boxes import weight_key
from ckpt_tool.formats.megatron.target_common import target_common
from ckpt_tool.formats.megatron.target_grid import TargetGrid
from ckpt_tool.formats.megatron.target_iteration import iteration_of
from ckpt_tool.formats.megatron.target_objects import is_rng
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob, FileEntry, Manifest
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable, pad_shapes
from ckpt_tool.records import dataclass, field

__all__ = ["WRITER", "MegatronLegacyWriter"]

_COMMON = ("args", "checkpoint_version", "iteration")
_STATE = "_extra_state"
_NO_RNG = "a random state of the source's ranks; --rng emit makes those of the start of a run"


class MegatronLegacyWriter:
    """Lays out a run's folder with a folder for each model-parallel rank."""

    name = "megatron-legacy"
    per_rank = True

    def left_out(
        self,
        source: Manifest,
        blobs: Sequence[Blob],
        mesh: Mapping[str, int],
        rank_state: Literal["keep", "drop", "emit"] | None,
    ) -> Mapping[str, str]:
        """Random states, and what is neither a weight nor state of one in its shape.

        Raises:
            LayoutError: the optimizer's state could not be decoded.
            UsageError: random states are to be kept.
        """
        del mesh
        if rank_state == "keep":
            raise UsageError("random states are not carried over to per-rank files", hint="--rng emit makes new ones")
        undecoded = source.info.get("optimizer_undecoded")
        is_distributed = source.info.get("optimizer_form") != "not distributed"
        why: dict[str, str] = {}
        for meta in source.tensors:
            key = weight_key(meta.path)
            if is_rng(meta.fqn, meta.path):
                why[meta.fqn] = _NO_RNG
            elif key is None and undecoded and meta.section == "optimizer":
                raise LayoutError(
                    f"the optimizer's state is not in the shape of the weights: {undecoded}", where=meta.fqn,
                    hint="write the weights alone: --include 'model.*'",
                )  # fmt: skip
            elif key is None or _STATE in key:
                why[meta.fqn] = "has no place in per-rank files"
            elif meta.path[0] == "optimizer" and not is_distributed:
                why[meta.fqn] = "state of an optimizer that is not the distributed one; --to megatron-dist keeps it"
            elif meta.path[0] == "optimizer" and meta.path[2] not in SLOTS:
                why[meta.fqn] = "a parameter's own step; the groups of the optimizer have it"
        for blob in blobs:
            if is_rng(blob.fqn, blob.path or (blob.fqn,)):
                why[blob.fqn] = _NO_RNG
            elif blob.fqn.startswith("rerun_state_machine"):
                why[blob.fqn] = "the rerun state machine's, which Megatron ignores on another number of ranks"
            elif storages(blob.value):
                why[blob.fqn] = "has tensors inside"
        return why

    def place(
        self,
        tensors: TensorTable,
        blobs: Sequence[Blob],
        mesh: Mapping[str, int],
        info: Mapping[str, Any],
        options: WriterOptions,
    ) -> BoxTable:
        """The parts of each model-parallel rank, those of its buffers in their order."""
        del blobs
        grid = TargetGrid.of(mesh).with_options(options)
        return _Rows.of(tensors, grid, info).boxes(tensors)

    def lay_out(self, request: WriteRequest) -> LayOut:
        """The folder; the tracker is written last.

        Raises:
            Unsupported: the source has no arguments of a Megatron run, or torch cannot hold a dtype of it.
        """
        check_dtypes(request.tensors)
        grid = TargetGrid.of_request(request)
        iteration, folder = iteration_of(request.info)
        rows = _Rows.of(request.tensors, grid, request.info)
        is_fresh = request.options.fresh_random_states
        common = target_common(request, grid, has_rng=is_fresh, iteration=iteration or 0)
        root = _legacy_root(common.root)
        states = {str(b.path[1]): b.value for b in request.blobs if len(b.path) == 2 and b.path[0] == "model"}
        files = [
            file
            for rank in rows.ranks
            for file in _files(folder, rank, grid, request.tensors, root, states, is_fresh=is_fresh)
        ]
        file_column, offset = (np.zeros(len(request.boxes), dtype=np.int64) for _ in range(2))
        for number, file in enumerate(files):
            for row, start in file.places():
                file_column[row], offset[row] = number, start
        volume = np.prod(request.boxes.sizes, axis=1, dtype=np.int64)
        chunks = ChunkTable.from_columns(
            tensor=request.boxes.tensor, offsets=request.boxes.offsets, sizes=request.boxes.sizes, file=file_column,
            offset=offset, length=volume * request.tensors.bits[request.boxes.tensor] // 8, rank=request.boxes.rank,
        )  # fmt: skip
        tracker = ("release" if folder == "release" else str(iteration)).encode()
        entries = (*(FileEntry(file.path, file.zip.nbytes) for file in files), FileEntry(TRACKER, len(tracker)))
        is_silent = is_fresh or folder == "release"
        note = (
            "" if is_silent else "no random states are written: load with --no-load-rng, or write them with --rng emit"
        )
        manifest = Manifest(
            self.name, "", request.tensors, chunks, FileTable(entries), info=dict(request.info),
            notes=(*common.notes, *filter(None, [note])),
        )  # fmt: skip

        def seal(crc32s: npt.NDArray[np.uint32]) -> Iterator[Segment]:
            listed = crc32s.tolist()
            return (segment for file in files for segment in file.tail(listed))

        segments = [segment for file in files for segment in (*file.heads(), *file.tail_without_checksums())]
        segments.append(Segment(TRACKER, 0, tracker))
        return LayOut(manifest, tuple(segments), TRACKER, needs_crc32=True, seal=seal)


WRITER = MegatronLegacyWriter()


@dataclass(frozen=True)
class _Buffer:
    """A gradient buffer's state: flat storages by slot."""

    chunk: int
    weights: str
    """Element type of the weights."""
    numel: int
    slots: Mapping[str, PiecedStorage]


@dataclass
class _Rank:
    """One rank's storages."""

    target: RankTarget
    chunks: list[list[tuple[Held, PiecedStorage]]] = field(default_factory=list)
    optimizers: list[list[_Buffer] | None] = field(default_factory=list)
    """Of the dense optimizer and the experts', or of one for both; None for what another rank has."""


@dataclass
class _Rows:
    """Boxes of all ranks, numbered as they are made; the same for the same request."""

    ranks: list[_Rank] = field(default_factory=list)
    columns: list[tuple[int, Box, int]] = field(default_factory=list)
    """Tensor, box, rank."""

    @classmethod
    def of(cls, tensors: TensorTable, grid: TargetGrid, info: Mapping[str, Any]) -> _Rows:
        found = cls()
        args = info.get("args", {})
        index = {path: row for row, path in enumerate(tensors.paths or ())}
        has_state = any(path[0] == "optimizer" for path in index)
        for number, target in enumerate(rank_targets(tensors, grid, args)):
            rank = _Rank(target)
            for chunk in target.chunks:
                rank.chunks.append([(held, found.storage(tensors, index, "", held, number)) for held in chunk])
            if has_state:
                parts: list[bool | None] = [None]
                if grid.parts_experts(args) and target.experts:
                    parts = [False, True]
                for is_expert in parts:
                    is_elsewhere = is_expert is False and target.expert_rank > 0
                    rank.optimizers.append(
                        None
                        if is_elsewhere
                        else found.buffers(tensors, index, target.flats(grid, args, experts=is_expert), number)
                    )
            found.ranks.append(rank)
        return found

    def storage(
        self, tensors: TensorTable, index: Mapping[Any, int], slot: str, held: Held, rank: int, start: int = 0
    ) -> PiecedStorage:
        """The storage of a weight, or of a slot of its state, from the byte of element ``start`` on."""
        path = ("optimizer", "state", slot, held.key) if slot else ("model", held.key)
        row = index.get(path)
        if row is None:
            raise LayoutError(f"has no {slot} in the optimizer's state", where=held.key)
        itemsize = tensors.dtypes[row].bits // 8
        pieces, offset = [], start * itemsize
        for box in held.boxes:
            pieces.append(StoragePiece(len(self.columns), offset, box.volume * itemsize))
            self.columns.append((row, box, rank))
            offset += box.volume * itemsize
        return PiecedStorage(offset, tuple(pieces))

    def buffers(
        self, tensors: TensorTable, index: Mapping[Any, int], flats: Sequence[Flat], rank: int
    ) -> list[_Buffer]:
        """State of one optimizer."""
        found = []
        for flat in flats:
            kinds = {tensors.dtypes[index["model", held.key]].name for held, _ in flat.parts}
            if len(kinds) > 1:
                raise Unsupported(
                    f"weights of {' and '.join(sorted(kinds))} have buffers of their own, whose order is not known",
                    hint="write the weights alone: --include 'model.*'",
                )
            slots = {}
            for slot in SLOTS:
                own = [self.storage(tensors, index, slot, held, rank, start) for held, start in flat.parts]
                pieces = tuple(piece for storage in own for piece in storage.pieces)
                row = index["optimizer", "state", slot, flat.parts[0][0].key]
                if tensors.dtypes[row].name != "float32":
                    raise Unsupported(f"is {tensors.dtypes[row].name}, expected float32", where=tensors.fqns[row])
                slots[slot] = PiecedStorage(flat.numel * 4, pieces)
            found.append(_Buffer(flat.chunk, kinds.pop(), flat.numel, slots))
        return found

    def boxes(self, tensors: TensorTable) -> BoxTable:
        """All boxes as columns."""
        width = tensors.shape.shape[1]
        return BoxTable(
            np.array([row for row, _, _ in self.columns], dtype=np.int32),
            pad_shapes([box.offsets for _, box, _ in self.columns], width, 0),
            pad_shapes([box.sizes for _, box, _ in self.columns], width, 1),
            np.array([rank for _, _, rank in self.columns], dtype=np.int32),
        )


def _legacy_root(root: Mapping[str, Any]) -> dict[str, Any]:
    """The common state as per-rank files have it: optimizers in a list, and nothing of distributed checkpoints."""
    kept = {key: value for key, value in root.items() if key != "content_metadata"}
    optimizer = kept.get("optimizer")
    if isinstance(optimizer, Mapping):
        parts = [optimizer[key] for key in sorted(optimizer)] if all(type(k) is int for k in optimizer) else [optimizer]
        plain = [{key: value for key, value in part.items() if key != "param_state_sharding_type"} for part in parts]
        kept["optimizer"] = plain if len(plain) > 1 else plain[0]
    args = kept["args"]
    known = {"ckpt_format": "torch", "use_dist_ckpt": False, "dist_ckpt_optim_fully_reshardable": False}
    changed = {name: value for name, value in known.items() if name in args.state}
    copy = type(args).__new__(type(args), *args.args, **args.kwargs)
    copy.made, copy.entries, copy.items, copy.state = args.made, args.entries, args.items, {**args.state, **changed}
    return {**kept, "args": copy}


def _files(
    folder: str,
    rank: _Rank,
    grid: TargetGrid,
    tensors: TensorTable,
    root: Mapping[str, Any],
    states: Mapping[str, Any],
    *,
    is_fresh: bool,
) -> Iterator[PiecedFile]:
    """A rank's files."""
    target = rank.target
    place = f"{folder}/{rank_folder(target.tensor_rank, target.stage, target.expert_rank, pp=grid.pp, ep=grid.ep)}"
    held: list[PiecedStorage] = []
    models: dict[str, Any] = {}
    dtypes = {str(path[1]): row for row, path in enumerate(tensors.paths or ()) if path[0] == "model"}
    for number, chunk in enumerate(rank.chunks):
        own = OrderedMap()
        for one, storage in chunk:
            own[one.name] = fresh_tensor(len(held), tensors.dtypes[dtypes[one.key]], one.shape)
            held.append(storage)
            own.update(_extra_states(one, states, tensors.shape_of(dtypes[one.key])))
        models["model" if len(rank.chunks) == 1 else f"model{number}"] = own
    first = {key: root[key] for key in _COMMON if key in root}
    rest = {key: value for key, value in root.items() if key not in first}
    if is_fresh:
        rest["rng_state"], payloads = fresh_random_states(
            root["args"], grid, target.stage, target.tensor_rank, target.expert_rank, first_key=len(held)
        )
        held += [PiecedStorage(len(payload), data=payload) for payload in payloads]
    yield PiecedFile.of(f"{place}/{MODEL_FILE}", {**first, **models, **rest}, held)
    if rank.optimizers:
        yield _optimizer_file(f"{place}/{OPTIMIZER_FILE}", rank.optimizers, root)


def _optimizer_file(path: str, optimizers: Sequence[list[_Buffer] | None], root: Mapping[str, Any]) -> PiecedFile:
    held: list[PiecedStorage] = []
    values: list[Any] = []
    is_wide = root["args"].attribute("accumulate_allreduce_grads_in_fp32") is not False
    for buffers in optimizers:
        if buffers is None:
            values.append(None)
            continue
        value: dict[Any, Any] = {"buckets_coalesced": True}
        for number, buffer in enumerate(buffers):
            slots: dict[str, Any] = {}
            for slot, storage in buffer.slots.items():
                slots[slot] = fresh_tensor(len(held), dtype("float32"), (buffer.numel,))
                held.append(storage)
            gradients = dtype("float32") if is_wide else dtype(buffer.weights)
            value[number] = {(dtype(buffer.weights), gradients): {**slots, "numel_unpadded": buffer.numel}}
        values.append(value)
    return PiecedFile.of(path, values if len(values) > 1 else values[0], held)


def _extra_states(held: Held, states: Mapping[str, Any], shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """The extra state of the module whose weight this is, where there is one."""
    if held.key == "output_layer.weight":
        yield "output_layer._extra_state", None
    module, is_weight, _ = held.key.rpartition(".weight")
    if not is_weight:
        return
    lead = held.boxes[0].offsets[: len(shape) - len(held.shape)] or (0,)
    whole = shape[: len(shape) - len(held.shape)] or (1,)
    key = f"{module}.{_STATE}/shard_{'.'.join(map(str, lead))}_{'.'.join(map(str, whole))}"
    if key in states:
        name, _, number = held.name.rpartition(".weight")
        yield (f"{name}.{_STATE}" + (number if number.isdecimal() else ""), states[key])
