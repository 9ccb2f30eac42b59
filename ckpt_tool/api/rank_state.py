"""Objects that belong to one rank each: data-loader positions, random states. They cannot be resharded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from ckpt_tool.api.conversion import Dropped
from ckpt_tool.errors import UsageError
from ckpt_tool.manifest.model import Blob

__all__ = ["carry_rank_state"]

# torchtitan: `dataloader.dp_rank_3`; Megatron and others: `rng_state.rank_3`, `rng.rank3`.
_RANK_STATE = re.compile(r"(?:^|\.)(?:data_?loader|rng|rng_states?|random_states?)\b.*?(?:dp_)?rank_?(\d+)(?:\.|$)")


def carry_rank_state(
    blobs: Sequence[Blob], *, dp_size: int, policy: Literal["keep", "drop"] | None
) -> tuple[tuple[Blob, ...], tuple[Dropped, ...]]:
    """The objects that go into the target, and those that do not.

    State of single ranks is carried over when the number of data-parallel ranks stays what it was.

    Raises:
        UsageError: the number changes and no policy says what to do.
    """
    ranks = {blob.fqn: int(match[1]) for blob in blobs if (match := _RANK_STATE.search(blob.fqn))}
    saved = len(set(ranks.values()))
    if not ranks or saved == dp_size or policy == "keep":
        return tuple(blobs), ()
    if policy == "drop":
        dropped = tuple(Dropped(fqn, f"state of one rank of {saved}; the target has {dp_size}") for fqn in ranks)
        return tuple(blob for blob in blobs if blob.fqn not in ranks), dropped
    names = ", ".join(sorted(ranks)[:4])
    raise UsageError(
        f"{len(ranks):,} objects hold the state of single ranks ({names}): saved by {saved} data-parallel ranks, the "
        f"target has {dp_size}, so data would be repeated or skipped",
        hint="say --rank-state drop (start them afresh) or --rank-state keep (carry them as they are)",
    )
