"""The grid of a target: pipeline stages, data-, expert- and tensor-parallel ranks, and how DeepSpeed counts them.

Ranks are counted with the stage slowest and the tensor-parallel rank fastest (``runtime/pipe/topology.py``); a
model-parallel rank is a stage and a tensor-parallel rank, as file names have it. Expert-parallel ranks lie inside the
data-parallel ones (``utils/groups.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tool.errors import Unsupported
from ckpt_tool.records import dataclass

__all__ = ["Grid"]


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes of the axes."""

    pp: int = 1
    dp: int = 1
    """Data-parallel ranks, expert-parallel ones included."""
    tp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, mesh: Mapping[str, int]) -> Grid:
        """The grid of a mesh's sizes.

        Raises:
            Unsupported: axes that DeepSpeed's files do not have.
        """
        own = {"pp": 1, "dp": 1, "edp": 1, "ep": 1, "tp": 1}
        wide = {axis: size for axis, size in mesh.items() if axis not in own and size > 1}
        if wide:
            spelled = ", ".join(f"{axis}={size}" for axis, size in wide.items())
            raise Unsupported(
                f"deepspeed is written for pipeline, data-, expert- and tensor-parallel ranks, got {spelled}",
                hint="leave these axes out: their ranks are data-parallel ones to its checkpoints",
            )
        sizes = {**own, **mesh}
        return cls(sizes["pp"], sizes["dp"] * sizes["edp"] * sizes["ep"], sizes["tp"], sizes["ep"])

    @property
    def mp(self) -> int:
        """Number of model-parallel ranks."""
        return self.pp * self.tp

    def rank(self, mp: int, dp: int) -> int:
        """Global rank."""
        stage, tp = divmod(mp, self.tp)
        return (stage * self.dp + dp) * self.tp + tp

    def expert_ranks(self, ep: int, *, data_first: bool) -> tuple[int, ...]:
        """Data-parallel ranks that share the experts of one expert-parallel rank, in the order of their partitions.

        Args:
            ep: the expert-parallel rank.
            data_first: ``use_data_before_expert_parallelism`` of the run.

        >>> Grid(dp=4, ep=2).expert_ranks(1, data_first=False), Grid(dp=4, ep=2).expert_ranks(1, data_first=True)
        ((1, 3), (2, 3))
        """
        n_sharing = self.dp // self.ep
        return tuple(ep * n_sharing + i if data_first else i * self.ep + ep for i in range(n_sharing))
