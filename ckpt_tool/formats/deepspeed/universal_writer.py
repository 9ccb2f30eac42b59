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
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.errors import Unsupported
from ckpt_tool.formats._pickle.nodes import OrderedMap
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats._torch_file.written import Storage, WrittenFile, check_dtypes, fresh_tensor
from ckpt_tool.formats._torch_file.written_files import WrittenFiles
from ckpt_tool.formats._whole import whole_rows
from ckpt_tool.formats.base import LayOut, Segment, WriteRequest, WriterOptions
from ckpt_tool.formats.deepspeed.autoep import check_not_packed
from ckpt_tool.formats.deepspeed.names import LATEST_UNIVERSAL
from ckpt_tool.formats.deepspeed.target_facts import (
    UNIVERSAL_INFO,
    UNIVERSAL_VERSION,
    UNIVERSAL_VERSION_KEY,
    model_facts,
    step_of,
)
from ckpt_tool.formats.deepspeed.target_grid import Grid
from ckpt_tool.formats.deepspeed.target_repeats import own_masters, second_names, with_masters_apart
from ckpt_tool.formats.deepspeed.target_state import STEP, TargetState
from ckpt_tool.manifest.model import Blob, FileEntry, KeyPath, Manifest
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.manifest.tables import IntArray

__all__ = ["WRITER", "UniversalWriter"]


class UniversalWriter:
    """Lays out a folder with ``latest_universal`` and the universal form of one step.

    Needs an optimizer whose states are keyed by name, with fp32 masters among them, or fp32 weights that stand for
    them. Weights are written too, though DeepSpeed does not load those of a universal checkpoint: frozen parameters and
    buffers are in no other place.
    """

    name = "deepspeed-universal"
    per_rank = False

    def values(self, source: Manifest, blobs: Sequence[Blob]) -> Sequence[str]:
        """Steps, where nothing else tells at which one the run is, as stage 3 and the counters need it; else none."""
        if type(source.info.get("step")) is int:
            return ()
        state = TargetState.of(source.tensors, blobs, source.info)
        return [source.tensors.fqns[own.states[STEP]] for own in state.parameters.values() if STEP in own.states]

    def arranged(
        self, source: Manifest, blobs: Sequence[Blob], mesh: Mapping[str, int], options: WriterOptions
    ) -> Manifest:
        """What is stored under another name already is not stored again: stage 3's weights, which are the masters.

        Raises:
            Unsupported: experts that AutoEP has placed.
        """
        del mesh, options
        check_not_packed(source, blobs)
        state = TargetState.of(source.tensors, blobs, source.info)
        gone = second_names(source, state) | own_masters(source, state) | set(state.lent.values())
        found = with_masters_apart(source, state)
        return only_tensors(found, [row for row in range(len(found.tensors)) if row not in gone])

    def lay_out(self, request: WriteRequest) -> LayOut:
        """The folder.

        Raises:
            Unsupported: no optimizer, parameters without fp32 masters, or what torch cannot save.
            LayoutError: a tensor is not stored as one whole box.
        """
        check_dtypes(request.tensors)
        rows = whole_rows(request, "a universal checkpoint")
        found = TargetState.of(request.tensors, request.blobs, request.info)
        tag = f"global_step{step_of(found, request.info) or 0}_universal"
        files = WrittenFiles(_files(request, found, rows, f"{tag}/"))
        file, offset = files.places(len(request.boxes))
        known = _known_files(request, found, f"{tag}/")
        entries = files.entries()
        entries += [FileEntry(path, sum(len(s.data) for s in segments)) for path, segments in known.items()]
        entries.append(FileEntry(LATEST_UNIVERSAL, len(tag)))
        note = "stage 3 loads one step and one set of hyperparameters for all parameters"
        manifest = request.manifest(self.name, entries, file=file, offset=offset, blobs=request.blobs, notes=[note])
        segments = files.segments()
        segments += [segment for own in known.values() for segment in own]
        segments.append(Segment(LATEST_UNIVERSAL, 0, tag.encode()))
        return LayOut(manifest, tuple(segments), LATEST_UNIVERSAL, needs_crc32=True, seal=files.seal)


def _files(request: WriteRequest, found: TargetState, rows: IntArray, folder: str) -> Iterator[WrittenFile]:
    """Files with payload; those of one kind are laid out once."""
    tensors = request.tensors
    kinds: dict[tuple[bool, DType, tuple[int, ...]], WrittenFile] = {}
    for own in found.parameters.values():
        for state, row in own.states.items():
            path = f"{folder}zero/{_folder_name(own.name)}/{state}.pt"
            storages = [Storage.of_row(int(rows[row]), int(tensors.nbytes[row]))]
            kind = (state == STEP, tensors.dtypes[row], tensors.shape_of(row))
            if kind not in kinds:
                tensor = fresh_tensor(0, *kind[1:])
                value: Any = tensor if state == STEP else {"cat_dim": 0, "param": tensor}
                kinds[kind] = WrittenFile.packed(path, value, storages)
            yield kinds[kind].again(path, storages)
    stored = [*((("module", name), row) for name, row in found.weights.items()), *found.others]
    fresh = [
        (path, fresh_tensor(key, tensors.dtypes[row], tensors.shape_of(row))) for key, (path, row) in enumerate(stored)
    ]
    module = OrderedMap()
    module.update({path[1]: tensor for path, tensor in fresh[: len(found.weights)]})
    shared = request.info.get("shared", {})
    module.update({second: module[first] for second, first in shared.items() if first in module})
    root = {"module": module, **_facts(request, found, fresh[len(found.weights) :])}
    nbytes = [int(tensors.nbytes[row]) for _, row in stored]
    yield WrittenFile.of(f"{folder}mp_rank_00_model_states.pt", root, nbytes, [int(rows[row]) for _, row in stored])


def _folder_name(name: str) -> str:
    if not name or "/" in name or "\\" in name or name in (".", ".."):
        raise Unsupported(f"the parameter {name!r} cannot be the name of a folder")
    return name


def _facts(request: WriteRequest, found: TargetState, tensors: Sequence[tuple[KeyPath, Any]]) -> dict[str, Any]:
    shapes = [
        {name: found.parameters[name].shape for name in group.names if name in found.parameters}
        for group in found.groups
    ]
    return {
        **model_facts(found, request.info, tensors, shapes=shapes, grid=Grid()),
        UNIVERSAL_INFO: {UNIVERSAL_VERSION_KEY: UNIVERSAL_VERSION},
    }


def _known_files(request: WriteRequest, found: TargetState, folder: str) -> dict[str, list[Segment]]:
    """Files whose bytes are all known: global optimizer state, steps that are numbers, stage 3's model state."""
    facts = _facts(request, found, ())
    groups = [{**group.hyperparameters, "params": [number]} for number, group in enumerate(found.groups)]
    n_steps = facts["global_steps"] - (facts["skipped_steps"] if type(facts["skipped_steps"]) is int else 0)
    step = fresh_tensor(0, DTYPES["float32"], ())
    own = nest(found.optimizer) if found.optimizer else {}
    optimizer = {
        **(own if isinstance(own, dict) else {}),
        "ds_version": facts["ds_version"],
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {STEP: step}}, "param_groups": groups},
    }
    state = Storage(4, data=struct.pack("<f", n_steps))
    files = [
        WrittenFile.packed(f"{folder}zero/optimizer_state.pt", optimizer, [state]),
        WrittenFile.packed(f"{folder}zero_pp_rank_0_mp_rank_00_model_states.pt", {"module": {}, **facts}, []),
    ]
    for name, parameter in found.parameters.items():
        if STEP in parameter.values:
            path = f"{folder}zero/{_folder_name(name)}/{STEP}.pt"
            value = parameter.values[STEP]
            if isinstance(value, float):  # torch's optimizers count in tensors, and take nothing else from here
                value = np.array(value, dtype=np.float32)
            if isinstance(value, np.ndarray):
                tensor = fresh_tensor(0, DTYPES[value.dtype.name], value.shape)
                files.append(WrittenFile.packed(path, tensor, [Storage(value.nbytes, data=value.tobytes())]))
            else:
                files.append(WrittenFile.packed(path, value, []))
    return {file.path: [*file.heads(), *file.tail(())] for file in files}


WRITER = UniversalWriter()
