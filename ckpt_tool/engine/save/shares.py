"""A share is what the root tells a rank to write, as it travels down the tree: a bit per box, and objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ckpt_tool.engine.save.assignment import Assigned
from ckpt_tool.engine.save.wire import Message
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.records import dataclass

__all__ = ["Share", "shares_message", "shares_of", "told"]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share."""

    n_boxes: int
    """Boxes that the rank holds."""
    bits: bytes
    objects: tuple[int, ...]

    @property
    def rows(self) -> IntArray:
        """Boxes that it writes, ascending."""
        flags = np.unpackbits(np.frombuffer(self.bits, dtype=np.uint8), count=self.n_boxes)
        return np.flatnonzero(flags).astype(np.int64)


def told(assigned: Assigned) -> Share:
    """What one rank is told."""
    mask = np.zeros(len(assigned.held), dtype=np.bool_)
    mask[assigned.rows] = True
    return Share(len(mask), np.packbits(mask).tobytes(), assigned.objects)


def shares_message(number: int, shares: Mapping[int, Share], ranks: Iterable[int]) -> Message:
    """The shares of ``ranks`` in the save ``number``."""
    chosen = [(rank, shares[rank]) for rank in ranks]
    listed = [[rank, share.n_boxes, len(share.bits), list(share.objects)] for rank, share in chosen]
    return Message("assign", {"save": number, "ranks": listed}, b"".join(share.bits for _, share in chosen))


def shares_of(message: Message) -> dict[int, Share]:
    """What ``shares_message`` was given."""
    body, at, shares = bytes(message.body), 0, {}
    for rank, n_boxes, nbytes, objects in message.fields["ranks"]:
        shares[int(rank)] = Share(n_boxes, body[at : at + nbytes], tuple(objects))
        at += nbytes
    return shares
