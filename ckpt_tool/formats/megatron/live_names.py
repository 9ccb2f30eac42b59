"""Live names are what modules call their parameters, as per-rank files have them; here they become keys.

Layers are numbered within a model chunk, experts within a rank. mcore's own modules (the local spec) and Transformer
Engine's have different names for the norms; keys have those of Transformer Engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_tool.errors import FormatError
from ckpt_tool.records import dataclass

__all__ = ["LiveName", "live_name", "stage_offsets", "uses_local_names"]

_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_PREDICTING = re.compile(r"(mtp\.layers\.\d{1,6}\.)(?:transformer|mtp_model)_layer\.(.+)")
"""A layer for multi-token prediction has another one in it, whose name in checkpoints stayed what it was first."""
_SEQUENTIAL = re.compile(r"mlp\.experts\.local_experts\.(\d{1,6})\.(linear_fc[12]\..+)")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d{1,6})")
_FUSED = re.compile(r"mlp\.experts\.weight([12])")
_EXPERTS = "mlp.experts.experts."


@dataclass(frozen=True, slots=True)
class LiveName:
    """A live name, taken apart."""

    rest: str
    """The key, without ``decoder.layers.`` where it is one of a layer's."""
    layer: int | None = None
    """Within the model chunk."""
    expert: int | None = None
    """Within the rank."""
    is_fused: bool = False
    """All experts of the rank in one tensor, each transposed (mcore's GroupedMLP)."""

    @property
    def is_expert(self) -> bool:
        """Whether it is one expert's, or all of them."""
        return _EXPERTS in self.rest


def live_name(name: str, local_names: Mapping[str, str]) -> LiveName:
    """What a live name says; ``local_names`` renames those of mcore's own modules.

    >>> live_name("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight", {})
    LiveName(rest='mlp.experts.experts.linear_fc1.weight', layer=1, expert=3, is_fused=False)
    """
    match, predicting = _LAYER.fullmatch(name), _PREDICTING.fullmatch(name)
    if predicting is not None:
        inner = _in_layer(predicting[2], None, local_names)
        return replace(inner, rest=f"{predicting[1]}transformer_layer.{inner.rest}")
    return LiveName(name) if match is None else _in_layer(match[2], int(match[1]), local_names)


def _in_layer(rest: str, layer: int | None, local_names: Mapping[str, str]) -> LiveName:
    """What the name of a layer's parameter says."""
    sequential, grouped, fused = _SEQUENTIAL.fullmatch(rest), _GROUPED.fullmatch(rest), _FUSED.fullmatch(rest)
    if sequential is not None:
        return LiveName(_EXPERTS + sequential[2], layer, int(sequential[1]))
    if grouped is not None:
        return LiveName(f"{_EXPERTS}{grouped[1]}.{grouped[2]}", layer, int(grouped[3]))
    if fused is not None:
        return LiveName(f"{_EXPERTS}linear_fc{fused[1]}.weight", layer, is_fused=True)
    return LiveName(local_names.get(rest, rest), layer)


def uses_local_names(names: Sequence[str], transformer_impl: str | None) -> bool:
    """Whether norms stand under the names of mcore's own modules: as the run says, else by the attention's norm."""
    if transformer_impl is not None:
        return transformer_impl == "local"
    rests = {match[2] for name in names if (match := _LAYER.fullmatch(name)) is not None}
    return "self_attention.linear_qkv.weight" in rests and "self_attention.linear_qkv.layer_norm_weight" not in rests


def stage_offsets(held: Mapping[tuple[int, int], Sequence[int]], where: str) -> dict[tuple[int, int], int]:
    """Global number of the first layer of each model chunk, by stage and chunk.

    Layers run through chunk 0 of all stages, then through chunk 1; so the numbers of layers that the chunks hold are
    all that is needed, even or not.

    Args:
        held: layer numbers within the chunk, by stage and chunk.
        where: names the checkpoint in messages.

    Raises:
        FormatError: a chunk's layers are not numbered from 0 on.

    >>> stage_offsets({(0, 0): [0], (0, 1): [0], (1, 0): [0, 1], (1, 1): [0]}, "")
    {(0, 0): 0, (1, 0): 1, (0, 1): 3, (1, 1): 4}
    """
    offsets: dict[tuple[int, int], int] = {}
    n_layers = 0
    for stage, chunk in sorted(held, key=lambda place: (place[1], place[0])):
        numbers = sorted(set(held[stage, chunk]))
        if numbers != list(range(len(numbers))):
            raise FormatError(
                f"model chunk {chunk} of stage {stage} has the layers {numbers[:8]}, expected them numbered from 0 on",
                where=where,
            )
        offsets[stage, chunk] = n_layers
        n_layers += len(numbers)
    return offsets
