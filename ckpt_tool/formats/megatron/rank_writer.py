"""The writer of Megatron's per-rank files: ``mp_rank_XX[_YYY[_ZZZ]]/model_optim_rng.pt`` and ``distrib_optim.pt``.

What mcore 0.8 to 0.19 save with ``--ckpt-format torch``: one grid alone loads them. The optimizer's state is written as
the distributed optimizer has it, gathered over data-parallel ranks, whatever form the source has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from ckpt_tool.dtypes import dtype
from ckpt_tool.formats._pickle.nodes import OrderedMap, Stub
from ckpt_tool.formats._pickle.rekey import with_storages
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._pickle.walk import storages
from ckpt_tool.formats._torch_file.written import Storage, WrittenFile, check_dtypes, fresh_tensor
from ckpt_tool.formats._torch_file.written_files import WrittenFiles
from ckpt_tool.formats.base import BoxTable, LayOut, Segment, WriteRequest, WriterOptions
from ckpt_tool.formats.megatron.fresh_rng import fresh_random_states
from ckpt_tool.formats.megatron.location import TRACKER
from ckpt_tool.formats.megatron.parameter_groups import inner_optimizer
from ckpt_tool.formats.megatron.rank_files import MODEL_FILE, OPTIMIZER_FILE, rank_folder
from ckpt_tool.formats.megatron.rank_rows import Buffer, Rank, RankRows
from ckpt_tool.formats.megatron.rank_target import SLOTS, Held
from ckpt_tool.formats.megatron.target_boxes import weight_key
from ckpt_tool.formats.megatron.target_common import (
    COMMON_STEP,
    is_common,
    is_distributed,
    parts_of_ranks,
    refuse_undecoded,
    target_common,
)
from ckpt_tool.formats.megatron.target_grid import TargetGrid
from ckpt_tool.formats.megatron.target_iteration import iteration_of
from ckpt_tool.formats.megatron.target_objects import object_payloads
from ckpt_tool.formats.megatron.target_random import (
    RNG,
    SavedStates,
    is_rng,
    shard_grid,
    states_left_out,
)
from ckpt_tool.formats.megatron.target_whole_state import with_states
from ckpt_tool.manifest.model import Blob, FileEntry, Manifest
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.records import dataclass

__all__ = ["WRITER", "MegatronLegacyWriter"]

_COMMON = ("args", "checkpoint_version", "iteration")
_STATE = "_extra_state"


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
        """What belongs to the source's grid alone.

        Random states are kept when the target has as many stages and tensor-parallel ranks, unless they are to be
        dropped.

        Raises:
            LayoutError: the optimizer's state could not be decoded.
            UsageError: random states are to be kept, and the grid is another.
        """
        grid = TargetGrid.of(mesh)
        args = source.info.get("args", {})
        named = [(meta.fqn, meta.path) for meta in source.tensors]
        why = dict(parts_of_ranks(named, blobs, has_one_optimizer=not grid.parts_experts(args)))
        strange = [m.fqn for m in source.tensors if m.section == "optimizer" and weight_key(m.path) is None]
        refuse_undecoded(source, [fqn for fqn in strange if fqn not in why], blobs)
        for meta in source.tensors:
            key = weight_key(meta.path)
            is_state = key is not None and meta.path[0] == "optimizer"
            if meta.fqn in why or is_rng(meta.fqn, meta.path):
                continue
            is_step = meta.path[-1] == COMMON_STEP or (is_state and meta.path[2] not in SLOTS)
            if is_step and is_distributed(source.info):
                why[meta.fqn] = "a parameter's own step; the groups of the optimizer have it"
            elif key is None and not is_common(meta.fqn, meta.path):
                why[meta.fqn] = "has no place in per-rank files"
        for blob in blobs:
            is_whole = blob.kind == "torch_save" and (blob.path[:1] == ("model",) or shard_grid(blob.fqn) is not None)
            if blob.fqn not in why and storages(blob.value) and not is_whole:
                why[blob.fqn] = "has tensors inside"
        unneeded = "a random state of an expert-parallel rank that the target has not; it takes the first one's"
        ranks = range(grid.ep)
        return why | states_left_out(source, blobs, grid, rank_state, expert_ranks=ranks, why_unneeded=unneeded)

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
        return RankRows.of(tensors, grid, info).boxes()

    def lay_out(self, request: WriteRequest) -> LayOut:
        """The folder; the tracker is written last.

        Raises:
            Unsupported: the source has no arguments of a Megatron run, or torch cannot hold a dtype of it.
        """
        check_dtypes(request.tensors)
        grid = TargetGrid.of_request(request)
        iteration, folder = iteration_of(request.info)
        rows = RankRows.of(request.tensors, grid, request.info)
        is_fresh = request.options.fresh_random_states
        random = _RandomStates(request, is_fresh)
        common = target_common(request, grid, has_rng=random.are_there, iteration=iteration or 0)
        objects = {str(b.path[1]): b for b in request.blobs if len(b.path) == 2 and b.path[0] == "model"}
        layout = _Layout(folder, grid, request, _legacy_root(common.root), common.rows, objects, random)
        files = WrittenFiles(file for rank in rows.ranks for file in layout.files(rank))
        file, offset = files.places(len(request.boxes))
        tracker = ("release" if folder == "release" else str(iteration)).encode()
        is_silent = random.are_there or folder == "release"
        note = (
            "" if is_silent else "no random states are written: load with --no-load-rng, or write them with --rng emit"
        )
        manifest = request.manifest(
            self.name,
            [*files.entries(), FileEntry(TRACKER, len(tracker))],
            file=file,
            offset=offset,
            notes=(*common.notes, *filter(None, [note])),
        )
        segments = (*files.segments(), Segment(TRACKER, 0, tracker))
        return LayOut(manifest, segments, TRACKER, needs_crc32=True, seal=files.seal)


WRITER = MegatronLegacyWriter()


def _legacy_root(root: Mapping[str, Any]) -> dict[str, Any]:
    """The common state as per-rank files have it: optimizers in a list, and nothing of distributed checkpoints."""
    kept = {key: value for key, value in root.items() if key != "content_metadata"}
    optimizer = kept.get("optimizer")
    if isinstance(optimizer, Mapping):
        parts = [optimizer[key] for key in sorted(optimizer)] if all(type(k) is int for k in optimizer) else [optimizer]
        plain = [_without_shared_step(part) for part in parts]
        kept["optimizer"] = plain if len(plain) > 1 else plain[0]
    args = kept["args"]
    known = {"ckpt_format": "torch", "use_dist_ckpt": False, "dist_ckpt_optim_fully_reshardable": False}
    changed = {name: value for name, value in known.items() if name in args.state}
    copy = type(args).__new__(type(args), *args.args, **args.kwargs)
    copy.made, copy.entries, copy.items, copy.state = args.made, args.entries, args.items, {**args.state, **changed}
    return {**kept, "args": copy}


def _without_shared_step(part: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's entry without the tensor that all parameters share, as each has its own here."""
    kept = {key: value for key, value in part.items() if key != "param_state_sharding_type"}
    inner = inner_optimizer(kept)
    state = inner.get("state")
    if isinstance(state, Mapping) and isinstance(state.get(COMMON_STEP), TensorRef):
        fewer = {**inner, "state": {key: value for key, value in state.items() if key != COMMON_STEP}}
        return fewer if inner is kept else {**kept, "optimizer": fewer}
    return kept


@dataclass(frozen=True)
class _RandomStates:
    """The random states that ranks get."""

    request: WriteRequest
    is_fresh: bool

    @cached_property
    def saved(self) -> SavedStates:
        """Those of the source's per-rank files."""
        return SavedStates.of(self.request.tensors, self.request.blobs)

    @cached_property
    def objects(self) -> Mapping[str, Blob]:
        """Those of a distributed checkpoint."""
        return {blob.fqn: blob for blob in self.request.blobs if shard_grid(blob.fqn) is not None}

    @property
    def are_there(self) -> bool:
        """Whether there are any."""
        return self.is_fresh or bool(self.saved.values or self.objects)

    def of(self, rank: Rank, grid: TargetGrid, args: Stub, held: list[Storage]) -> Any:
        """A rank's state, whose storages are appended to ``held``; None without one."""
        target = rank.target
        if self.is_fresh:
            value, payloads = fresh_random_states(
                args, grid, target.stage, target.tensor_rank, target.expert_rank, first_key=len(held)
            )
            held += [Storage(len(payload), data=payload) for payload in payloads]
            return value
        if rank.random_number is not None:
            return _taken_over(self.saved.value(rank.random_number), enumerate(rank.random), held)
        blob = self.objects.get(f"{RNG}/shard_{target.stage}.{target.tensor_rank}_{grid.pp}.{grid.tp}")
        return None if blob is None else _of_object(blob, self.request.blob_bytes, held)


@dataclass(frozen=True)
class _Layout:
    """What the files of all ranks are made of."""

    folder: str
    grid: TargetGrid
    request: WriteRequest
    root: Mapping[str, Any]
    common_rows: tuple[int, ...]
    """Rows of the request that fill the storages of ``root``, by number."""
    objects: Mapping[str, Blob]
    """Modules' extra states, by key."""
    random: _RandomStates

    def files(self, rank: Rank) -> Iterator[WrittenFile]:
        """A rank's files."""
        target, grid, tensors = rank.target, self.grid, self.request.tensors
        name = rank_folder(target.tensor_rank, target.stage, target.expert_rank, pp=grid.pp, ep=grid.ep)
        held: list[Storage] = []
        models: dict[str, Any] = {}
        dtypes = {str(path[1]): row for row, path in enumerate(tensors.paths or ()) if path[0] == "model"}
        for number, chunk in enumerate(rank.chunks):
            own = OrderedMap()
            for one, storage in chunk:
                own[one.name] = fresh_tensor(len(held), tensors.dtypes[dtypes[one.key]], one.shape)
                held.append(storage)
                own.update(self._extra_states(one, rank, held))
            models["model" if len(rank.chunks) == 1 else f"model{number}"] = own
        first = {key: self.root[key] for key in _COMMON if key in self.root}
        rest = {key: value for key, value in self.root.items() if key not in first}
        shared = [(number, rank.common[row]) for number, row in enumerate(self.common_rows) if row in rank.common]
        rest = _taken_over(rest, shared, held)
        if rank.states:
            entry = rest.get("optimizer")
            rest["optimizer"] = with_states(entry, rank.states, tensors, held, is_apart=isinstance(entry, list))
        state = self.random.of(rank, grid, self.root["args"], held)
        if state is not None:
            rest["rng_state"] = state
        place = f"{self.folder}/{name}"
        yield WrittenFile.packed(f"{place}/{MODEL_FILE}", {**first, **models, **rest}, held)
        if any(optimizer is not None for optimizer in rank.optimizers):
            yield _optimizer_file(f"{place}/{OPTIMIZER_FILE}", rank.optimizers, self.root)

    def _extra_states(self, one: Held, rank: Rank, held: list[Storage]) -> Iterator[tuple[str, Any]]:
        """The extra state of the module whose weight this is, where there is one."""
        if one.key == "output_layer.weight":
            yield "output_layer._extra_state", None
        key = one.extra_key
        if key is None or not (key in self.objects or key in rank.extras):
            return
        name, _, number = one.name.rpartition(".weight")
        name = f"{name}.{_STATE}" + (number if number.isdecimal() else "")
        if key in rank.extras:
            row, storage = rank.extras[key]
            held.append(storage)
            tensors = self.request.tensors
            yield name, fresh_tensor(len(held) - 1, tensors.dtypes[row], tensors.shape_of(row))
        else:
            yield name, _of_object(self.objects[key], self.request.blob_bytes, held)


def _of_object(blob: Blob, original: Mapping[str, bytes], held: list[Storage]) -> Any:
    """An object's value for a rank's file; payload of its tensors, from its own bytes, is appended to ``held``."""
    if not storages(blob.value):
        return blob.value
    payloads = object_payloads(original[blob.fqn], blob.value, blob.fqn)
    return _taken_over(blob.value, [(key, Storage(len(data), data=data)) for key, data in payloads], held)


def _taken_over(value: Any, own: Iterable[tuple[int | str, Storage]], held: list[Storage]) -> Any:
    """A value whose storages, by their keys in it, are appended to ``held``."""
    keys: dict[str, str] = {}
    for key, storage in own:
        keys[str(key)] = str(len(held))
        held.append(storage)
    return with_storages(value, keys)


def _optimizer_file(path: str, optimizers: Sequence[list[Buffer] | None], root: Mapping[str, Any]) -> WrittenFile:
    held: list[Storage] = []
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
    return WrittenFile.packed(path, values if len(values) > 1 else values[0], held)
