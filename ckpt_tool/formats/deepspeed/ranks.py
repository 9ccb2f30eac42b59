"""How many ranks of each axis wrote a tag folder, by a model state and the names of files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_tool.errors import FormatError
from ckpt_tool.formats.deepspeed.names import TagFiles
from ckpt_tool.sizes import counted

__all__ = ["tp_world_size_of", "world_sizes"]

_MAX_RANKS = 1 << 22


def world_sizes(files: TagFiles, root: Mapping[str, Any], where: str, counts: Iterable[int] = ()) -> tuple[int, int]:
    """Model-parallel and data-parallel ranks.

    Args:
        files: what is there.
        root: a model state.
        where: its path.
        counts: how many partitions optimizer files say that there are.

    Raises:
        FormatError: more than any run has.
    """
    mp = max(_count(root, "mp_world_size"), 1 + max(files.mp_ranks))
    dp = max([_count(root, "dp_world_size"), 1 + max((file.dp for file in files.optims), default=0), *counts])
    if dp * mp > _MAX_RANKS:
        raise FormatError(f"says that {dp:,} x {counted(mp, 'rank')} wrote it", where=where)
    return mp, dp


def tp_world_size_of(root: Mapping[str, Any], files: TagFiles, mp_world_size: int) -> int:
    """How many of the model-parallel ranks are tensor-parallel ones.

    Raises:
        FormatError: the others are no whole number of stages.
    """
    degrees = root.get("checkpoint_parallel_dimensions")
    if isinstance(degrees, Mapping) and _count(degrees, "tp_degree"):
        tp = _count(degrees, "tp_degree")
    elif files.layers:
        tp = 1 + max(file.tp or 0 for file in files.layers)
    else:
        tp = mp_world_size
    if mp_world_size % tp:
        raise FormatError(
            f"{counted(mp_world_size, 'model-parallel rank', 'are')} no multiple of {tp:,} tensor-parallel ones",
            where=files.models[0].path,
        )
    return tp


def _count(fields: Mapping[str, Any], key: str) -> int:
    value = fields.get(key)
    return value if type(value) is int and 0 < value < 1 << 24 else 0
