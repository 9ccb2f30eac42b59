"""A bundle is a folder whose folders are checkpoints that belong together: one holds the model, another its optimizer.

Which folders belong together is data. The parts are read by their own readers and shown as one manifest, file paths
with their folder in front. Knows no bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np

from ckpt_tool.errors import NotFound
from ckpt_tool.formats._vescale_names import vescale_names
from ckpt_tool.formats.base import Checksum, Probe, Reader, Source
from ckpt_tool.formats.dcp.reader import READER as DCP
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.merge import PartRows, merge_manifests, replace_chunks, rows_of_part, split_manifest
from ckpt_tool.manifest.model import Blob, FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkTable, IntArray
from ckpt_tool.records import dataclass
from ckpt_tool.storage.virtual.subfolder import Subfolder, places_below, sublisting

__all__ = ["ACCELERATE", "VESCALE", "Bundle"]


@dataclass(frozen=True)
class Bundle:
    """Reader of one kind of bundle."""

    name: str
    folders: tuple[str, ...]
    """Regular expressions over folders, as paths; the first one must occur."""
    reader: Reader
    """Reader of every part."""
    named: Callable[[str, Manifest], Manifest] | None = None
    """What a part's entries are called in the whole, given its folder; None as in the part."""

    def probe(self, source: Source) -> Probe:
        """Sure when the first kind of folder is there and its reader is sure of it; no request beyond that reader's."""
        if source.listing.entry is not None:
            return Probe(0.0, "a single file")
        folders = self._folders(source)
        if not folders or not self._patterns[0].fullmatch(folders[0]):
            return Probe(0.0, f"no folder {self.folders[0]}")
        probes = [(folder, self.reader.probe(_inside(source, folder))) for folder in folders]
        known = [folder for folder, probe in probes if probe.confidence > 0.5]
        if folders[0] not in known:
            return Probe(0.0, f"{folders[0]}: {probes[0][1].why}")
        return Probe(0.95, f"{' and '.join(known)} are {self.reader.name} checkpoints")

    def read(self, source: Source) -> Manifest:
        """The parts, read one after another, as one."""
        parts = [(folder, self._part(source, folder)) for folder in self._known(source)]
        merged = merge_manifests(parts, format_name=self.name, root=source.listing.url)
        info = {key: value for _, part in reversed(parts) for key, value in part.info.items()}
        ends = list(accumulate(len(part.tensors) for _, part in parts))
        spans = zip([0, *ends], ends, strict=False)
        info["parts"] = [{"folder": f, "tensors": list(span)} for (f, _), span in zip(parts, spans, strict=True)]
        unread = [f for f in self._folders(source) if f not in dict(parts) and source.listing.match(f"{f}/*.distcp")]
        if unread:
            info["missing_files"] = [f"{folder}/.metadata" for folder in unread]
        mesh = next((part.mesh for _, part in parts if part.mesh is not None), None)
        notes = tuple(f"{folder}: {note}" for folder, part in parts for note in part.notes)
        return merged.replace(info=info, mesh=mesh, notes=notes)

    def _part(self, source: Source, folder: str) -> Manifest:
        with places_below(folder):
            part = self.reader.read(_inside(source, folder))
        return part if self.named is None else self.named(folder, part)

    def resolve(self, source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:
        """Each part resolves its own rows."""
        for picked, part, inner in self._parts(source, manifest):
            own = np.flatnonzero(np.isin(picked.chunks, rows))
            if len(own):
                chunks = replace_chunks(manifest, picked, self.reader.resolve(inner, part, own))
                manifest = manifest.replace(chunks=chunks)
        return manifest.chunks

    def load_blobs(self, source: Source, manifest: Manifest, rows: Sequence[int]) -> tuple[Blob, ...]:
        """Each part loads its own objects."""
        blobs = list(manifest.blobs)
        wanted = frozenset(rows)
        for picked, part, inner in self._parts(source, manifest):
            own = [at for at, row in enumerate(picked.blobs) if row in wanted]
            for row, blob in zip(picked.blobs, self.reader.load_blobs(inner, part, own), strict=True) if own else ():
                where = manifest.blobs[row].where
                blobs[row] = Blob(blob.fqn, blob.kind, where, blob.value, blob.path, blob.rank, blob.is_loaded)
        return tuple(blobs)

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
        """Those of all parts."""
        for picked, part, inner in self._parts(source, manifest):
            for found in self.reader.checksums(inner, part):
                if isinstance(found, Finding):
                    yield _finding_below(picked.folder, found)
                else:
                    yield Checksum(_below(picked.folder, found.where), found.crc32, found.fqn)

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Those of all parts."""
        for picked, part, inner in self._parts(source, manifest):
            for finding in self.reader.check(inner, part):
                yield _finding_below(picked.folder, finding)

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(pattern) for pattern in self.folders)

    def _folders(self, source: Source) -> list[str]:
        """Folders of the bundle, those of the first kind first."""
        names = sorted({path.rpartition("/")[0] for path in source.listing.sizes if "/" in path})
        return [name for pattern in self._patterns for name in names if pattern.fullmatch(name)]

    def _known(self, source: Source) -> list[str]:
        known = [f for f in self._folders(source) if self.reader.probe(_inside(source, f)).confidence > 0.5]
        if not known:
            raise NotFound(f"no folder of a {self.name} checkpoint", where=source.listing.url)
        return known

    def _parts(self, source: Source, manifest: Manifest) -> Iterator[tuple[PartRows, Manifest, Source]]:
        """Rows, manifest and source of each part, told from the merged manifest, or some rows of it, alone."""
        parts = manifest.info["parts"]
        is_whole = parts[-1]["tensors"][1] == len(manifest.tensors)
        for part in parts:
            span = (part["tensors"][0], part["tensors"][1]) if is_whole else None
            picked = rows_of_part(manifest, part["folder"], span)
            yield picked, split_manifest(manifest, picked, format_name=self.reader.name), _inside(source, picked.folder)


def _inside(source: Source, folder: str) -> Source:
    return Source(Subfolder(source.store, folder), sublisting(source.listing, folder), is_salvage=source.is_salvage)


def _below(folder: str, where: FileRange) -> FileRange:
    return FileRange(f"{folder}/{where.path}", where.offset, where.length)


def _finding_below(folder: str, finding: Finding) -> Finding:
    where = None if finding.where is None else _below(folder, finding.where)
    return Finding(finding.kind, finding.severity, finding.message, finding.fqn, where)


# accelerate.utils.fsdp_utils (1.15): save_fsdp_model and save_fsdp_optimizer with SHARDED_STATE_DICT.
ACCELERATE = Bundle("accelerate", (r"pytorch_model_fsdp_\d+", r"optimizer_\d+"), DCP)
VESCALE = Bundle("vescale", (r"model", r"optimizer/pp_\d+"), DCP, vescale_names)
