"""The writer of veScale's bundle: a DCP folder for the model, and one for the optimizer of each pipeline stage.

What ``vescale.checkpoint.load`` (0.0.1) asks for: names of the module alone, states keyed by dtype and then by model
chunk and name, and the groups' hyperparameters as one object. Knows no bytes: parts are laid out by the writer of DCP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import Unsupported
from ckpt_tool.formats._vescale_metadata import metadata_pickle
from ckpt_tool.formats.base import BoxTable, LaterSegments, LayOut, Segment, WriteRequest
from ckpt_tool.formats.dcp.writer import DcpWriter
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.manifest.masters import MASTER_STATES, module_names
from ckpt_tool.manifest.model import Blob, FileEntry, KeyPath, Manifest
from ckpt_tool.manifest.optimizer import OptimizerView, optimizer_views
from ckpt_tool.manifest.tables import SECTIONS, ChunkTable, FileTable, IntArray, TensorTable
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["WRITER", "VeScaleWriter"]

_DCP = DcpWriter(metadata_pickle)
_MODEL = "model"
_GROUPS = "param_group_meta"
_MASTER = "shard_casted_float16_groups"
_STATE_DTYPE = "torch.float32"
"""What the optimizer's states are keyed by first: the dtype of gradients, which veScale sums in fp32."""
_SHOWN = 3


class VeScaleWriter:
    """Lays out ``model`` and ``optimizer/pp_<stage>``, of one model chunk in each stage."""

    name = "vescale"
    per_rank = False

    def lay_out(self, request: WriteRequest) -> LayOut:
        """All folders; ``model/.metadata`` is written last.

        Raises:
            Unsupported: several optimizers, states without a parameter's name, tensors of neither model nor optimizer,
                or what DCP cannot hold.
            LayoutError: a tensor with elements has no box, or two that begin at the same place.
        """
        parts = [_laid_out(request, part) for part in _parts(request)]
        boxes = request.boxes
        file, offset = (np.zeros(len(boxes), dtype=np.int64) for _ in range(2))
        entries: list[FileEntry] = []
        for part, layout in parts:
            chunks = layout.manifest.chunks
            file[part.rows] = chunks.file + len(entries)
            offset[part.rows] = chunks.offset
            entries += [FileEntry(f"{part.folder}/{one.path}", one.nbytes) for one in layout.manifest.files]
        written = {blob.fqn for part, _ in parts for blob in part.replaced}
        lost = [blob.fqn for blob in request.blobs if blob.fqn not in written]
        manifest = request.manifest(self.name, entries, file=file, offset=offset, notes=_notes(lost))

        def segments() -> Iterator[Segment]:
            return (_below(part.folder, one) for part, layout in reversed(parts) for one in layout.segments)

        def seal(crc32s: npt.NDArray[np.uint32]) -> Iterator[Segment]:
            for part, layout in parts:
                found = layout.seal(crc32s[part.rows]) if layout.seal is not None else ()
                yield from (_below(part.folder, one) for one in found)

        commit = f"{_MODEL}/{parts[0][1].commit_path}"
        return LayOut(manifest, LaterSegments(segments), commit, needs_crc32=True, seal=seal)

    def may_cut(self, tensors: TensorTable) -> npt.NDArray[np.bool_]:
        """Of all, as in DCP."""
        return _DCP.may_cut(tensors)


@dataclass(frozen=True, eq=False)
class _Part:
    """What one folder holds."""

    folder: str
    rows: IntArray
    """Rows of the request's boxes."""
    tensors: IntArray
    """Rows of its tensors."""
    paths: tuple[KeyPath, ...]
    """Key paths of the tensors there."""
    blobs: tuple[Blob, ...] = ()
    replaced: tuple[Blob, ...] = ()
    """Objects of the request that ``blobs`` stand for."""


def _laid_out(request: WriteRequest, part: _Part) -> tuple[_Part, LayOut]:
    tensors, boxes = request.tensors.take(part.tensors), request.boxes
    names = tuple(".".join(map(str, path)) for path in part.paths)
    new_row = np.full(len(request.tensors), -1, dtype=np.int32)
    new_row[part.tensors] = np.arange(len(part.tensors), dtype=np.int32)
    width = tensors.shape.shape[1]
    own = BoxTable(
        new_row[boxes.tensor[part.rows]],
        boxes.offsets[part.rows, :width],
        boxes.sizes[part.rows, :width],
        boxes.rank[part.rows],
    )
    held = replace(tensors, fqns=names, paths=part.paths)
    return part, _DCP.lay_out(replace(request, tensors=held, boxes=own, blobs=part.blobs, blob_bytes={}))


def _parts(request: WriteRequest) -> list[_Part]:
    """The model's folder, then those of the optimizer."""
    tensors, boxes = request.tensors, request.boxes
    is_model = tensors.section == SECTIONS.index("model")
    nothing = np.zeros((0, tensors.shape.shape[1]), dtype=np.int64)
    none = ChunkTable.from_columns(
        tensor=nothing[:, 0],
        offsets=nothing,
        sizes=nothing,
        file=nothing[:, 0],
        offset=nothing[:, 0],
        length=nothing[:, 0],
    )
    views = optimizer_views(
        Manifest("", "", tensors, none, FileTable(()), blobs=request.blobs, info=dict(request.info))
    )
    if len(views) > 1:
        raise Unsupported(f"veScale has one optimizer, and there are {len(views):,}", hint="--exclude leaves one out")
    view = views[0] if views else None
    names = view.named() if view is not None else {}
    states = _states(names)
    strangers = [fqn for fqn, own in zip(tensors.fqns, is_model, strict=True) if not own and fqn not in states]
    if strangers:
        raise Unsupported(
            f"veScale holds a model and its optimizer, and {counted(len(strangers), 'tensor', 'are')} of neither: "
            f"{', '.join(strangers[:_SHOWN])}",
            hint="leave them out with --exclude",
        )
    named = module_names(tensors, set(map(str, names)))
    own = np.flatnonzero(is_model)
    paths: tuple[KeyPath, ...] = tuple((named[tensors.fqns[row]],) for row in own.tolist())
    parts = [_Part(_MODEL, np.flatnonzero(is_model[boxes.tensor]), own, paths)]
    if view is not None:
        parts += _stages(request, view, states)
    return parts


def _states(names: Mapping[Any, Mapping[str, str]]) -> dict[str, tuple[str, KeyPath]]:
    """By fqn of a state: its parameter, and its keys in veScale."""
    found: dict[str, tuple[str, KeyPath]] = {}
    for parameter, held in names.items():
        if not isinstance(parameter, str):
            raise Unsupported(
                f"parameter {parameter} of the optimizer has a number, and which weight it is is not known",
                hint="--optim-style fqn names them where the model is beside it",
            )
        for state, fqn in held.items():
            slot = _MASTER if state in MASTER_STATES else state
            found[fqn] = (parameter, (_STATE_DTYPE, f"(0, {parameter!r})", slot))
    return found


def _stages(request: WriteRequest, view: OptimizerView, states: Mapping[str, tuple[str, KeyPath]]) -> Iterator[_Part]:
    """A part for each pipeline stage that holds states."""
    tensors, boxes = request.tensors, request.boxes
    stage = np.zeros(len(boxes), dtype=np.int64)
    if "pp" in request.mesh_axes:
        stage = np.unravel_index(boxes.rank, request.mesh_sizes)[request.mesh_axes.index("pp")]
    is_state = np.array([fqn in states for fqn in tensors.fqns], dtype=np.bool_)
    groups = tuple(blob for blob in request.blobs if "param_groups" in blob.path or _GROUPS in blob.path)
    for number in range(int(stage.max(initial=0)) + 1):
        rows = np.flatnonzero(is_state[boxes.tensor] & (stage == number))
        held = distinct(boxes.tensor[rows])
        names = [tensors.fqns[row] for row in held.tolist()]
        value = _own_groups(groups) or _groups(view, {states[fqn][0] for fqn in names})
        if not value:
            raise Unsupported(
                "hyperparameters of the optimizer's groups are not known, without which veScale loads no optimizer",
                hint="take the objects along (--all), or leave the optimizer out with --exclude",
            )
        blob = Blob(_GROUPS, "value", None, value, (_GROUPS,), is_loaded=True)
        yield _Part(f"optimizer/pp_{number}", rows, held, tuple(states[fqn][1] for fqn in names), (blob,), groups)


def _own_groups(blobs: Sequence[Blob]) -> list[dict[str, Any]]:
    """Groups as veScale wrote them itself; it looks at their hyperparameters and numbers their parameters anew."""
    found = next((blob.value for blob in blobs if _GROUPS in blob.path), None)
    return found if isinstance(found, list) else []


def _groups(view: OptimizerView, parameters: set[str]) -> list[dict[str, Any]]:
    """Hyperparameters of each group, whose parameters of a stage are numbered."""
    found: list[dict[str, Any]] = []
    count = 0
    for group in view.named_groups():
        n = sum(name in parameters for name in group.params)
        found.append({**group.hyperparameters, "params": list(range(count, count + n))})
        count += n
    return found


def _notes(lost: Sequence[str]) -> tuple[str, ...]:
    if not lost:
        return ()
    shown = ", ".join(lost[:_SHOWN]) + (" ..." if len(lost) > _SHOWN else "")
    return (
        f"{counted(len(lost), 'object', 'are')} left out, for veScale's checkpoints have no place for them: {shown}",
    )


def _below(folder: str, segment: Segment) -> Segment:
    return Segment(f"{folder}/{segment.path}", segment.offset, segment.data)


WRITER = VeScaleWriter()
