"""Which layers each model chunk of a target has, by Megatron's own spread over stages and virtual stages.

Source: Megatron-LM core 0.19, ``transformer/transformer_layer.py``, ``get_transformer_layer_offset``.
"""

from __future__ import annotations

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats.megatron.target_grid import TargetGrid
from ckpt_tool.sizes import counted, counted_of

__all__ = ["target_layers"]


def target_layers(grid: TargetGrid, n_layers: int) -> list[list[list[int]]]:
    """Global layers by stage and model chunk.

    Raises:
        LayoutError: the layers cannot be spread so.

    >>> target_layers(TargetGrid(1, 2, 1, 1, 2, vpp=2), 4)
    [[[0], [2]], [[1], [3]]]
    """
    if grid.first_stage_layers is None and grid.last_stage_layers is None:
        n_chunks = grid.pp * grid.vpp
        if n_layers % n_chunks:
            raise LayoutError(
                f"{counted(n_layers, 'layer', 'are')} no equal share for each of {grid.pp} stages x {grid.vpp} chunks",
                hint="--first-stage-layers and --last-stage-layers spread them unevenly",
            )
        size = n_layers // n_chunks
        starts = [[(chunk * grid.pp + stage) * size for chunk in range(grid.vpp)] for stage in range(grid.pp)]
        return [[list(range(start, start + size)) for start in of_stage] for of_stage in starts]
    if grid.vpp > 1:
        raise LayoutError("an uneven spread over virtual stages is not known", hint="leave out --vpp")
    first, last = grid.first_stage_layers, grid.last_stage_layers
    n_between = grid.pp - (first is not None) - (last is not None)
    left = n_layers - (first or 0) - (last or 0)
    if left < 0 or (n_between and left % n_between) or (not n_between and left):
        raise LayoutError(
            f"{counted_of(left, n_layers, 'layer', 'are')} no equal share for each of "
            f"{counted(n_between, 'other stage')}"
        )
    between = left // n_between if n_between else 0
    sizes = [
        first if stage == 0 and first is not None else last if stage == grid.pp - 1 and last is not None else between
        for stage in range(grid.pp)
    ]
    return [[list(range(sum(sizes[:stage]), sum(sizes[: stage + 1])))] for stage in range(grid.pp)]
