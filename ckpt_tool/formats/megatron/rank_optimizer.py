"""The optimizer of per-rank files: its state in the shape of the weights, or as it lies where a fact is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpt_tool.errors import FormatError, LayoutError
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._torch_file.archive import TorchFile, open_torch_files
from ckpt_tool.formats._torch_file.assemble import Part, assemble
from ckpt_tool.formats._torch_file.entries import entries_of
from ckpt_tool.formats._torch_file.placed import Piece
from ckpt_tool.formats._torch_file.rows import Rows
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.megatron.facts import Facts
from ckpt_tool.formats.megatron.gathered import bucket_ends
from ckpt_tool.formats.megatron.keys import state_name
from ckpt_tool.formats.megatron.parameter_groups import own_groups
from ckpt_tool.formats.megatron.rank_files import OPTIMIZER_FILE, Grid
from ckpt_tool.formats.megatron.rank_model import Coord, Member, RankModel
from ckpt_tool.formats.megatron.rank_state import buffers_of, states_of, stored_buffers
from ckpt_tool.formats.megatron.rank_whole_state import has_whole_state, whole_states
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.records import dataclass, field

__all__ = ["WITHOUT_OPTIMIZER", "RankOptimizer", "add_member", "lacks_state", "read_optimizer"]

WITHOUT_OPTIMIZER = (
    f"no {OPTIMIZER_FILE} is here, and the distributed optimizer of the run was saved: Megatron cannot train on from "
    "these files but with --no-load-optim"
)


@dataclass
class RankOptimizer:
    """What was found of the optimizer."""

    rows: Rows = field(default_factory=Rows)
    form: str | None = None
    """``distrib_optim``, ``not distributed``, or None without state."""
    undecoded: str | None = None
    """Why the state is not in the shape of the weights."""
    is_lost: bool = False
    """There was some, in files that are not here."""
    missing: tuple[str, ...] = ()
    """Files of ranks that are not here, though others have theirs."""


def add_member(
    rows: Rows, member: Member, name: tuple[str, KeyPath], tensor: TensorRef, file: TorchFile, rank: int
) -> None:
    """Chunks for what one rank holds of a weight, or of a slot of its state.

    Raises:
        FormatError: the tensor lies outside the global shape, or its storage is not in the file.
    """
    base, base_path = name
    for key, shape, placed in member.pieces(tensor):
        fqn, path = f"{base}{key}", (*base_path[:-1], f"{base_path[-1]}{key}")
        number = rows.add_tensor(fqn, tensor.dtype, shape, section_of(path, fqn), path)
        for box, part in placed:
            if not Box.whole(shape).contains(box):
                raise FormatError(f"{fqn!r}: {box} lies outside {list(shape)}: ranks differ in shape", where=file.path)
            place = file.storages.get(part.storage.key)
            if place is None:
                raise FormatError(f"needs storage {part.storage.key!r}, which is not in the file", where=file.path)
            if box.volume:
                piece = Piece(box, Box.whole(box.sizes), part)
                rows.add_piece(number, piece, place, rank=rank, big_endian=file.big_endian)


def read_optimizer(
    source: Source, grid: Grid, facts: Facts, model: RankModel, files: Mapping[Coord, TorchFile]
) -> RankOptimizer:
    """The state of all ranks, out of ``distrib_optim.pt`` or out of the model files.

    Costs three requests for each ``distrib_optim.pt``.

    Raises:
        FormatError: a file is damaged, or of another layout.
    """
    paths = {
        coord: path for coord, name in grid.folders.items() if (path := f"{name}/{OPTIMIZER_FILE}") in source.listing
    }
    absent = sorted(coord for coord in grid.folders if grid.writes_state(coord) and coord not in paths)
    if paths:
        opened = dict(zip(paths, open_torch_files(source, list(paths.values())), strict=True))
        states = {coord: (file, file.root) for coord, file in opened.items()}
        missing = tuple(f"{grid.folders[coord]}/{OPTIMIZER_FILE}" for coord in absent)
        found = RankOptimizer(form="distrib_optim", missing=missing)
        tried = ((coord, file, _flat_states(model, facts, coord, file)) for coord, file in opened.items())
    else:
        states = {coord: (file, file.root.get("optimizer")) for coord, file in files.items()}
        if not any(has_whole_state(state) for _, state in states.values()):
            return RankOptimizer(is_lost=lacks_state(source, facts, files.values()))
        found = RankOptimizer(form="not distributed")
        tried = (
            (coord, file, whole_states(state, _members(model, coord), is_apart=facts.parts_experts, where=file.path))
            for coord, (file, state) in states.items()
        )
    try:
        for coord, file, placed in tried:
            for member, slot, tensor in placed:
                add_member(found.rows, member, state_name(slot, member.key), tensor, file, grid.number(coord))
    except LayoutError as error:
        found.undecoded = str(error)
        found.rows = _as_it_lies(grid, states)
    return found


def lacks_state(source: Source, facts: Facts, files: Iterable[TorchFile]) -> bool:
    """Whether a distributed optimizer was saved, as the groups in files of weights say, and no part of it is here."""
    if not facts.use_distributed_optimizer or any(path.endswith(f"/{OPTIMIZER_FILE}") for path in source.listing.sizes):
        return False
    entries = [file.root.get("optimizer") for file in files if isinstance(file.root, Mapping)]
    parts = [part for entry in entries for part in (entry if isinstance(entry, list) else [entry])]
    return any(own_groups(part) for part in parts) and not any(map(has_whole_state, parts))


def _members(model: RankModel, coord: Coord) -> list[Member]:
    return [member for (at, _), members in model.members.items() if at == coord for member in members]


def _flat_states(
    model: RankModel, facts: Facts, coord: Coord, file: TorchFile
) -> Iterator[tuple[Member, str, TensorRef]]:
    """The state in one rank's ``distrib_optim.pt``; a list holds dense and experts' optimizers."""
    optimizers = file.root if isinstance(file.root, list) else [file.root]
    n_chunks = sum(at == coord for at, _ in model.members)
    for number, optimizer in enumerate(optimizers):
        if optimizer is None:  # it is in the file of another rank that has the same parameters
            continue
        experts = None if len(optimizers) == 1 else number == 1
        for chunk, dtype, flat, total in stored_buffers(optimizer, n_chunks, file.path):
            members = buffers_of(model.members[coord, chunk], dtype, experts=experts)
            ends = bucket_ends(facts, coord[0], chunk, experts=bool(experts))
            yield from states_of(members, flat, total, ends, file.path)


def _as_it_lies(grid: Grid, states: Mapping[Coord, tuple[TorchFile, Any]]) -> Rows:
    """Each rank's state under the keys that the files have, apart by rank."""
    parts = []
    for coord, (file, state) in states.items():
        items = [entry for entry in entries_of(state, prefix=("optimizer",)).items if entry.is_tensor]
        parts.append(Part(file.path, grid.number(coord), items, file.storages, file.big_endian, is_per_rank=True))
    return assemble(parts, section_of).rows
