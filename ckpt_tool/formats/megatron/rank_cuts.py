"""How one rank's tensors are cut: by rules that go by name, and by the shapes of what lies beside them in the layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats.megatron.live_names import LiveName
from ckpt_tool.formats.megatron.parallel import OWN_RULES, Cut, ParallelRules, part_rows
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Cutter"]

_WHOLE = Cut("whole")


@dataclass(frozen=True, slots=True)
class Cutter:
    """What decides about cuts."""

    rules: ParallelRules
    swiglu: bool | None
    """What the run's arguments say, for layers whose shapes do not tell."""
    where: str
    """Names the checkpoint in messages."""

    def cut(
        self, name: str, live: LiveName, tensor: TensorRef, state: Mapping[str, Any], n_ranks: int
    ) -> tuple[Cut, tuple[int, ...]]:
        """The cut of a tensor, and of a fused one the rows that each part has on the rank.

        Args:
            name: as the file has it.
            live: the same, taken apart.
            tensor: the rank's own.
            state: all tensors of the rank's model chunk.
            n_ranks: tensor-parallel ranks that share the weight.

        Raises:
            LayoutError: it is cut over several ranks, and no rule or shape says how.
        """
        cut = self.rules.rule(live.rest)
        if cut is None and n_ranks > 1:
            raise LayoutError(
                f"no rule says how {live.rest!r} (here {list(tensor.shape)}) is cut over {n_ranks} "
                "tensor-parallel ranks",
                where=self.where,
                hint=f"put a file {OWN_RULES} beside the rank folders, with lines such as: [[rule]] names = "
                f"['{live.rest}'] cut = \"column\" (or row, gated, whole, buffer; or fused with parts = [4, 2, 6], "
                "whose rows are cut part by part)",
            )
        if cut is None:
            return _WHOLE, ()
        if cut.kind == "gated" and n_ranks > 1:
            return (cut if self._is_gated(name, live, tensor, state) else Cut("column")), ()
        if cut.kind != "fused":
            return cut, ()
        try:
            return cut, part_rows(cut.parts, tensor.shape[0] if tensor.shape else 0, _beside(name, live, state))
        except LayoutError as error:
            if n_ranks == 1:  # another module by the same name; it is whole here
                return _WHOLE, ()
            error.where = f"{self.where}: {name}"
            raise

    def _is_gated(self, name: str, live: LiveName, tensor: TensorRef, state: Mapping[str, Any]) -> bool:
        """Whether the first layer of an MLP is twice as wide as the second one is deep."""
        partner = "weight2" if live.is_fused else "linear_fc2"
        first = name.replace(".bias", ".weight")
        second = state.get(first.replace("weight1" if live.is_fused else "linear_fc1", partner))
        if not isinstance(second, TensorRef) or len(second.shape) != 2:
            if self.swiglu is not None:
                return self.swiglu
            raise LayoutError(f"whether {name!r} is gated is not known: no second layer", where=self.where)
        rows, depth = (tensor.shape[1], second.shape[0]) if live.is_fused else (tensor.shape[0], second.shape[1])
        if rows not in (depth, 2 * depth):
            raise LayoutError(
                f"{name!r} has {counted(rows, 'row')}, its second layer {counted(depth, 'column')}: neither as many "
                "nor twice as many",
                where=self.where,
            )
        return rows == 2 * depth


def _beside(name: str, live: LiveName, state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of the same layer, by their names in it."""
    front = name.removesuffix(live.rest)
    return {
        other.removeprefix(front): value.shape
        for other, value in state.items()
        if isinstance(value, TensorRef) and other.startswith(front)
    }
