"""A stage is a pipeline rank; layers are spread over stages, and with virtual stages in several rounds.

Knows layer numbers only, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["LayerStages", "StageOptions", "layer_stages"]


@dataclass(frozen=True, slots=True)
class StageOptions:
    """How layers are spread where an even spread is not wanted."""

    vpp: int = 1
    """Model chunks per stage: layers go round the stages this many times."""
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerStages:
    """Where each layer lies."""

    stage: Int64Array  # int64[n_layers]
    chunk: Int64Array  # int64[n_layers], number of the model chunk in its stage; all 0 without virtual stages

    def __str__(self) -> str:
        """The map as people read it: ``stage 0: layers 0-2, stage 1: layers 3-4``."""
        n_stages = int(self.stage.max(initial=-1)) + 1
        n_chunks = int(self.chunk.max(initial=-1)) + 1
        lines = []
        for stage in range(n_stages):
            for chunk in range(n_chunks):
                held = np.flatnonzero((self.stage == stage) & (self.chunk == chunk)).tolist()
                which = f"stage {stage}" if n_chunks == 1 else f"stage {stage} chunk {chunk}"
                lines.append(f"{which}: {_span(held)}")
        return ", ".join(lines)


def layer_stages(n_layers: int, pp: int, options: StageOptions) -> LayerStages:
    """Stage and model chunk of every layer; each layer lies on exactly one, in ascending order within a chunk.

    Stages get equal numbers of layers, the first ones one more where that does not divide; the numbers of the first and
    the last stage may be given. With ``vpp`` chunks a stage's layers are spread over its chunks in the same way, and
    layers run through chunk 0 of all stages, then chunk 1 (Megatron-Core, interleaved schedule).

    >>> str(layer_stages(5, 2, StageOptions()))
    'stage 0: layers 0-2, stage 1: layers 3-4'
    >>> layer_stages(8, 2, StageOptions(vpp=2)).stage.tolist()
    [0, 0, 1, 1, 0, 0, 1, 1]

    Raises:
        LayoutError: the given numbers leave too few or too many layers for the others.
    """
    if pp < 1 or options.vpp < 1:
        raise LayoutError(f"pp and vpp must be at least 1, got pp={pp}, vpp={options.vpp}")
    per_stage = _stage_sizes(n_layers, pp, options)
    per_slot = np.stack([_spread(n, options.vpp) for n in per_stage.tolist()], axis=1)  # int64[vpp, pp]
    slot = np.repeat(np.arange(per_slot.size, dtype=np.int64), per_slot.reshape(-1))
    return LayerStages(stage=slot % pp, chunk=slot // pp)


def _stage_sizes(n_layers: int, pp: int, options: StageOptions) -> Int64Array:
    given = {0: options.first_stage_layers, pp - 1: options.last_stage_layers}
    if pp == 1 and None not in (options.first_stage_layers, options.last_stage_layers):
        given = {0: options.first_stage_layers}
    fixed = {stage: n for stage, n in given.items() if n is not None}
    left = n_layers - sum(fixed.values())
    free = [stage for stage in range(pp) if stage not in fixed]
    if left < 0 or min(fixed.values(), default=0) < 0 or (left > 0 and not free):
        raise LayoutError(
            f"{counted(n_layers, 'layer')} on {pp} stages do not fit {fixed.get(0, 'any')} on the first and "
            f"{fixed.get(pp - 1, 'any')} on the last stage, {left} left over",
            hint="give numbers that add up to the layers of the model",
        )
    sizes = np.zeros(pp, dtype=np.int64)
    sizes[list(fixed)] = list(fixed.values())
    sizes[free] = _spread(left, len(free)) if free else []
    return sizes


def _spread(n: int, parts: int) -> Int64Array:
    """Sizes of ``parts`` nearly equal shares of ``n``, larger ones first."""
    return n // parts + (np.arange(parts, dtype=np.int64) < n % parts).astype(np.int64)


def _span(layers: Sequence[int]) -> str:
    if not layers:
        return "no layers"
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
