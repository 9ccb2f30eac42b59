"""The coordinator is the process at the root of the control tree: it assigns boxes to ranks, and ends a save.

It remembers what it assigned under each rank's structure, so that a save of known structures needs no planning. Pure
but for the target that it is given to commit.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckpt_tool.engine.save.assignment import Assigned, GlobalState, assign
from ckpt_tool.engine.save.columns import HeldState, Names, fqn_of
from ckpt_tool.engine.save.rounds import Report
from ckpt_tool.errors import CkptError, LayoutError, StorageError
from ckpt_tool.formats.base import CuttingWriter
from ckpt_tool.formats.joint import Joined, JointWriter, PlacedObject
from ckpt_tool.manifest.digest import Part, content_digest
from ckpt_tool.manifest.digest_table import DigestRow, DigestTable
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.manifest.tables import SECTIONS, IntArray, TensorTable
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.shared_target import SharedTarget

__all__ = ["Coordinator", "Stale"]

_MAX_JOINS = 4


class Stale(CkptError):
    """What ranks remember does not fit together any more; they must forget it and plan anew."""


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """What ranks wrote together."""

    tensors: TensorTable
    tensor: IntArray
    """int64[n]: of each box, in order of ranks and of what each of them wrote."""
    joined: Joined


class Coordinator:
    """Plans and commits for all ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._names: dict[str, Names] = {}
        self._assigned: dict[tuple[int, str], Assigned] = {}
        self._joins: OrderedDict[bytes, _Parts] = OrderedDict()

    def forget(self) -> None:
        """Let go of all assignments."""
        self._assigned.clear()
        self._joins.clear()

    def plan(self, report: Report, writer: JointWriter) -> dict[int, Assigned]:
        """What each planning rank writes, in parts of boxes where the format may have them.

        Raises:
            LayoutError: ranks disagree about a tensor.
            CoverageError: together they do not have the whole of each tensor.
            Stale: a rank has written what it was assigned in a forgotten plan.
        """
        for digest, data in report.names.items():
            if digest not in self._names:
                self._names[digest] = Names.decoded(data)
        planning = {
            rank: HeldState.decoded(self._names[entry.names], entry.boxes) for rank, entry in report.plans.items()
        }
        written = {int(entry["rank"]): self._known(entry) for entry in report.done}
        may_cut = writer.may_cut if isinstance(writer, CuttingWriter) else None
        _, assigned = assign(planning, written, self._size, may_cut)
        for rank, entry in report.plans.items():
            self._assigned[rank, entry.key] = assigned[rank]
        return {rank: assigned[rank] for rank in planning}

    def commit(self, report: Report, target: SharedTarget, writer: JointWriter) -> int:
        """Make the files of all ranks one checkpoint; returns its bytes.

        Raises:
            LayoutError: ranks have saved to different places, or in different formats.
            CoverageError: together they have not written the whole of each tensor.
            StorageError: the storage failed.
        """
        entries = sorted(report.done, key=lambda entry: int(entry["rank"]))
        if [entry["rank"] for entry in entries] != list(range(self._size)):
            raise StorageError(f"expected word from {counted(self._size, 'rank')}, got {len(entries):,}")
        places = {(entry["url"], entry["format"]): entry["rank"] for entry in reversed(entries)}
        if len(places) > 1:
            what = "to different places" if len({url for url, _ in places}) > 1 else "in different formats"
            by_rank = sorted((rank, *place) for place, rank in places.items())
            told = ", ".join(f"rank {rank} to {url} as {format_name}" for rank, url, format_name in by_rank)
            raise LayoutError(f"ranks save {what}: {told}")
        files = {path: int(nbytes) for entry in entries for path, nbytes in entry["files"].items()}
        receipts = {path: receipt for entry in entries for path, receipt in entry["receipts"].items()}
        parts = self._parts(entries, writer)
        last = parts.joined.last(list(self._objects(entries)), files)
        digests = _digests(parts, entries, writer.name)
        target.commit(files, [(segment.path, segment.data) for segment in last], receipts, digests)
        return sum(files.values()) + sum(len(segment.data) for segment in last)

    def _known(self, entry: Mapping[str, Any]) -> Assigned:
        found = self._assigned.get((int(entry["rank"]), str(entry["key"])))
        if found is None:
            raise Stale(f"rank {entry['rank']} has written by a plan that is not known here")
        return found

    def _parts(self, entries: Sequence[Mapping[str, Any]], writer: JointWriter) -> _Parts:
        """What joins the parts of these structures; made once for each combination of them."""
        text = "\n".join([writer.name, *(str(entry["key"]) for entry in entries)])
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        found = self._joins.get(key)
        if found is None:
            parts = {int(entry["rank"]): self._known(entry) for entry in entries}
            together = GlobalState({rank: each.held for rank, each in parts.items()})
            boxes = together.boxes({rank: each.boxes for rank, each in parts.items()})
            together.check(boxes)
            joined = writer.join(together.tensors, boxes, self._size)
            found = self._joins[key] = _Parts(together.tensors, boxes.tensor.astype(np.int64), joined)
            if len(self._joins) > _MAX_JOINS:
                self._joins.popitem(last=False)
        return found

    def _objects(self, entries: Sequence[Mapping[str, Any]]) -> list[PlacedObject]:
        placed: dict[str, PlacedObject] = {}
        for entry in entries:
            known = self._known(entry)
            for row, (path, offset, length) in zip(known.objects, entry["objects"], strict=True):
                keys = known.held.names.objects[row]
                fqn = fqn_of(keys)
                placed.setdefault(fqn, PlacedObject(fqn, keys, FileRange(path, offset, length)))
        return list(placed.values())


def _digests(parts: _Parts, entries: Sequence[Mapping[str, Any]], format_name: str) -> bytes | None:
    """The manifest of digests, from what each box adds to its tensor's; None where a rank has taken none."""
    told = [entry["linear"] for entry in entries]
    if any(each is None for each in told):
        return None
    tensors = parts.tensors
    linear = np.zeros(len(tensors), dtype=np.uint32)
    np.bitwise_xor.at(linear, parts.tensor, np.frombuffer(bytes.fromhex("".join(told)), dtype="<u4"))
    rows = []
    columns = (parts.joined.fqns, tensors.section.tolist(), tensors.dtypes, tensors.nbytes.tolist(), linear.tolist())
    for row, (fqn, section, dtype, nbytes, form) in enumerate(zip(*columns, strict=True)):
        if fqn is None:
            continue
        digest = content_digest(Part(nbytes, form), dtype.name, tensors.shape_of(row), nbytes, wide=False)
        rows.append(DigestRow(fqn, SECTIONS[section], digest))
    return DigestTable(format_name, tuple(rows)).to_text().encode()
