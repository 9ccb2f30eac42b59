"""The manifest that a load works from: read by one rank of each host, and handed to the others in shared memory.

A manifest is kept for the next load of the same files; they count as the same while no size and no time of change of
any file differs.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckpt_tool.api.checkpoint import Checkpoint, open_checkpoint
from ckpt_tool.api.convert.published import in_memory, is_published
from ckpt_tool.api.ranks_apart import check_replicas
from ckpt_tool.api.unchanged import ReadFiles
from ckpt_tool.errors import StorageError
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.packed import from_packed, to_packed
from ckpt_tool.manifest.tables import ChunkFlag, FileTable, IntArray
from ckpt_tool.storage.open import open_store
from ckpt_tool.storage.store import Listing
from ckpt_tool.storage.urls import shown

if TYPE_CHECKING:
    from ckpt_tool.engine.distributed_group import Group
    from ckpt_tool.engine.distributed_hosts import Hosts, Offer, Published

Wanted = Callable[[Manifest], Sequence[str]]
"""Names of tensors whose payload is to be located."""

__all__ = ["SharedManifest", "Stamp", "forget_all", "stamp_of"]

Stamp = tuple[dict[str, int], dict[str, float]]
"""Size of each file, and when it was last written."""

_NOTHING, _TENSORS, _WITH_VALUES, _IN_ONE = range(4)  # what a leader has prepared; the last is added to the others
_KEPT = 2
_MAX_KEPT_CHUNKS = 1_000_000
_kept: OrderedDict[str, tuple[Stamp, Checkpoint]] = OrderedDict()


def stamp_of(listing: Listing) -> Stamp | None:
    """What tells whether any file has changed; None where the storage does not say when files were written."""
    return (listing.sizes, listing.modified) if listing.modified.keys() == listing.sizes.keys() else None


def forget_all() -> None:
    """Let go of all manifests."""
    _kept.clear()


class SharedManifest:
    """One checkpoint's manifest on every rank of a group."""

    def __init__(self, group: Group, hosts: Hosts, url: str, *, takes_first: bool = False) -> None:
        """``takes_first``: of tensors that ranks saved differently, though nothing places them, the first rank's."""
        self._group, self._hosts, self._url, self._takes_first = group, hosts, url, takes_first
        self._checkpoint: Checkpoint | None = None
        self._seen: Source | None = None
        self._offer: Offer | None = None
        self._published: Published | None = None
        self._made: Manifest | None = None
        self._prepared = _NOTHING
        self.digest = 0
        """Equal on all ranks, and other when anything in the manifest is."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank reads metadata."""
        return self._hosts.is_leader

    @property
    def stamp(self) -> Stamp | None:
        """On a leader: what the files were when their metadata was read."""
        return None if self._checkpoint is None else stamp_of(self._checkpoint.source.listing)

    def is_unchanged(self, stamp: Stamp | None) -> bool:
        """Whether the files are what they were; one listing.

        Raises:
            NotFound: nothing is there any more.
        """
        if stamp is None:
            return False
        self._seen = Source(*open_store(self._url))
        return stamp_of(self._seen.listing) == stamp

    def check(self, files: FileTable) -> None:
        """On a leader: see that the files that were read are what they were before; one listing.

        Raises:
            StorageError: one has changed, or is not there any more; on this rank alone.
        """
        source = self._seen if self._checkpoint is None else self._checkpoint.source
        if source is not None:
            ReadFiles(shown(self._url), source, files).check()

    def prepare(self, wanted: Wanted, *, with_values: bool, in_one: Sequence[str] | None) -> None:
        """Read the metadata, on a leader, before the other ranks are heard; then `offer` it.

        Args:
            wanted: asked here.
            with_values: read the objects that are no tensors as well.
            in_one: names of the state's tensors that hold all experts of a layer; a model that is published with a
                tensor for each is then shown as it is in memory. None for as it is.

        Raises:
            CkptError: metadata could not be read; on this rank alone.
        """
        self._make(lambda: self._read(wanted, with_values=with_values, in_one=in_one))
        self._prepared = (_WITH_VALUES if with_values else _TENSORS) + _IN_ONE * (in_one is not None)

    @property
    def row(self) -> list[int]:
        """What the other ranks are to hear of what was prepared."""
        from ckpt_tool.engine.distributed_hosts import NO_OFFER

        return [self._prepared, *(NO_OFFER if self._offer is None else self._offer.row)]

    def read(self, wanted: Wanted, heard: IntArray, *, with_values: bool, in_one: Sequence[str] | None) -> None:
        """Take what all leaders have prepared, or have them read now; one collective then. `manifest` has it after.

        Args:
            wanted: asked on leaders.
            heard: the `row` of every rank.
            with_values: have the objects that are no tensors as well.
            in_one: see `prepare`; None where no rank has such names, none where others have them.

        Raises:
            CkptError: metadata could not be read on some host, or hosts do not see the same; on every rank.
        """
        leaders = [ranks[0] for ranks in self._hosts.groups]
        prepared, is_in_one = heard[leaders, 0] % _IN_ONE, heard[leaders, 0] >= _IN_ONE
        if ((prepared >= (_WITH_VALUES if with_values else _TENSORS)) & (is_in_one == (in_one is not None))).all():
            self._hear(heard[:, 1:])
        else:
            self._share(lambda: self._read(wanted, with_values=with_values, in_one=in_one))
        self._keep()

    def resolve(self, manifest: Manifest, everyone: Sequence[IntArray]) -> bool:
        """Locate the payload of all tensors that some rank wants, where the leaders lack some; a collective then.

        Returns whether there is another `manifest` now.

        Args:
            manifest: what there is by now.
            everyone: boxes of all ranks, see ``engine.landing.box_rows``.
        """
        wanted = np.zeros(len(manifest.tensors), dtype=bool)
        for rows in everyone:
            wanted[rows[:, 0]] = True
        is_open = (manifest.chunks.flags & ChunkFlag.UNRESOLVED) != 0
        if not (is_open & wanted[manifest.chunks.tensor]).any():
            return False
        names = [manifest.tensors.fqns[row] for row in np.flatnonzero(wanted).tolist()]
        checkpoint = self._checkpoint
        self._share(lambda: manifest if checkpoint is None else checkpoint.resolve(names).replace(blobs=()))
        self._keep()
        return True

    def manifest(self) -> Manifest:
        """What was read last. Ranks that are no leader map the leader's memory, so its columns cost them nothing.

        Raises:
            StorageError: that memory cannot be reached; on this rank alone.
        """
        if self._made is None:
            if self._published is None:
                raise StorageError("nothing was read yet", where=self._url)
            self._made = from_packed(self._published.open())
        return self._made

    def close(self) -> None:
        """Release what the others have mapped by now, and file handles."""
        self._close_offer()
        if self._seen is not None:
            self._seen.store.close()
        if self._checkpoint is not None:
            self._checkpoint.close()

    def _close_offer(self) -> None:
        if self._offer is not None:
            self._offer.close()
            self._offer = None

    def _read(self, wanted: Wanted, *, with_values: bool, in_one: Sequence[str] | None) -> Manifest:
        if self._checkpoint is None:
            self._checkpoint = self._opened()
        checkpoint = self._checkpoint
        if with_values:
            checkpoint.load_blobs()
        if in_one is not None and is_published(checkpoint.manifest.tensors.fqns):
            found = in_memory(checkpoint.resolve(), in_one)
            checkpoint = checkpoint if found is None else checkpoint.shown_as(found)
        names = wanted(checkpoint.manifest)
        if not self._takes_first:
            check_replicas(checkpoint, names)
        found = checkpoint.resolve(names)
        return found if with_values else found.replace(blobs=())

    def _opened(self) -> Checkpoint:
        """The checkpoint, with what an earlier load has learned of it."""
        kept = _kept.get(self._url)
        if kept is None:
            return open_checkpoint(self._url)
        stamp, before = kept
        store, listing = open_store(self._url)
        if stamp_of(listing) != stamp:
            store.close()
            return open_checkpoint(self._url)
        return before.reopened(store, listing)

    def _keep(self) -> None:
        checkpoint, stamp = self._checkpoint, self.stamp
        if checkpoint is None or stamp is None or len(checkpoint.manifest.chunks) > _MAX_KEPT_CHUNKS:
            return
        _kept[self._url] = (stamp, checkpoint)
        _kept.move_to_end(self._url)
        while len(_kept) > _KEPT:
            _kept.popitem(last=False)

    def _share(self, make: Callable[[], Manifest]) -> None:
        """Have what ``make`` returns on the leaders; one collective."""
        from ckpt_tool.engine.distributed_hosts import NO_OFFER

        self._made, failure = None, None
        if self.is_leader:
            try:
                self._make(make)
                self.offer()
            except BaseException as error:  # noqa: BLE001 - raised below, on every rank
                failure = error
        row = NO_OFFER if failure is not None or self._offer is None else self._offer.row
        self._hear(self._group.gather_row(row, failure))

    def _make(self, make: Callable[[], Manifest]) -> None:
        self._close_offer()
        self._made = None
        self._made = make()

    def offer(self) -> None:
        """Lay what a leader has read by now where the others of its host can map it; nothing where nothing was read.

        Raises:
            StorageError: there is no memory for it; on this rank alone.
        """
        if self._group.size == 1 or self._made is None:
            return
        from ckpt_tool.engine.distributed_hosts import offer

        parts = to_packed(self._made)
        digest = hashlib.blake2b(digest_size=8)
        for part in parts:
            digest.update(np.frombuffer(part, dtype=np.uint8).data)
        self._offer = offer(self._hosts, parts, int.from_bytes(digest.digest(), "little", signed=True))

    def _hear(self, rows: IntArray) -> None:
        if self._group.size == 1:
            return
        from ckpt_tool.engine.distributed_hosts import published

        self._published = published(self._hosts, rows)
        self.digest = self._published.digest
        if not self._published.is_same_everywhere:
            raise StorageError(
                "hosts do not see the same checkpoint here", where=self._url,
                hint="wait until its files have reached all hosts, or copy them again",
            )  # fmt: skip
