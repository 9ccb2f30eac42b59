"""A conversion is a source, a target layout and the plan between them: looked at first, run on request."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_tool.api.checkpoint import Checkpoint, plan_limits
from ckpt_tool.api.manifest_file import check_manifest, check_replaceable, manifest_beside, write_manifest
from ckpt_tool.api.unchanged import ReadFiles, explaining
from ckpt_tool.engine.around import owners_of
from ckpt_tool.engine.base import EngineOptions, Progress, RunReport, TakenDigests
from ckpt_tool.engine.run import run_plan
from ckpt_tool.engine.team import Share
from ckpt_tool.errors import StorageError, Unsupported, UsageError
from ckpt_tool.formats.base import BoxTable, LayOut, Segment, Writer, WriteRequest, WriterOptions
from ckpt_tool.layout.mesh import Mesh
from ckpt_tool.manifest.digest_table import DigestRow, DigestTable
from ckpt_tool.manifest.model import Blob, FileEntry, Manifest
from ckpt_tool.manifest.tables import SECTIONS, FileTable, IntArray, TensorTable
from ckpt_tool.plan.build import make_plan
from ckpt_tool.plan.model import Cast, Plan
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.side_file import put_side_file, unwritable
from ckpt_tool.storage.target import open_target
from ckpt_tool.storage.urls import is_local, local_path
from ckpt_tool.storage.virtual.zeros import with_zeros

if TYPE_CHECKING:
    from ckpt_tool.layout.origins import Origins  # few conversions have any, and it costs 1 ms of start-up

__all__ = [
    "Conversion",
    "ConversionResult",
    "Dropped",
    "Execution",
    "build_conversion",
    "manifest_url_for",
    "whole_boxes",
]

_NOTHING_SHARED = (
    "no block is shared with the source, all was copied: both must lie on one file system that can (XFS, Btrfs), in "
    "tensors of many blocks"
)
_KEEPS_OBJECT_BYTES = frozenset({"dcp", "rank-files", "torchsnapshot", "megatron-dist", "megatron-legacy"})
_FILE_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".npz", ".gguf")


@dataclass(frozen=True, slots=True)
class Dropped:
    """Something of the source that the target will not have."""

    fqn: str
    why: str


@dataclass(frozen=True, slots=True)
class Execution:
    """How a conversion is run; decided by the caller, the same for every kind."""

    memory_budget_bytes: int
    n_workers: int
    overwrite: bool
    resume: bool
    durable: bool
    manifest_url: str | None = None
    """Where the digests go that are taken on the way; None takes none."""
    share: Share | None = None
    """Which part of the work is this process's; None for all of it."""


@dataclass(frozen=True)
class ConversionResult:
    """What a finished conversion wrote."""

    target_url: str
    format: str
    n_tensors: int
    n_files: int
    """Files of the target; the manifest of digests lies beside it."""
    nbytes: int
    """Bytes of these files, headers included."""
    report: RunReport
    """Seconds, payload bytes read and written, and what casts did to values."""
    dropped: tuple[Dropped, ...]
    """Tensors and objects of the source that the target has not, each with the reason."""
    notes: tuple[str, ...]
    manifest_url: str | None = None
    """The manifest of digests that was written too; None where none was asked for."""

    def to_json(self) -> dict[str, Any]:
        """Schema ``ckpt-tool/conversion/1``: the fields of this record, ``report`` with seconds, bytes and casts."""
        row = asdict(replace(self, report=replace(self.report, digests=None)))
        del row["report"]["digests"]
        return {"schema": "ckpt-tool/conversion/1", **row}


@dataclass(frozen=True)
class Conversion:
    """A plan that is ready to run. Nothing has been written."""

    checkpoint: Checkpoint
    target_url: str
    plan: Plan
    layout: LayOut
    mesh: Mesh | None
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]
    execution: Execution
    is_single_file: bool
    origins: Origins | None = None
    """What the tensors were made of, where they are views."""
    asks_to_share: bool = False
    """Whether headers were padded so that a file system can share blocks of the source."""

    @property
    def casts(self) -> tuple[Cast, ...]:
        """Changes of element type."""
        return self.plan.casts

    @property
    def is_in_the_way(self) -> bool:
        """Whether something at a local target is in the way of a run that neither replaces it nor goes on with it."""
        if self.execution.overwrite or self.execution.resume or not is_local(self.target_url):
            return False
        path = local_path(self.target_url)
        return os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path))

    @property
    def peak_memory_bytes(self) -> int:
        """Most bytes that the buffers of a run will use."""
        cost, nbytes = self.checkpoint.store.cost, self.plan.stats.read_nbytes
        ahead = min(cost.read_ahead_bytes, self.execution.memory_budget_bytes // 4, nbytes)
        return _buffer_bytes(self.plan, self.execution.n_workers) + ahead

    def summary(self) -> dict[str, Any]:
        """Schema ``ckpt-tool/plan/1``: what will be done: formats, mesh, bytes, requests, memory, casts, notes."""
        stats = asdict(self.plan.stats)
        return {
            "schema": "ckpt-tool/plan/1",
            "source": self.checkpoint.url,
            "source_format": self.checkpoint.format,
            "target": self.target_url,
            "target_format": self.layout.manifest.format,
            "mesh": None if self.mesh is None else dict(zip(self.mesh.axes, self.mesh.sizes, strict=True)),
            "fingerprint": self.plan.fingerprint,
            **stats,
            "peak_memory_bytes": self.peak_memory_bytes,
            "casts": [{"fqn": c.fqn, "from": c.source.name, "to": c.target.name} for c in self.casts],
            "dropped": [asdict(d) for d in self.dropped],
            "notes": list(self.notes),
        }

    def plan_json(self) -> Iterator[str]:
        """Lines of the plan as JSON, see ``plan.describe``."""
        from ckpt_tool.plan.describe import plan_json

        return plan_json(self.plan)

    def save_plan(self, url: str) -> None:
        """Write the plan as JSON to a path or URL.

        Raises:
            UsageError: a file is here, and it is no plan.
            StorageError: it cannot be written.
        """
        mark, what = b'"fingerprint"', "plan"
        if not is_local(url):
            put_side_file(url, "".join(self.plan_json()).encode(), mark=mark, what=what)
            return
        check_replaceable(url, mark, what)
        try:
            with open(local_path(url), "w", encoding="utf-8") as file:
                file.writelines(self.plan_json())
        except OSError as error:
            raise unwritable(error, url) from error

    def run(self, progress: Callable[[Progress], None] | None = None) -> ConversionResult:
        """Write the target and give it its name.

        Raises:
            TargetExists: something is at the target, and overwriting was not asked for.
            StorageError: no space, or the storage failed; the unfinished target can be resumed. Or the source has
                changed while it was read.
        """
        execution = self.execution
        share, manifest_url = execution.share, execution.manifest_url
        if manifest_url not in {None, manifest_beside(self.target_url)}:
            check_manifest(manifest_url)
        target = open_target(
            self.target_url,
            overwrite=execution.overwrite,
            resume=execution.resume,
            durable=execution.durable,
            single_file=self.is_single_file,
            memory_bytes=execution.memory_budget_bytes // 2,
            joins=share is not None and share.index > 0,
        )
        options = EngineOptions(
            execution.memory_budget_bytes, execution.n_workers, execution.durable, digests=manifest_url is not None
        )
        report = None
        store = with_zeros(self.checkpoint.store, self.plan.source.files)
        with explaining(self.checkpoint):
            for event in run_plan(
                self.plan, self.layout, store, target, options, self.origins, share, ReadFiles.of(self.checkpoint)
            ):
                if isinstance(event, RunReport):
                    report = event
                elif progress is not None:
                    progress(event)
        if report is None:
            raise StorageError("the run ended without a report", where=self.target_url)
        files = self.layout.manifest.files
        notes = self.notes
        if self.asks_to_share and not report.shared_nbytes:
            notes += (_NOTHING_SHARED,)
        if manifest_url is not None and report.digests is not None:
            table = _digest_table(self.layout.manifest, report.digests)
            write_manifest(table, manifest_url)
            n_bare = len(self.layout.manifest.tensors) - len(table.rows)
            notes += (
                (f"{counted(n_bare, 'tensor', 'have')} no digest: they are stored in parts that overlap",)
                if n_bare
                else ()
            )
        return ConversionResult(
            target_url=self.target_url,
            format=self.layout.manifest.format,
            n_tensors=len(self.layout.manifest.tensors),
            n_files=len(files),
            nbytes=int(files.nbytes.sum()),
            report=report,
            dropped=self.dropped,
            notes=notes,
            manifest_url=manifest_url,
        )


def build_conversion(  # noqa: PLR0913 - the parts of a conversion
    checkpoint: Checkpoint,
    source: Manifest,
    target_url: str | os.PathLike[str],
    *,
    writer: Writer,
    tensors: TensorTable,
    boxes: BoxTable,
    mesh: Mesh | None,
    blobs: tuple[Blob, ...],
    dropped: Sequence[Dropped],
    notes: Sequence[str],
    options: WriterOptions,
    execution: Execution,
    origins: Origins | None = None,
    companions: Mapping[str, bytes] | None = None,
) -> Conversion:
    """Lay the target out and plan it.

    Args:
        checkpoint: where bytes come from.
        source: its manifest, resolved, under the target's names.
        target_url: folder or file to write.
        writer: the target's format.
        tensors: the target's tensors; same fqns and shapes as ``source`` has, dtypes may differ.
        boxes: boxes of ``tensors`` by rank.
        mesh: the target's mesh, None for a full checkpoint.
        blobs: objects to carry over, loaded.
        dropped: what is left behind.
        notes: what a person should know.
        options: choices of the writer.
        execution: how it will be run.
        origins: what ``tensors`` were made of, where they are views.
        companions: small files to write beside the tensors, by name; a target that is one file has none.
    """
    url = os.fspath(target_url)
    single = url.endswith(_FILE_SUFFIXES) and not writer.per_rank and options.max_shard_nbytes is None
    if single:
        options = replace(
            options, file_name=url.replace("\\", "/").rsplit("/", 1)[-1] if is_local(url) else url.rsplit("/", 1)[-1]
        )
    request = WriteRequest(
        tensors=tensors,
        boxes=boxes,
        world_size=1 if mesh is None else mesh.world_size,
        blobs=blobs,
        blob_bytes=_blob_bytes(checkpoint, blobs) if writer.name in _KEEPS_OBJECT_BYTES else {},
        mesh_axes=() if mesh is None else mesh.axes,
        mesh_sizes=() if mesh is None else mesh.sizes,
        info=dict(source.info),
        options=options,
    )
    try:
        layout = writer.lay_out(request)
    except UnicodeEncodeError as error:  # half of a surrogate pair, which a pickle can hold
        said = f"{writer.name} holds names as UTF-8, which {error.object[:200]!r} has no form in"
        raise Unsupported(said, hint="leave it out with --exclude") from error
    if single and len({*layout.manifest.files.paths, *(segment.path for segment in layout.segments)}) > 1:
        hint = "leave the suffix out, or choose the format that has it with --to"
        raise UsageError(
            f"{writer.name} is written as a folder, but the target is named like a file", where=url, hint=hint
        )
    if companions and not single:
        layout = _accompanied(layout, companions)
    payload_nbytes = int(source.tensors.nbytes.sum())
    limits = replace(
        plan_limits(execution.memory_budget_bytes, execution.n_workers, payload_nbytes),
        in_file_order=not is_local(url),
    )
    share, owners = execution.share, None
    if share is not None and limits.in_file_order:
        owners = owners_of(layout, share.count)
    plan = make_plan(source, layout.manifest.replace(root=url), limits=limits, owners=owners)
    return Conversion(
        checkpoint, url, plan, layout, mesh, tuple(dropped), (*source.notes, *notes, *layout.manifest.notes),
        execution, single, origins, bool(options.origins),
    )  # fmt: skip


def _accompanied(layout: LayOut, companions: Mapping[str, bytes]) -> LayOut:
    """The layout with further files."""
    entries = (FileEntry(name, len(data)) for name, data in companions.items())
    files = FileTable((*layout.manifest.files, *entries))
    segments = (Segment(name, 0, data) for name, data in companions.items())
    return replace(
        layout, manifest=layout.manifest.replace(files=files), segments=(*layout.segments, *segments)
    )  # fmt: skip


def _blob_bytes(checkpoint: Checkpoint, blobs: Sequence[Blob]) -> Mapping[str, bytes]:
    """Original bytes of objects that are torch zips of their own, so that they are carried over unchanged.

    Objects of one name, as ranks have them, are left to the writer: their bytes have no name each.
    """
    times = Counter(blob.fqn for blob in blobs)
    own = [b for b in blobs if b.kind == "torch_save" and b.where is not None and times[b.fqn] == 1]
    data = checkpoint.store.fetch([blob.where for blob in own if blob.where is not None])
    return {blob.fqn: content for blob, content in zip(own, data, strict=True)}


def whole_boxes(tensors: TensorTable) -> BoxTable:
    """One box per tensor, on rank 0."""
    n = len(tensors)
    offsets: IntArray = np.zeros_like(tensors.shape)
    return BoxTable(np.arange(n, dtype=np.int32), offsets, tensors.shape, np.zeros(n, dtype=np.int32))


def manifest_url_for(target_url: str | os.PathLike[str], wanted: str | os.PathLike[str] | None) -> str | None:
    """Where a conversion's manifest goes: ``beside`` the target, nowhere (None), or to the path or URL given."""
    if wanted is None:
        return None
    return manifest_beside(target_url) if wanted == "beside" else os.fspath(wanted)


def _digest_table(manifest: Manifest, taken: TakenDigests) -> DigestTable:
    """The digests that were taken on the way, as a table of the target that ``manifest`` describes."""
    tensors = manifest.tensors
    rows = tuple(
        DigestRow(tensors.fqns[row], SECTIONS[tensors.section[row]], digest) for row, digest in taken.tensors.items()
    )
    originals = tuple(DigestRow(meta.fqn, meta.section, digest) for meta, digest in taken.originals)
    return DigestTable(manifest.format, rows, originals=originals)


def _buffer_bytes(plan: Plan, n_workers: int) -> int:
    """A tile, a packed copy and a cast copy per worker."""
    return 3 * plan.stats.max_tile_nbytes * max(n_workers, 1)
