"""Rank state belongs to one rank each: data-loader positions, random states. It cannot be resharded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ckpt_tool.api.convert.conversion import Dropped
from ckpt_tool.errors import UsageError
from ckpt_tool.formats._pickle.same import same_value
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, some_of

__all__ = ["Carried", "by_name", "carry_rank_state", "without"]

# torchtitan: `dataloader.dp_rank_3`; Megatron and others: `rng_state.rank_3`, `rng.rank3`; this tool: `name@rank3`.
_RANK_STATE = (
    r"(?:^|\.)(?:data_?loader|rng|rng_states?|random_states?)\b.*?(?:dp_)?rank_?(\d+)(?:\.|$)|@rank(\d+)(?:\.|$)"
)
# Any other name that says `rank` and a number, and random states numbered as accelerate's files are: state of ranks
# where the same name stands there for every rank from 0 on. One `lora_rank_8` is none.
_NUMBERED = r"(?i:(?:^|[._/])(?:(?:[a-z]+_)?rank[_./]?|(?:[a-z]+_)?(?:rng|random)_states?_)(\d{1,7})(?=$|[._/]))"
_DATA = r"data_?loader|data_?set|sampler|(?:^|[._/])loader"
_OTHER = SECTIONS.index("other")


@dataclass(frozen=True)
class Carried:
    """What goes into the target, and what does not."""

    manifest: Manifest
    blobs: tuple[Blob, ...]
    dropped: tuple[Dropped, ...]


def carry_rank_state(
    manifest: Manifest,
    blobs: Sequence[Blob],
    *,
    dp_size: int,
    world_size: int,
    policy: Literal["keep", "drop"] | None,
) -> Carried:
    """The tensors and objects that go into the target.

    State of single ranks is carried over when as many ranks saved it as the target has: data-parallel ones for
    positions in the data, all of them for the rest. An object that every rank saved with one value is no such state.

    Args:
        manifest: the tensors that were chosen.
        blobs: objects, loaded.
        dp_size: number of ranks of the target that read different data.
        world_size: number of ranks of the target.
        policy: what to do where the number changed.

    Raises:
        UsageError: the number changes and no policy says what to do.
    """
    tensors = _tensors_of_ranks(manifest)
    objects = _objects_of_ranks(blobs)
    moved: dict[str, str] = {}
    counts: list[str] = []
    for is_data, now in ((True, dp_size), (False, world_size)):
        names = [*(fqn for fqn in tensors if _is_data(fqn) == is_data)]
        rows = [row for row in objects if _is_data(blobs[row].fqn) == is_data]
        saved = len({*(tensors[fqn] for fqn in names), *(objects[row] for row in rows)})
        if saved != now:
            why = f"state of one rank of {saved:,}; the target has {now:,}"
            counts += [f"{counted(saved, 'rank')} saved them, the target has {now:,}"] if saved else []
            moved |= dict.fromkeys([*names, *(blobs[row].fqn for row in rows)], why)
    if not moved or policy == "keep":
        return Carried(manifest, tuple(blobs), ())
    if policy is None:
        raise UsageError(
            f"{counted(len(moved), 'entry', 'hold')} the state of single ranks ({some_of(sorted(moved))}): "
            f"{counts[0]}, so data or random numbers would be repeated or skipped",
            where=manifest.where,
            hint="use --rank-state drop (start them afresh) or --rank-state keep (carry them as they are)",
        )
    kept = [row for row, fqn in enumerate(manifest.tensors.fqns) if fqn not in tensors or fqn not in moved]
    return Carried(
        manifest if len(kept) == len(manifest.tensors) else only_tensors(manifest, kept),
        tuple(blob for row, blob in enumerate(blobs) if row not in objects or blob.fqn not in moved),
        tuple(Dropped(fqn, why) for fqn, why in moved.items()),
    )


def without(manifest: Manifest, blobs: Sequence[Blob], why: Mapping[str, str]) -> Carried:
    """All but the tensors and objects that ``why`` names, with its reasons."""
    kept = [row for row, fqn in enumerate(manifest.tensors.fqns) if fqn not in why]
    return Carried(
        only_tensors(manifest, kept),
        tuple(blob for blob in blobs if blob.fqn not in why),
        tuple(Dropped(fqn, reason) for fqn, reason in why.items()),
    )


def by_name(blobs: Sequence[Blob]) -> tuple[Blob, ...]:
    """Objects for a target that has each name once: equal copies become one, others are called ``name@rank3``."""
    copies: dict[str, list[Blob]] = {}
    for blob in blobs:
        copies.setdefault(blob.fqn, []).append(blob)
    found: list[Blob] = []
    for same in copies.values():
        if all(same_value(same[0].value, other.value) for other in same[1:]):
            found.append(same[0])
        else:
            found += [_of_rank(blob, number) for number, blob in enumerate(same)]
    return tuple(found)


def _of_rank(blob: Blob, number: int) -> Blob:
    mark = f"@rank{number if blob.rank is None else blob.rank}"
    path = (*blob.path[:-1], f"{blob.path[-1]}{mark}") if blob.path else blob.path
    return replace(blob, fqn=blob.fqn + mark, path=path)


def _is_data(fqn: str) -> bool:
    return "dp_rank" in fqn or re.search(_DATA, fqn) is not None


def _ranks_in(fqns: Iterable[str]) -> dict[str, int]:
    """Rank by name, of those names that say they are one rank's.

    >>> _ranks_in(["dataloader.dp_rank_3", "sampler_rank_0", "sampler_rank_1", "lora_rank_8", "rng_state_0"])
    {'dataloader.dp_rank_3': 3, 'sampler_rank_0': 0, 'sampler_rank_1': 1}
    """
    found: dict[str, int] = {}
    alike: dict[tuple[str, str], dict[int, str]] = {}
    for fqn in fqns:
        if "rank" in fqn and (match := re.search(_RANK_STATE, fqn)) is not None:
            found[fqn] = int(match[1] or match[2])
        elif ("rank" in fqn.lower() or "state" in fqn) and (numbered := re.search(_NUMBERED, fqn)) is not None:
            around = fqn[: numbered.start(1)], fqn[numbered.end(1) :]
            alike.setdefault(around, {})[int(numbered[1])] = fqn
    for of_rank in alike.values():
        if len(of_rank) > 1 and set(of_rank) == set(range(len(of_rank))):
            found |= {fqn: rank for rank, fqn in of_rank.items()}
    return found


def _tensors_of_ranks(manifest: Manifest) -> dict[str, int]:
    """Rank by fqn; tensors of model and optimizer are never state of a rank, whatever their names."""
    sections = manifest.tensors.section.tolist()
    return _ranks_in(fqn for fqn, section in zip(manifest.tensors.fqns, sections, strict=True) if section == _OTHER)


def _objects_of_ranks(blobs: Sequence[Blob]) -> dict[int, int]:
    """Rank by row of ``blobs``: those named for a rank, and those of which ranks have copies that differ."""
    copies: dict[str, list[int]] = {}
    for row, blob in enumerate(blobs):
        copies.setdefault(blob.fqn, []).append(row)
    found: dict[int, int] = {}
    paths = {blob.fqn: blob.path for blob in blobs}
    ranks = _ranks_in(fqn for fqn in copies if section_of(paths[fqn], fqn) != "optimizer")
    for fqn, rows in copies.items():
        named = ranks.get(fqn)
        is_one = named is None and all(same_value(blobs[rows[0]].value, blobs[row].value) for row in rows[1:])
        if not is_one:
            found |= {
                row: rank for row in rows if (rank := named if named is not None else blobs[row].rank) is not None
            }
    return found
