"""A census counts what the names of all ranks' tensors tell: layers, experts, and where the ends of the model are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.errors import FormatError, LayoutError
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats.megatron.facts import Facts
from ckpt_tool.formats.megatron.live_names import live_name
from ckpt_tool.formats.megatron.rank_files import Grid
from ckpt_tool.records import dataclass, field

__all__ = ["EXTRA_STATE", "Census", "check_ends", "local_experts"]

EXTRA_STATE = "_extra_state"
"""How the names of what modules serialise themselves end."""
_FIRST, _LAST = "embedding.word_embeddings.", "decoder.final_"


@dataclass
class Census:
    """What the names of all ranks tell."""

    held: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """Layers of each model chunk, by stage and chunk, numbered within it."""
    layers: dict[tuple[int, int, int], dict[str, tuple[int, ...]]] = field(default_factory=dict)
    """Names and shapes in each layer, as the first rank of its stage has them."""
    n_local_experts: int = 0
    has_experts: bool = False
    predicts_ahead: bool = False
    ends: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    """Stage and chunk of what stands at the ends of a model alone."""

    def add(
        self, coord: tuple[int, int, int], number: int, chunk: Mapping[str, Any], names: Mapping[str, str], where: str
    ) -> None:
        """Count one chunk of one rank.

        Raises:
            FormatError: another rank of the stage has other layers.
        """
        stage, *ranks = coord
        held: set[int] = set()
        for name, value in chunk.items():
            live = live_name(name, names)
            self.has_experts |= live.is_expert
            self.predicts_ahead |= name.startswith("mtp.")
            end = next((end for end in (_FIRST, _LAST) if name.startswith(end)), None)
            if end is not None:
                self.ends.setdefault(end, set()).add((stage, number))
            self.n_local_experts = max(self.n_local_experts, (-1 if live.expert is None else live.expert) + 1)
            if live.layer is None or not isinstance(value, TensorRef) or name.endswith(EXTRA_STATE):
                continue
            held.add(live.layer)
            if not any(ranks):
                self.layers.setdefault((stage, number, live.layer), {})[live.rest] = value.shape
        if self.held.setdefault((stage, number), held) != held:
            raise FormatError(f"ranks of stage {stage} hold different layers", where=where)


def check_ends(census: Census, grid: Grid, where: str) -> None:
    """Nothing, where what stands at the ends of a model is in its first and its last chunk.

    Raises:
        FormatError: it is elsewhere, so that files stand in each other's place, or those of the last stage are missing.
    """
    if census.predicts_ahead or grid.pp == 1:  # layers for multi-token prediction move both
        return
    last = max(chunk for _, chunk in census.held)
    for end, place in ((_FIRST, (0, 0)), (_LAST, (grid.pp - 1, last))):
        found = census.ends.get(end, set())
        if found and place not in found:
            stage, chunk = min(found)
            raise FormatError(
                f"{end}* is on stage {stage}{f', chunk {chunk}' if last else ''}, expected on stage {place[0]} of "
                f"{grid.pp}: files stand in each other's place, or stages are missing",
                where=where,
            )


def local_experts(census: Census, grid: Grid, facts: Facts, where: str) -> int:
    """Experts on each rank, by names, or for fused ones by the run's arguments; 0 without experts."""
    if not census.has_experts:
        return 0
    found = census.n_local_experts
    if not found:
        if facts.num_experts is None:
            raise LayoutError("how many experts a fused weight holds is not known: no args.num_experts", where=where)
        return facts.num_experts // grid.ep
    if facts.num_experts not in (None, found * grid.ep):
        raise FormatError(f"{found} experts on each of {grid.ep} ranks, the run had {facts.num_experts}", where=where)
    return found
