"""Shards are what model-parallel ranks hold of the weights, in the order of their gradient buffers.

Group ``g`` of the optimizer's keys is the model-parallel rank ``pp * TP + tp``, of experts' ``(pp * EP + ep) * ETP +
etp``. The order of registration is not recorded: the known ones are tried, and the stored sizes decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats.megatron.cuts import Local, Weights
from ckpt_tool.formats.megatron.facts import Facts
from ckpt_tool.formats.megatron.registration import layer_key, order_names, registered
from ckpt_tool.formats.megatron.stages import chunk_layers, stage_layers
from ckpt_tool.geometry.box import Box
from ckpt_tool.records import dataclass

__all__ = ["Segment", "Shards", "segments"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a bucket's elements that is one box of a weight's state."""

    key: str
    start: int
    box: Box

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.box.volume


@dataclass(frozen=True)
class Shards:
    """What each model-parallel rank holds of the weights, in the order of its gradient buffers."""

    weights: Weights
    keys: tuple[str, ...]
    facts: Facts
    world_size: int | None

    @cached_property
    def stages(self) -> list[list[int]]:
        """Global layers of each stage.

        Raises:
            LayoutError: the ranks that saved them do not tell.
        """
        return stage_layers(
            self.weights.tensors,
            self.weights.chunks,
            self.keys,
            n_stages=self.facts.pp or 0,
            world_size=self.world_size,
        )

    @cached_property
    def n_experts(self) -> int:
        """Experts of a layer, by the shapes of their weights; 0 without any.

        Raises:
            LayoutError: the run had another number.
        """
        tensors = self.weights.tensors
        counts: set[int] = set()
        for key in self.keys:
            of_layer = layer_key(key)
            if of_layer is not None and of_layer[1].startswith("mlp.experts.experts."):
                shape = tensors.shape_of(tensors.index[key])
                counts.update(shape[1:2] if of_layer[0] is None else shape[:1])
        stated = self.facts.num_experts
        if len(counts) > 1 or (counts and stated not in (None, *counts)):
            raise LayoutError(f"experts' weights are of {sorted(counts)} experts, the run had {stated}")
        return counts.pop() if counts else 0

    @cached_property
    def predicts_ahead(self) -> bool:
        """Whether there are layers for multi-token prediction, whose stage has a copy of the embedding."""
        return any(key.startswith("mtp.") for key in self.keys)

    def stage_of(self, group: int, *, experts: bool) -> int:
        """Pipeline stage of a group of the optimizer's keys.

        Raises:
            LayoutError: the run's parallel sizes are not known, or there is no such group.
        """
        tp, pp = self.facts.tp, self.facts.pp
        if tp is None or pp is None:
            raise LayoutError("the tensor- and pipeline-parallel sizes of the run are not known: no args were saved")
        stage = group // (self.facts.ep * (self.facts.etp or tp) if experts else tp)
        if stage >= pp:
            raise LayoutError(f"group {group} of the optimizer is of stage {stage}, the run had {pp} stages")
        return stage

    def local(self, group: int, chunk: int, dtype: str, *, order: str, is_grouped: bool, experts: bool) -> list[Local]:
        """A rank's parameters of one element type in one model chunk, in the order of the gradient buffer.

        Args:
            group: model-parallel rank, as the keys number it.
            chunk: model chunk (virtual stage).
            dtype: name of the weights' element type.
            order: one of ``registration.order_names``.
            is_grouped: whether experts' first layers all come before the second ones.
            experts: take only experts' weights; with more than one expert-parallel rank they have an optimizer apart.

        Raises:
            LayoutError: a fact is missing, or contradicts the stored boxes.
        """
        facts = self.facts
        stage = self.stage_of(group, experts=experts)
        tp, pp, ep = facts.tp or 1, facts.pp or 1, facts.ep
        etp = facts.etp or tp
        tensor_rank = group % (etp if experts else tp)
        expert_rank = group // etp % ep if experts else 0
        tensors = self.weights.tensors
        layers = chunk_layers(self.stages[stage], facts.vpp)[chunk]
        own = self.n_experts // ep
        chosen = range(expert_rank * own, (expert_rank + 1) * own)
        parameters = registered(
            self.keys, layers, chosen, order=order, is_grouped=is_grouped,
            is_first=stage == 0 and chunk == 0, is_last=stage == pp - 1 and chunk == facts.vpp - 1,
            is_tied=pp > 1 and facts.untie_embeddings_and_output_weights is False,
        )  # fmt: skip
        kept = [
            parameter
            for parameter in parameters
            if (not facts.parts_experts or parameter.is_expert == experts)
            and tensors.dtypes[tensors.index[parameter.key]].name == dtype
        ]
        return [
            self.weights.local(one.key, one.lead, tensor_rank, etp if one.is_expert else tp) for one in reversed(kept)
        ]

    def fitting(
        self,
        group: int,
        chunk: int,
        dtype: str,
        split: Callable[[Sequence[Local]], Sequence[Sequence[Segment]] | None],
        *,
        experts: bool,
        what: str,
    ) -> tuple[str, Sequence[Sequence[Segment]]]:
        """The order of registration that fits what is stored, and where it puts each parameter.

        Args:
            group: as in `local`, like ``chunk``, ``dtype`` and ``experts``.
            chunk: see above.
            dtype: see above.
            split: segments of each bucket when a rank's parameters are these, None when sizes do not fit.
            experts: see above.
            what: names the buckets in messages.

        Raises:
            LayoutError: no order fits, or several that mean different places do and the run does not say which.
        """
        found: dict[tuple[tuple[Segment, ...], ...], list[tuple[str, bool]]] = {}
        for order, is_grouped in product(order_names(), (False, True)):
            tried = split(self.local(group, chunk, dtype, order=order, is_grouped=is_grouped, experts=experts))
            if tried is not None:
                found.setdefault(tuple(tuple(of_bucket) for of_bucket in tried), []).append((order, is_grouped))
        for position, stated in enumerate((self.facts.transformer_impl, self.facts.moe_grouped_gemm)):
            if len(found) > 1 and stated is not None:
                found = {s: names for s, names in found.items() if stated in {name[position] for name in names}}
        if len(found) == 1:
            placed, names = next(iter(found.items()))
            return names[0][0], placed
        if not found:
            raise LayoutError(f"no known order of registration fits {what}")
        readings = " and ".join(f"{order}{', experts grouped' * grouped}" for (order, grouped), *_ in found.values())
        raise LayoutError(
            f"{len(found)} orders of registration fit {what}: {readings}; args.transformer_impl and "
            "args.moe_grouped_gemm do not tell which"
        )

    def is_apart(self, local: Local) -> bool:
        """Whether the parameter has a bucket of its own: an embedding that the first and the last stage share."""
        has_copy = self.facts.untie_embeddings_and_output_weights is False or self.predicts_ahead
        return has_copy and (self.facts.pp or 1) > 1 and local.key == "embedding.word_embeddings.weight"


def segments(held: Sequence[tuple[Local, int]]) -> list[Segment]:
    """Segments of parameters, each with the element that it begins at, in order."""
    found = []
    for local, start in held:
        at = start
        for box in local.boxes:
            found.append(Segment(local.key, at, box))
            at += box.volume
    return found
