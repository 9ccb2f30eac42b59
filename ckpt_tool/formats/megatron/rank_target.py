"""What each rank of a target has in its files: the tensors of its model chunks, and its buffers of optimizer state.

The inverse of ``rank_model`` and ``rank_state``: global weights are cut, named as the live modules are, and put one
after another as gradient buffers have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats.megatron.buckets import BucketEnds, stored_starts
from ckpt_tool.formats.megatron.parallel import built_in_rules
from ckpt_tool.formats.megatron.rank_files import rank_pairs
from ckpt_tool.formats.megatron.registration import Parameter, layer_key, registered
from ckpt_tool.formats.megatron.target_boxes import weight_key
from ckpt_tool.formats.megatron.target_grid import TargetGrid
from ckpt_tool.formats.megatron.target_stages import target_layers
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["SLOTS", "Flat", "Held", "RankTarget", "rank_targets"]

SLOTS = ("param", "exp_avg", "exp_avg_sq")
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_EXPERTS = "mlp.experts.experts."
_PREDICTING = re.compile(r"(mtp\.layers\.\d+\.)transformer_layer\.(.+)")


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor of a rank."""

    name: str
    """As the live module calls it."""
    key: str
    shape: tuple[int, ...]
    """The rank's own."""
    boxes: tuple[Box, ...]
    """Of the global weight, in the order in which they lie in the rank's tensor."""
    lead_shape: tuple[int, ...] = ()
    """How many layers, and experts, the global weight has as dimensions."""
    is_expert: bool = False
    is_parameter: bool = True
    is_shared: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(box.volume for box in self.boxes)

    @property
    def extra_key(self) -> str | None:
        """What distributed checkpoints call the extra state of its module; None where it is no module's weight."""
        module, is_weight, _ = self.key.rpartition(".weight")
        if not is_weight:
            return None
        n_lead = len(self.boxes[0].offsets) - len(self.shape)
        joined = [".".join(map(str, numbers)) for numbers in (self.boxes[0].offsets[:n_lead], self.lead_shape)]
        return f"{module}._extra_state/shard_" + ("_".join(joined) if n_lead else "0_1")


@dataclass(frozen=True, slots=True)
class Flat:
    """A buffer of optimizer state: parameters with the element that each starts at."""

    chunk: int
    parts: tuple[tuple[Held, int], ...]
    numel: int


@dataclass(frozen=True)
class RankTarget:
    """One model-parallel rank."""

    stage: int
    number: int
    """Within the stage, see ``rank_files.rank_pairs``."""
    expert_rank: int
    tensor_rank: int
    layers: tuple[tuple[int, ...], ...]
    """Global layers of each model chunk."""
    chunks: tuple[tuple[Held, ...], ...]
    experts: range
    n_experts_holders: int
    """Ranks of a stage that gather the state of experts: the first of each group that has the same ones."""

    def flats(self, grid: TargetGrid, args: Mapping[str, Any], *, experts: bool | None) -> list[Flat]:
        """The buffers of one optimizer, by model chunk; ``experts`` None for dense and experts' together."""
        n_ranks = grid.data_parallel_size * grid.cp
        if experts:
            n_ranks = grid.world_size // (grid.pp * grid.ep * grid.expert_tensor_size(args)) or 1
        found = []
        for chunk, held in enumerate(self.chunks):
            members = [one for one in reversed(held) if one.is_parameter and experts in (None, one.is_expert)]
            if not members:
                continue
            apart = [number for number, one in enumerate(members) if one.is_shared]
            ends = _ends(n_ranks, args, self.stage, chunk)
            starts, numel = stored_starts([one.numel for one in members], ends, apart)
            found.append(Flat(chunk, tuple(zip(members, starts, strict=True)), numel))
        return found


def rank_targets(tensors: TensorTable, grid: TargetGrid, args: Mapping[str, Any]) -> Iterator[RankTarget]:
    """All model-parallel ranks, tensor-parallel ones adjoining.

    Args:
        tensors: weights, with paths; others are not looked at.
        grid: the target.
        args: arguments of the run.

    Raises:
        LayoutError: layers or weights cannot be cut so, or a weight's place in a model is not known.
        Unsupported: experts are cut over more ranks than the rest.
    """
    paths = tensors.paths or ()
    shapes = {
        str(path[1]): tensors.shape_of(row)
        for row, path in enumerate(paths)
        if path[0] == "model" and weight_key(path) is not None and "_extra_state" not in str(path[1])
    }
    cutter = _Cutter.of(shapes, grid, args)
    layers = target_layers(grid, cutter.n_layers)
    for stage in range(grid.pp):
        for rank, (expert_rank, tensor_rank) in enumerate(rank_pairs(grid.tp, grid.ep, cutter.etp)):
            experts = range(expert_rank * cutter.n_local_experts, (expert_rank + 1) * cutter.n_local_experts)
            chunks = tuple(
                tuple(cutter.chunk(stage, chunk, own, experts, tensor_rank)) for chunk, own in enumerate(layers[stage])
            )
            numbered = tuple(tuple(own) for own in layers[stage])
            yield RankTarget(stage, rank, expert_rank, tensor_rank, numbered, chunks, experts, grid.ep * cutter.etp)


def _ends(n_ranks: int, args: Mapping[str, Any], stage: int, chunk: int) -> BucketEnds:
    """Where the target's run closes buckets: in the first chunk of the first stage alone, see ``gathered``."""
    if not args.get("overlap_grad_reduce") or (stage, chunk) != (0, 0):
        return BucketEnds(n_ranks, None)
    return BucketEnds(n_ranks, args.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * n_ranks))


@dataclass(frozen=True)
class _Cutter:
    """What holds for all ranks."""

    shapes: Mapping[str, tuple[int, ...]]
    grid: TargetGrid
    is_tied: bool
    predicts_ahead: bool
    is_grouped: bool
    live_names: Mapping[str, str]
    order: str
    n_layers: int
    n_local_experts: int
    etp: int
    """Tensor-parallel ranks of experts."""

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], grid: TargetGrid, args: Mapping[str, Any]) -> _Cutter:
        numbers = [found[0] for key in shapes if (found := layer_key(key)) is not None and found[0] is not None]
        stacked = [shape[0] for key, shape in shapes.items() if (found := layer_key(key)) and found[0] is None]
        n_layers = max([*stacked, *(number + 1 for number in numbers)], default=0)
        n_experts = max((cls._experts_in(key, shape) for key, shape in shapes.items()), default=0)
        if n_experts % grid.ep:
            raise LayoutError(
                f"{counted(n_experts, 'expert', 'are')} no equal share for each of {grid.ep} expert-parallel ranks"
            )
        is_local = args.get("transformer_impl") == "local"
        rules = built_in_rules()
        live = {ours: name for name, ours in rules.local_names.items()} if is_local else {}
        return cls(
            shapes, grid, _OUTPUT not in shapes, any(key.startswith("mtp.") for key in shapes),
            bool(args.get("moe_grouped_gemm")), live,
            "local" if is_local else "transformer_engine", n_layers, n_experts // grid.ep,
            grid.expert_tensor_size(args) if n_experts else grid.tp,
        )  # fmt: skip

    @staticmethod
    def _experts_in(key: str, shape: tuple[int, ...]) -> int:
        found = layer_key(key)
        if found is None or not found[1].startswith(_EXPERTS):
            return 0
        if found[1].removeprefix(_EXPERTS).partition(".")[0].isdecimal():
            raise Unsupported(f"{key!r} has the number of its expert in its name", hint="use --to megatron-dist")
        return shape[1 if found[0] is None else 0]

    def chunk(self, stage: int, number: int, layers: Sequence[int], experts: range, tensor_rank: int) -> Iterator[Held]:
        """The tensors of one model chunk of a rank, parameters in order of registration."""
        is_first = stage == 0 and number == 0
        is_last = stage == self.grid.pp - 1 and number == self.grid.vpp - 1
        is_shared = (self.is_tied or self.predicts_ahead) and self.grid.pp > 1
        rules = built_in_rules()
        buffers = {key for key in self.shapes if rules.cut(_rest(key)) == "buffer"}
        try:
            parameters = registered(
                [key for key in self.shapes if key not in buffers], layers, experts, order=self.order,
                is_grouped=self.is_grouped, is_first=is_first, is_last=is_last,
                is_tied=is_shared and self.is_tied,
            )  # fmt: skip
        except LayoutError as error:
            error.hint = "use --to megatron-dist, which needs none"
            raise
        for parameter in parameters:
            name = parameter.live or self._live(parameter, layers, experts)
            yield self._held(name, parameter, tensor_rank, is_shared=is_shared and parameter.key == _EMBEDDING)
        for key in sorted(buffers):
            found = layer_key(key)
            if found is None and is_last:
                yield self._held(
                    self._live(Parameter(key, ()), layers, experts), Parameter(key, ()), tensor_rank, is_buffer=True
                )
            for layer in layers if found is not None and found[0] in (None, *layers) else ():
                if found is not None and found[0] in (None, layer):
                    parameter = Parameter(key, (layer,) if found[0] is None else ())
                    yield self._held(self._live(parameter, layers, experts), parameter, tensor_rank, is_buffer=True)

    def _live(self, parameter: Parameter, layers: Sequence[int], experts: range) -> str:
        """What the module is called in its chunk."""
        found, ahead = layer_key(parameter.key), _PREDICTING.fullmatch(parameter.key)
        if ahead is not None:
            return f"{ahead[1]}mtp_model_layer.{self._inside(ahead[2], parameter, experts)}"
        if found is None:
            return parameter.key
        layer = layers.index(parameter.lead[0] if found[0] is None else found[0])
        return f"decoder.layers.{layer}.{self._inside(found[1], parameter, experts)}"

    def _inside(self, rest: str, parameter: Parameter, experts: range) -> str:
        """What a parameter is called in its layer."""
        rest = self.live_names.get(rest, rest)
        if parameter.is_expert:
            module, leaf = rest.removeprefix(_EXPERTS).split(".", 1)
            expert = experts.index(parameter.lead[-1])
            rest = (
                f"mlp.experts.{module}.{leaf}{expert}"
                if self.is_grouped
                else f"mlp.experts.local_experts.{expert}.{module}.{leaf}"
            )
        return rest

    def _is_gated(self, key: str, inner: tuple[int, ...]) -> bool:
        """Whether the first layer of an MLP is twice as wide as the second one is deep."""
        second = self.shapes.get(
            key.replace("linear_fc1", "linear_fc2").removesuffix(".bias").removesuffix(".weight") + ".weight"
        )
        if second is None or inner[0] not in (second[-1], 2 * second[-1]):
            raise LayoutError("whether it is gated is not known: no second layer of half or equal width", where=key)
        return inner[0] == 2 * second[-1]

    def _held(
        self, name: str, parameter: Parameter, tensor_rank: int, *, is_shared: bool = False, is_buffer: bool = False
    ) -> Held:
        key, lead = parameter.key, parameter.lead
        inner = self.shapes[key][len(lead) :]
        n_ranks = self.etp if parameter.is_expert else self.grid.tp
        cut = built_in_rules().cut(_rest(key))
        if cut in (None, "fused") and n_ranks > 1:
            raise LayoutError(
                f"no rule says how it is cut over {counted(n_ranks, 'tensor-parallel rank')}", where=key,
                hint="use --to megatron-dist, which needs none",
            )  # fmt: skip
        ones = (1,) * len(lead)
        dim = 1 if cut == "row" else 0
        is_cut = cut in ("column", "row", "gated") and n_ranks > 1
        n_parts = 2 if is_cut and cut == "gated" and self._is_gated(key, inner) else 1
        if not is_cut:
            boxes = [Box((*lead, *(0,) * len(inner)), (*ones, *inner))]
        else:
            size, left = divmod(inner[dim], n_parts * n_ranks) if dim < len(inner) else (0, 1)
            if left:
                raise LayoutError(
                    f"{list(self.shapes[key])} is not cut into {counted(n_ranks, 'equal part')} along dimension {dim}",
                    where=key,
                )
            starts = [(part * n_ranks + tensor_rank % n_ranks) * size for part in range(n_parts)]
            boxes = [
                Box(
                    (*lead, *(start if d == dim else 0 for d in range(len(inner)))),
                    (*ones, *(size if d == dim else n for d, n in enumerate(inner))),
                )
                for start in starts
            ]
        shape = tuple(
            sum(box.sizes[len(lead) + d] for box in boxes) if d == dim else n for d, n in enumerate(inner)
        ) if is_cut else inner  # fmt: skip
        return Held(
            name, key, shape, tuple(boxes), self.shapes[key][: len(lead)], parameter.is_expert,
            is_parameter=not is_buffer, is_shared=is_shared,
        )  # fmt: skip


def _rest(key: str) -> str:
    """The name that rules are about."""
    found = layer_key(key)
    return key if found is None else found[1]
