"""Small checkpoints as users described them, on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.shard_map import shard_map
from ckpt_tool.geometry.box import Box
from tests.formats.dcp.build import Checkpoint, saved

__all__ = ["as_bytes", "boxes", "dcp", "put", "rank_files", "safetensors_bytes", "saved", "values"]


def put(folder: Path, files: Mapping[str, bytes]) -> Path:
    """``folder`` with these files."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def dcp(folder: Path, add: Callable[[Checkpoint], None]) -> Path:
    """A DCP checkpoint of what ``add`` adds."""
    made = Checkpoint()
    add(made)
    return put(folder, made.files())


def rank_files(folder: Path, world_size: int, state: Callable[[int], Mapping[str, Any]]) -> Path:
    """What ranks write with ``torch.save``, under the names of verl."""
    names = {rank: f"model_world_size_{world_size}_rank_{rank}.pt" for rank in range(world_size)}
    return put(folder, {name: saved(dict(state(rank))) for rank, name in names.items()})


def safetensors_bytes(
    tensors: Mapping[str, tuple[str, list[int], bytes]], offsets: Mapping[str, tuple[int, int]] | None = None
) -> bytes:
    """A safetensors file, byte by byte; ``offsets`` overrides where the header says that tensors lie."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for fqn, (dtype, shape, data) in tensors.items():
        first, last = (offsets or {}).get(fqn, (at, at + len(data)))
        header[fqn] = {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())


def as_bytes(url: Path | str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every tensor that the library opens there."""
    with open_checkpoint(url) as checkpoint:
        arrays = checkpoint.read([(fqn, Box.whole(view.shape)) for fqn, view in checkpoint.items()])
        return {
            fqn: (view.dtype.name, view.shape, array.tobytes())
            for (fqn, view), array in zip(checkpoint.items(), arrays, strict=True)
        }


def values(url: Path | str, fqn: str) -> Any:
    """The elements of one tensor, as lists."""
    with open_checkpoint(url) as checkpoint:
        return checkpoint[fqn].numpy().tolist()


def boxes(url: Path | str, fqn: str) -> list[tuple[int, list[int], list[int]]]:
    """Rank, offsets and sizes of every stored box of a tensor, in order of ranks."""
    with open_checkpoint(url) as checkpoint:
        found = shard_map(checkpoint, fqn).boxes
    return sorted((-1 if one.rank is None else one.rank, list(one.box.offsets), list(one.box.sizes)) for one in found)
