"""A stage is a pipeline rank; which layers it holds is told by who saved them.

mcore numbers ranks with tensor parallelism fastest and pipeline parallelism slowest, and the names of ``.distcp`` files
have the rank that wrote them: a layer's chunks come from ranks of its stage only, whatever data-parallel rank they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats.megatron.registration import layer_key
from ckpt_tool.geometry.absent import absent_numbers
from ckpt_tool.manifest.tables import ChunkTable, TensorTable
from ckpt_tool.sizes import counted

__all__ = ["chunk_layers", "stage_layers"]


def stage_layers(
    tensors: TensorTable, chunks: ChunkTable, keys: Iterable[str], *, n_stages: int, world_size: int | None
) -> list[list[int]]:
    """Global layer numbers of each stage, ascending.

    Args:
        tensors: named by keys.
        chunks: with the rank that wrote each.
        keys: keys of weights.
        n_stages: pipeline-parallel size.
        world_size: ranks of the run; None when it is not known, which only one stage allows.

    Raises:
        LayoutError: a layer was saved by two stages, layers are missing, or the ranks do not tell.
    """
    if n_stages < 1:
        raise LayoutError("the pipeline-parallel size is not known")
    stage_of: dict[int, set[int]] = {}
    seen: set[int] = set()
    per_stage = world_size // n_stages if world_size else 0
    for key in keys:
        found = layer_key(key)
        rows = chunks.rows_of(tensors.index[key])
        ranks = chunks.rank[rows]
        is_told = per_stage and bool(((ranks >= 0) & (ranks < (world_size or 0))).all())
        if n_stages > 1 and not is_told:
            raise LayoutError(f"which stage saved {key!r} is not known: the world size or the saving ranks are missing")
        stages = ranks // per_stage if n_stages > 1 else np.zeros(len(rows), dtype=np.int64)
        seen.update(stages.tolist())
        if found is None:
            continue
        layers = chunks.offsets[rows, 0] if found[0] is None else np.full(len(rows), found[0])
        for layer, stage in {*zip(layers.tolist(), stages.tolist(), strict=True)}:
            stage_of.setdefault(layer, set()).add(stage)
    if len(seen) < n_stages:
        raise LayoutError(
            f"ranks of {len(seen)} of {counted(n_stages, 'pipeline stage')} saved the weights: the files were not "
            "written by the run that the arguments describe"
        )
    shared = sorted(layer for layer, stages in stage_of.items() if len(stages) > 1)
    if shared:
        raise LayoutError(f"layer {shared[0]} was saved by several pipeline stages: {sorted(stage_of[shared[0]])}")
    absent = absent_numbers(stage_of, max(stage_of, default=-1) + 1, at_most=8)
    if absent:
        raise LayoutError(f"layers {absent} are in no stage, of {counted(max(stage_of) + 1, 'layer')}")
    held: list[list[int]] = [[] for _ in range(n_stages)]
    for layer in sorted(stage_of):
        held[next(iter(stage_of[layer]))].append(layer)
    return held


def chunk_layers(layers: Sequence[int], n_chunks: int) -> list[list[int]]:
    """A stage's layers by model chunk: with virtual stages these are its runs of consecutive layers.

    >>> chunk_layers([0, 1, 4, 5], 2)
    [[0, 1], [4, 5]]

    Raises:
        LayoutError: there are not as many runs as chunks.
    """
    if n_chunks == 1:
        return [list(layers)]
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] + 1 == layer:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    if len(runs) != n_chunks:
        raise LayoutError(
            f"a stage's layers {list(layers)} form {counted(len(runs), 'run')}, expected one for each of "
            f"{counted(n_chunks, 'chunk')}"
        )
    return runs
