"""Extra state belongs to one rank each: random states, positions in data, whatever objects a rank wants back.

Saved as objects ``extra_state.<name>@rank<r>`` with a record of how many ranks there were, and what becomes of them
when another number of ranks loads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal, get_args

from ckpt_tool.api.checkpoint import Checkpoint, open_checkpoint
from ckpt_tool.errors import FormatError, UsageError
from ckpt_tool.manifest.model import Blob, KeyPath

__all__ = ["OnResize", "extra_path", "load_extra_state", "world_record"]

OnResize = Literal["keep", "drop", "rank0"]
"""With another number of ranks: each gets what the rank of its number saved, none gets any, all get rank 0's."""

_ROOT = "extra_state"
_WORLD = (_ROOT, "world")


def extra_path(name: str, rank: int) -> KeyPath:
    """Where the object ``name`` of a rank is saved."""
    return (_ROOT, f"{name}@rank{rank}")


def world_record(size: int, on_resize: str, names: Iterable[str]) -> tuple[KeyPath, dict[str, Any]]:
    """What is saved beside the objects of a rank, which have these names; of equal entries one rank's is kept.

    Raises:
        UsageError: no such policy.
    """
    if on_resize not in get_args(OnResize):
        raise UsageError(f"on_resize must be one of {', '.join(get_args(OnResize))}, got {on_resize!r}")
    return _WORLD, {"size": size, "on_resize": on_resize, "names": sorted(names)}


def load_extra_state(
    url: str | os.PathLike[str], rank: int, world_size: int, *, trusted: bool = False
) -> dict[str, Any]:
    """What `ckpt_tool.save` was given as ``extra_state``, for one rank of a job of ``world_size`` ranks.

    With as many ranks as saved it each gets its own. Otherwise the policy of the save decides (`OnResize`); a rank
    beyond those that saved gets nothing.

    Args:
        url: the checkpoint.
        rank: of the rank that asks.
        world_size: how many there are now.
        trusted: let ``torch.load`` make objects of any class, which runs code that the checkpoint names. Otherwise
            plain values, tensors and numpy's arrays come back, and anything else is refused.

    Raises:
        FormatError: objects are there, but no record of how many ranks saved them.
        UnsafePickle: an object of a class that only ``trusted`` allows.
    """
    with open_checkpoint(url) as checkpoint:
        blobs = checkpoint.manifest.blobs
        rows = [row for row, blob in enumerate(blobs) if blob.path[:1] == (_ROOT,)]
        if not rows:
            return {}
        loaded = checkpoint.load_blobs([row for row in rows if blobs[row].path[:2] == _WORLD])
        records = _records([loaded[row] for row in rows])
        if not records:
            raise FormatError("extra state without a record of its ranks", where=os.fspath(url))
        world = next(iter(records.values()))
        source = _source(rank, world_size, int(world["size"]), world["on_resize"])
        from ckpt_tool.engine.save.objects import object_of

        if (
            source is not None and source in records
        ):  # each rank's is in a file of its own, with whatever else it saved for itself
            path, nbytes = _file_of(checkpoint, source)
            held = object_of(checkpoint.store.read(path, 0, nbytes), trusted=trusted, where=path)
            return {name: held[name] for name in records[source].get("names", held) if name in held}
        mark = f"@rank{source}"
        own = [blobs[row] for row in rows if source is not None and str(blobs[row].path[-1]).endswith(mark)]
        data = checkpoint.store.fetch([blob.where for blob in own if blob.where is not None])
        names = [str(blob.path[-1]).removesuffix(mark) for blob in own]
        return {
            name: object_of(each, blob.within, trusted=trusted, where=name)
            for name, blob, each in zip(names, own, data, strict=True)
        }


def _records(blobs: Iterable[Blob]) -> dict[int | None, dict[str, Any]]:
    """Records by the rank whose file they are in; by None where one stands for all."""
    found: dict[int | None, dict[str, Any]] = {}
    for blob in blobs:
        if blob.path == _WORLD and isinstance(blob.value, dict):
            found[blob.rank] = blob.value
        elif blob.path[:2] == _WORLD and len(blob.path) == 3 and blob.is_loaded:
            found.setdefault(blob.rank, {})[str(blob.path[2])] = blob.value
    return {rank: record for rank, record in found.items() if {"size", "on_resize"} <= record.keys()}


def _file_of(checkpoint: Checkpoint, rank: int) -> tuple[str, int]:
    """The file of all that a rank has saved for itself, and its bytes."""
    name = f"extra_state_rank_{rank}.pt"
    sizes = checkpoint.source.listing.sizes
    path = next((path for path in sizes if path.rpartition("/")[2] == name), None)
    if path is None:
        raise FormatError(f"no {name}", where=checkpoint.url)
    return path, sizes[path]


def _source(rank: int, world_size: int, saved_size: int, on_resize: str) -> int | None:
    """The rank whose objects a rank gets."""
    if on_resize == "rank0":
        return 0
    if world_size == saved_size:
        return rank
    return rank if on_resize == "keep" and rank < saved_size else None
