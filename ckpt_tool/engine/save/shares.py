"""A share is what the root tells a rank to write, as it travels down the tree: a bit per box, parts, and objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ckpt_tool.engine.save.assignment import Assigned
from ckpt_tool.engine.save.columns import HeldState
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
    """Which of them it writes as a whole."""
    parts: bytes
    """Of which of them it writes what: rows ``<i8`` of a box's number, offsets and sizes; there are few."""
    objects: tuple[int, ...]

    def of(self, held: HeldState) -> Assigned:
        """What is to be written of what the rank holds."""
        flags = np.unpackbits(np.frombuffer(self.bits, dtype=np.uint8), count=self.n_boxes)
        whole = np.flatnonzero(flags).astype(np.int64)
        width = held.names.width
        parts: IntArray = np.frombuffer(self.parts, dtype="<i8").astype(np.int64).reshape(-1, 1 + 2 * width)
        rows = np.concatenate([whole, parts[:, 0]])
        offsets = np.concatenate([held.offsets[whole], parts[:, 1 : 1 + width]])
        sizes = np.concatenate([held.sizes[whole], parts[:, 1 + width :]])
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        return Assigned(
            held, rows, HeldState(held.names, held.tensor[rows], offsets[order], sizes[order]), self.objects
        )


def told(assigned: Assigned) -> Share:
    """What one rank is told."""
    held, rows, boxes = assigned.held, assigned.rows, assigned.boxes
    is_part = (boxes.sizes != held.sizes[rows]).any(axis=1)
    mask = np.zeros(len(held), dtype=np.bool_)
    mask[rows[~is_part]] = True
    parts = np.concatenate([rows[is_part, None], boxes.offsets[is_part], boxes.sizes[is_part]], axis=1)
    return Share(len(mask), np.packbits(mask).tobytes(), parts.astype("<i8").tobytes(), assigned.objects)


def shares_message(number: int, shares: Mapping[int, Share], ranks: Iterable[int]) -> Message:
    """The shares of ``ranks`` in the save ``number``."""
    chosen = [(rank, shares[rank]) for rank in ranks]
    listed = [[rank, one.n_boxes, len(one.bits), len(one.parts), list(one.objects)] for rank, one in chosen]
    body = b"".join(blob for _, share in chosen for blob in (share.bits, share.parts))
    return Message("assign", {"save": number, "ranks": listed}, body)


def shares_of(message: Message) -> dict[int, Share]:
    """What ``shares_message`` was given."""
    body, at, shares = bytes(message.body), 0, {}
    for rank, n_boxes, n_bits, n_parts, objects in message.fields["ranks"]:
        middle, end = at + n_bits, at + n_bits + n_parts
        shares[int(rank)] = Share(n_boxes, body[at:middle], body[middle:end], tuple(objects))
        at = end
    return shares
