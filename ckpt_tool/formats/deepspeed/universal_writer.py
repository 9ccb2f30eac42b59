"""The writer of universal checkpoints, which DeepSpeed loads at any stage and any number of ranks.

Written are ``zero/<name>/<state>.pt`` with whole tensors, ``zero/optimizer_state.pt``, the model states, and
``latest_universal`` last. What the loaders need was read off DeepSpeed 0.19.8 (``checkpoint/universal_checkpoint.py``,
``runtime/base_optimizer.py``, ``runtime/zero/stage3.py``): stages 1 and 2 take each parameter's own step and the groups
at the top of ``optimizer_state.pt``; stage 3 takes one step and the first group's hyperparameters out of
``optimizer_state_dict`` there, and its model state under another name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.nodes import OrderedMap, Size
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats._torch_file.written import WrittenFile, blob_entry, check_dtypes, fresh_tensor
from ckpt_tool.formats._zip.layout import Member, ZipLayout, torch_members
from ckpt_tool.formats.base import LayOut, Segment, WriteRequest
from ckpt_tool.formats.deepspeed.names import LATEST_UNIVERSAL
from ckpt_tool.manifest.model import FileEntry, KeyPath, Manifest
from ckpt_tool.manifest.optimizer import OptimizerView, optimizer_views
from ckpt_tool.manifest.tables import ChunkTable, FileTable, IntArray

__all__ = ["WRITER", "UniversalWriter"]

_MASTER, _STEP = "fp32", "step"
_MODEL_KEYS = ("module", "model", "state_dict")
_RECORD_VERSION = 0.4


@dataclass(frozen=True, slots=True)
class _State:
    """One file below ``zero/``."""

    name: str
    state: str
    row: int
    """Tensor of the request."""


@dataclass
class _Sorted:
    """The request's tensors and objects by the file that they go into."""

    states: list[_State] = field(default_factory=list)
    weights: dict[str, int] = field(default_factory=dict)
    """Of the module, by name: tensor of the request."""
    others: list[tuple[KeyPath, int]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    optimizer: list[tuple[KeyPath, Any]] = field(default_factory=list)
    model: list[tuple[KeyPath, Any]] = field(default_factory=list)
    steps: list[tuple[str, Any]] = field(default_factory=list)
    """Steps that are numbers, by parameter."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of trained parameters."""


class UniversalWriter:
    """Lays out a folder with ``latest_universal`` and the universal form of one step.

    Needs an optimizer whose states are keyed by name, with fp32 masters among them, or fp32 weights that stand for
    them. Weights are written too, though DeepSpeed does not load those of a universal checkpoint: frozen parameters and
    buffers are in no other place.
    """

    name = "deepspeed-universal"
    per_rank = False

    def lay_out(self, request: WriteRequest) -> LayOut:
        """The folder.

        Raises:
            Unsupported: no optimizer, parameters without fp32 masters, or what torch cannot save.
            LayoutError: a tensor is not stored as one whole box.
        """
        check_dtypes(request.tensors)
        rows = _whole_rows(request)
        found = _sorted(request)
        step = request.info.get("step")
        tag = f"global_step{step if type(step) is int else 0}_universal"
        files = list(_files(request, found, rows, f"{tag}/"))
        by_tensor: dict[int, tuple[int, int]] = {}
        for number, file in enumerate(files):
            for offset, row in zip(file.payload_offsets, file.rows, strict=True):
                if row >= 0:
                    by_tensor[row] = (number, offset)
        known = _known_files(request, found, f"{tag}/")
        placed = [by_tensor[row] for row in range(len(request.boxes))]
        chunks = ChunkTable.from_columns(
            tensor=request.boxes.tensor,
            offsets=request.boxes.offsets,
            sizes=request.boxes.sizes,
            file=np.array([number for number, _ in placed], dtype=np.int64),
            offset=np.array([offset for _, offset in placed], dtype=np.int64),
            length=request.tensors.nbytes[request.boxes.tensor],
        )
        entries = [FileEntry(file.path, file.zip.nbytes) for file in files]
        entries += [FileEntry(path, sum(len(s.data) for s in segments)) for path, segments in known.items()]
        entries.append(FileEntry(LATEST_UNIVERSAL, len(tag)))
        manifest = Manifest(
            self.name,
            "",
            request.tensors,
            chunks,
            FileTable(tuple(entries)),
            blobs=request.blobs,
            info=dict(request.info),
            notes=("stage 3 loads one step and one set of hyperparameters for all parameters",),
        )

        def seal(crc32s: npt.NDArray[np.uint32]) -> Iterator[Segment]:
            values = crc32s.tolist()
            return (segment for file in files for segment in file.tail(values))

        segments = [segment for file in files for segment in (*file.heads(), *file.tail_without_checksums())]
        segments += [segment for own in known.values() for segment in own]
        segments.append(Segment(LATEST_UNIVERSAL, 0, tag.encode()))
        return LayOut(manifest, tuple(segments), LATEST_UNIVERSAL, needs_crc32=True, seal=seal)


def _whole_rows(request: WriteRequest) -> IntArray:
    """int64[n_tensors]: the row of each tensor's box, -1 for an empty tensor."""
    tensors, boxes = request.tensors, request.boxes
    rows = np.full(len(tensors), -1, dtype=np.int64)
    rows[boxes.tensor] = np.arange(len(boxes))
    counts = np.bincount(boxes.tensor, minlength=len(tensors))
    is_cut = counts != np.where((counts == 0) & (tensors.numel == 0), 0, 1)
    if len(boxes):
        width = tensors.shape.shape[1]
        is_cut[boxes.tensor] |= (boxes.sizes[:, :width] != tensors.shape[boxes.tensor]).any(axis=1)
    wrong = np.flatnonzero(is_cut)
    if len(wrong):
        raise LayoutError(
            f"expected one whole box of each tensor, but {len(wrong):,} tensors are cut, repeated or absent",
            where=tensors.fqns[int(wrong[0])],
            hint="a universal checkpoint holds whole tensors: leave out --tp, --pp and --dp",
        )
    rows[tensors.numel == 0] = -1
    return rows


def _sorted(request: WriteRequest) -> _Sorted:
    view = _view(request)
    tensors = request.tensors
    found = _Sorted()
    for row, meta in enumerate(tensors):
        if meta.section == "model":
            found.weights[_module_name(meta.path)] = row
    state_rows: set[int] = set()
    blob_steps: set[str] = set()
    values = {blob.fqn: blob.value for blob in request.blobs}
    for key, states in view.named().items():
        if isinstance(key, int):
            raise Unsupported(f"the optimizer numbers its parameters, and nothing tells the name of {key}")
        name = _module_name((key,))
        for state, fqn in states.items():
            own = tensors.index.get(fqn)
            if own is not None:
                found.states.append(_State(name, state, own))
                state_rows.add(own)
            elif state == _STEP:
                found.steps.append((name, values[fqn]))
                blob_steps.add(fqn)
        _add_master(request, found, name, states)
    for group in view.named_groups():
        names = [_module_name((name,)) for name in group.params if isinstance(name, str)]
        found.groups.append({**group.hyperparameters, "params": names})
    _add_rest(request, found, state_rows, blob_steps, view)
    return found


def _view(request: WriteRequest) -> OptimizerView:
    nothing = ChunkTable.from_columns(tensor=[], offsets=[], sizes=[], file=[], offset=[], length=[])
    manifest = Manifest("", "", request.tensors, nothing, FileTable(), request.blobs, info=request.info)
    views = optimizer_views(manifest)
    if len(views) != 1:
        raise Unsupported(
            f"a universal checkpoint holds one optimizer's state, there are {len(views):,}",
            hint="write weights alone as safetensors, or a state of another form as dcp",
        )
    return views[0]


def _module_name(path: KeyPath) -> str:
    """A parameter's name without what stands for the module."""
    parts = list(".".join(map(str, path)).split("."))
    return ".".join(parts[1:] if len(parts) > 1 and parts[0] in _MODEL_KEYS else parts)


def _add_master(request: WriteRequest, found: _Sorted, name: str, states: Mapping[str, str]) -> None:
    """The shape of a trained parameter; a weight in fp32 goes into its file when there is no master beside it."""
    tensors = request.tensors
    row = tensors.index.get(states.get(_MASTER, ""))
    if row is None:
        row = found.weights.get(name)
        if row is None or tensors.dtypes[row].name != "float32":
            raise Unsupported(
                "no fp32 master and no weight in fp32, of which a universal checkpoint is made", where=name
            )
        found.states.append(_State(name, _MASTER, row))
        del found.weights[name]
    found.shapes[name] = tensors.shape_of(row)


def _add_rest(
    request: WriteRequest, found: _Sorted, state_rows: set[int], blob_steps: set[str], view: OptimizerView
) -> None:
    """Everything that is neither a weight nor a parameter's state."""
    placed = state_rows | set(found.weights.values()) | {state.row for state in found.states}
    for row, meta in enumerate(request.tensors):
        if row not in placed:
            found.others.append((meta.path, row))
    seen: set[str] = set()
    groups = f"{view.prefix}.param_groups" if view.prefix else "param_groups"
    for blob in request.blobs:
        if blob.fqn in seen or blob.fqn in blob_steps or blob.fqn == groups or blob.fqn.startswith(f"{groups}."):
            continue
        seen.add(blob.fqn)
        path, value = blob_entry(blob)
        is_optimizer = bool(view.prefix) and path[0] == view.prefix and len(path) > 1
        (found.optimizer if is_optimizer else found.model).append((path[1:] if is_optimizer else path, value))


def _files(request: WriteRequest, found: _Sorted, rows: IntArray, folder: str) -> Iterator[WrittenFile]:
    """Files with payload."""
    tensors = request.tensors
    for state in found.states:
        tensor = fresh_tensor(0, tensors.dtypes[state.row], tensors.shape_of(state.row))
        value: Any = tensor if state.state == _STEP else {"cat_dim": 0, "param": tensor}
        path = f"{folder}zero/{_folder_name(state.name)}/{state.state}.pt"
        yield WrittenFile.of(path, value, [int(tensors.nbytes[state.row])], [int(rows[state.row])])
    stored = [*((("module", name), row) for name, row in found.weights.items()), *found.others]
    fresh = [
        (path, fresh_tensor(key, tensors.dtypes[row], tensors.shape_of(row))) for key, (path, row) in enumerate(stored)
    ]
    module = OrderedMap()
    module.update({path[1]: tensor for path, tensor in fresh[: len(found.weights)]})
    root = {"module": module, **_facts(request, found, fresh[len(found.weights) :])}
    nbytes = [int(tensors.nbytes[row]) for _, row in stored]
    yield WrittenFile.of(f"{folder}mp_rank_00_model_states.pt", root, nbytes, [int(rows[row]) for _, row in stored])


def _folder_name(name: str) -> str:
    if not name or "/" in name or "\\" in name or name in (".", ".."):
        raise Unsupported(f"the parameter {name!r} cannot be the name of a folder")
    return name


def _facts(request: WriteRequest, found: _Sorted, tensors: Sequence[tuple[KeyPath, Any]]) -> dict[str, Any]:
    """A model state besides its module."""
    info = request.info
    values = nest([*found.model, *tensors], int_keyed=info.get("int_keyed_dicts", ())) if found.model else {}
    shared = info.get("shared", {})
    shapes = []
    for group in found.groups:
        own = OrderedMap()
        own.update({name: Size(found.shapes[name]) for name in group["params"] if name in found.shapes})
        shapes.append(own)
    step = info.get("step")
    return {
        "lr_scheduler": None,
        "global_steps": step if type(step) is int else 0,
        "skipped_steps": 0,
        "ds_config": {},
        "ds_version": info.get("deepspeed_version", "0.19.8"),
        **(values if isinstance(values, dict) else {}),
        "buffer_names": list(info.get("buffers", ())),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(shared) if isinstance(shared, Mapping) else {},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "universal_checkpoint_info": {"universal_checkpoint_version": _RECORD_VERSION},
    }


def _known_files(request: WriteRequest, found: _Sorted, folder: str) -> dict[str, list[Segment]]:
    """Files whose bytes are all known: global optimizer state, steps that are numbers, stage 3's model state."""
    facts = _facts(request, found, ())
    groups = [{**group, "params": [number]} for number, group in enumerate(found.groups)]
    n_steps = facts["global_steps"] - (facts["skipped_steps"] if type(facts["skipped_steps"]) is int else 0)
    step = fresh_tensor(0, DTYPES["float32"], ())
    own = nest(found.optimizer) if found.optimizer else {}
    optimizer = {
        **(own if isinstance(own, dict) else {}),
        "ds_version": facts["ds_version"],
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {_STEP: step}}, "param_groups": groups},
    }
    payload = struct.pack("<f", n_steps)
    found_files = {
        f"{folder}zero/optimizer_state.pt": _known(optimizer, [payload]),
        f"{folder}zero_pp_rank_0_mp_rank_00_model_states.pt": _known({"module": {}, **facts}, []),
    }
    for name, value in found.steps:
        found_files[f"{folder}zero/{_folder_name(name)}/{_STEP}.pt"] = _known(value, [])
    return {
        path: [Segment(path, offset, data) for offset, data in (*layout.heads, *layout.tail([]))]
        for path, layout in found_files.items()
    }


def _known(value: Any, storages: Sequence[bytes]) -> ZipLayout:
    """A file whose storages are given."""
    members = torch_members(dump_pickle(value), [len(data) for data in storages])
    given = {f"archive/data/{key}": data for key, data in enumerate(storages)}
    return ZipLayout(Member(m.name, m.nbytes, given.get(m.name, m.payload)) for m in members)


WRITER = UniversalWriter()
