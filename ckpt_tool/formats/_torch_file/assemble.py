"""Assembly: what several torch files hold of the same tensors, put together as one manifest.

One file is the case of one rank. With several, a tensor that records its placement (DTensor, ShardedTensor, the layout
of our own rank files) is joined from its boxes; one that records none is taken for a replica in every file, which is an
assumption that is written down, unless its shapes already differ. Reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

from ckpt_tool.errors import CkptError, FormatError
from ckpt_tool.formats._pickle.same import same_value
from ckpt_tool.formats._torch_file.entries import Entry
from ckpt_tool.formats._torch_file.placed import Piece, Placed, place
from ckpt_tool.formats._torch_file.rows import Rows, StoragePlace
from ckpt_tool.manifest.model import Blob, KeyPath, MeshInfo
from ckpt_tool.records import dataclass, field

__all__ = ["Assembly", "Part", "PlacedBy", "apart", "assemble", "by_itself"]


@dataclass(frozen=True, slots=True)
class Part:
    """One file's entries, and where its storages are."""

    where: str
    """The file, for messages."""
    rank: int | None
    entries: Sequence[Entry]
    storages: Mapping[str, StoragePlace]
    big_endian: bool
    is_per_rank: bool = False
    """Whether its contents are this rank's own (random states): then they are kept apart by rank."""


PlacedBy = Callable[[Part, Entry], "list[tuple[str, KeyPath, Placed]] | None"]
"""``(fqn, path, what is held)`` of one entry; None for one that is no tensor after all."""


@dataclass(slots=True)
class Assembly:
    """What `assemble` found."""

    rows: Rows = field(default_factory=Rows)
    blobs: list[Blob] = field(default_factory=list)
    mesh: MeshInfo | None = None
    notes: list[str] = field(default_factory=list)
    replicated: list[str] = field(default_factory=list)
    """Tensors without a placement, equal in dtype and shape in every file that has them."""
    kept_apart: list[str] = field(default_factory=list)
    """Tensors without a placement whose shapes or dtypes differ; each file's is called ``name@rankN``."""
    flat: list[str] = field(default_factory=list)
    """Flat parameters of FSDP1, which are pieces of several parameters."""
    n_claiming_ranks: int = 0
    """One more than the highest rank that a ShardedTensor lists a box of; 0 without ShardedTensors."""
    rank_mismatches: list[str] = field(default_factory=list)
    """Files whose pickles say that they are of another rank than their names."""


def assemble(
    parts: Sequence[Part], section_of: Callable[[KeyPath, str], str], placed: PlacedBy | None = None
) -> Assembly:
    """All tensors and values of ``parts`` as rows and blobs.

    Args:
        parts: files, those of lower ranks first.
        section_of: the section of a tensor, by path and fqn.
        placed: what takes the place of `place` for files that describe their layout by other means.

    Raises:
        FormatError: files contradict each other or themselves; the message names the tensor and the file.
        Unsupported: a placement that cannot be joined.
    """
    found = Assembly()
    locate = placed or by_itself
    held: dict[str, list[tuple[Part, Entry, Placed]]] = {}
    values: dict[str, list[tuple[Part, Entry]]] = {}
    for part in parts:
        for entry in part.entries:
            if not entry.is_tensor:
                values.setdefault(entry.fqn, []).append((part, entry))
                continue
            try:
                located = locate(part, entry)
            except CkptError as error:
                error.where = error.where or f"{part.where}: {entry.fqn}"
                raise
            if located is None:
                found.notes.append(f"{entry.fqn!r} in {part.where} holds no tensor that can be read; it is left out")
                continue
            for fqn, path, one in located:
                held.setdefault(fqn, []).append((part, Entry(fqn, path, entry.value), one))
    for fqn, holders in held.items():
        _add_tensor(found, fqn, holders, section_of)
    for holders_of_value in values.values():
        found.blobs += _blobs(holders_of_value)
    found.rank_mismatches = sorted(
        {
            f"{part.where} holds rank {one.mesh_rank}"
            for holders in held.values()
            for part, _, one in holders
            if None not in (part.rank, one.mesh_rank) and part.rank != one.mesh_rank
        }
    )
    return found


def by_itself(part: Part, entry: Entry) -> list[tuple[str, KeyPath, Placed]] | None:
    """As the tensor's own class says."""
    one = place(entry.value, part.rank)
    if one is None:
        return None
    if part.is_per_rank and part.rank is not None and one.kind == "plain":
        return [(*apart(entry.fqn, entry.path, part.rank), one)]
    return [(entry.fqn, entry.path, one)]


def _add_tensor(
    found: Assembly,
    fqn: str,
    holders: Sequence[tuple[Part, Entry, Placed]],
    section_of: Callable[[KeyPath, str], str],
) -> None:
    kinds = {one.kind for _, _, one in holders}
    if "plain" in kinds and len(kinds) > 1:
        plain_in = next(part.where for part, _, one in holders if one.kind == "plain")
        raise FormatError("a plain tensor here, with a placement in other files", where=f"{plain_in}: {fqn}")
    is_plain = kinds == {"plain"}
    path = holders[0][1].path
    section = section_of(path, fqn)
    if is_plain and len({(one.dtype, one.shape) for _, _, one in holders}) > 1:
        found.kept_apart.append(fqn)
        for part, _, one in holders:
            name, own_path = apart(fqn, path, part.rank)
            row = found.rows.add_tensor(name, one.dtype, one.shape, section, own_path)
            _add_pieces(found, row, part, one.pieces)
        return
    if is_plain and len(holders) > 1:
        found.replicated.append(fqn)
    if _is_flat_parameter(path):
        found.flat.append(fqn)
    for part, _, one in holders:
        try:
            row = found.rows.add_tensor(fqn, one.dtype, one.shape, section, path)
        except FormatError as error:
            error.where = f"{part.where}: {fqn}"
            raise
        if one.mesh is not None:
            _add_mesh(found, one.mesh)
        found.n_claiming_ranks = max(found.n_claiming_ranks, *(rank + 1 for rank, _ in one.claims), 0)
        _add_pieces(found, row, part, one.pieces)


def apart(fqn: str, path: KeyPath, rank: int | None) -> tuple[str, KeyPath]:
    """Name and path of one rank's own tensor: ``name@rank<r>``."""
    return f"{fqn}@rank{rank}", (*path[:-1], f"{path[-1] if path else fqn}@rank{rank}")


def _add_pieces(found: Assembly, row: int, part: Part, pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        key = piece.tensor.storage.key
        place = part.storages.get(key)
        if place is None:
            raise FormatError(
                f"{found.rows.metas[row].fqn!r} needs storage {key!r}, which is not in the file",
                where=part.where,
                hint="fetch or save the file again, or keep what is whole: ckpt verify SRC --salvage OUT",
            )
        found.rows.add_piece(row, piece, place, rank=part.rank, big_endian=part.big_endian)


def _add_mesh(found: Assembly, mesh: MeshInfo) -> None:
    """Keep the mesh with the most ranks, then the most axes: tensors may live on a part of it, or on it flattened."""
    known = found.mesh
    if known is None or (prod(mesh.sizes), len(mesh.sizes)) > (prod(known.sizes), len(known.sizes)):
        found.mesh = mesh


def _is_flat_parameter(path: KeyPath) -> bool:
    """FSDP1 calls them ``_flat_param``; with several, numbers follow (torch/distributed/fsdp/_flat_param.py)."""
    last = str(path[-1]).rpartition(".")[2] if path else ""
    return last.lstrip("_").startswith("flat_param")


def _blobs(holders: Sequence[tuple[Part, Entry]]) -> list[Blob]:
    """One blob where all files agree on a value, else one for each file with its rank."""
    first_part, first = holders[0]
    is_shared = not first_part.is_per_rank and all(same_value(first.value, entry.value) for _, entry in holders[1:])
    kept = holders[:1] if is_shared else holders
    return [
        Blob(
            fqn=entry.fqn,
            kind="value",
            where=None,
            value=entry.value,
            path=entry.path,
            rank=None if is_shared and len(holders) > 1 else part.rank,
            is_loaded=True,
        )
        for part, entry in kept
    ]
