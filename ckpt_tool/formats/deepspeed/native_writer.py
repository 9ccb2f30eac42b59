"""The writer of DeepSpeed's own checkpoints, ZeRO stages 1 to 3, on any grid that the source's facts give cuts for.

What the loader needs was read off DeepSpeed 0.19.8 (``runtime/engine.py``, ``zero/stage_1_and_2.py``,
``zero/stage3.py``) and its files. The plain form is written, which BF16_Optimizer and elastic runs load
too. Only what has no hyperparameters, which elastic runs do not save, stays elastic, with the step that they need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ckpt_tool.errors import LayoutError, UsageError
from ckpt_tool.formats._torch_file.written import check_dtypes
from ckpt_tool.formats._torch_file.written_files import WrittenFiles
from ckpt_tool.formats.base import BoxTable, LayOut, Segment, WriteRequest, WriterOptions
from ckpt_tool.formats.deepspeed.autoep import check_not_packed
from ckpt_tool.formats.deepspeed.names import LATEST
from ckpt_tool.formats.deepspeed.target_facts import step_of
from ckpt_tool.formats.deepspeed.target_files import TargetFiles
from ckpt_tool.formats.deepspeed.target_grid import Grid
from ckpt_tool.formats.deepspeed.target_parts import TargetParts
from ckpt_tool.formats.deepspeed.target_repeats import own_masters, second_names, with_masters_apart
from ckpt_tool.formats.deepspeed.target_state import STEP, TargetState
from ckpt_tool.manifest.model import Blob, FileEntry, Manifest
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.sizes import counted

__all__ = ["WRITER", "DeepSpeedWriter"]


class DeepSpeedWriter:
    """Lays out a folder with ``latest`` and the files of one step, as the ranks of the target would have saved them.

    The order of parameters within a group is that of the source's optimizer, which is that of the program; a run loads
    it by position. Round robin, alignment and sub-groups follow the source's configuration. Stages are runs of a
    pipeline's numbered layers, experts are shared as their layers do it, and tensor-parallel ranks by the record of it.
    """

    name = "deepspeed"
    per_rank = True

    def values(self, source: Manifest, blobs: Sequence[Blob]) -> Sequence[str]:
        """Steps: DeepSpeed has one for all parameters of a vector."""
        state = TargetState.of(source.tensors, blobs, source.info)
        return [
            source.tensors.fqns[row]
            for own in state.parameters.values()
            for name, row in own.states.items()
            if source.tensors.numel[row] == 1 and (name == STEP or source.tensors.shape_of(row) != own.shape)
        ]

    def arranged(
        self, source: Manifest, blobs: Sequence[Blob], mesh: Mapping[str, int], options: WriterOptions
    ) -> Manifest:
        """Weights that are masters get a second name; those that stage 3 does not store and that are masters, none.

        Raises:
            UsageError: the stage is not known.
            Unsupported: axes that its files do not have; experts that AutoEP has placed.
            LayoutError: at stage 3, whether a weight is a buffer is not known; shards of the source are not joined.
        """
        Grid.of(mesh)
        _check_joined(source)
        check_not_packed(source, blobs)
        stage = options.zero_stage or source.info.get("zero_stage") or 0
        if stage not in (1, 2, 3):
            raise UsageError("the ZeRO stage of the target is not known", hint="use --zero-stage 1, 2 or 3")
        state = TargetState.of(source.tensors, blobs, source.info)
        shared = source.info.get("shared", {})
        gone = second_names(source, state)
        if stage == 3:
            gone |= {*own_masters(source, state), *state.lent.values()}
        found = with_masters_apart(source, state)
        found = only_tensors(found, [row for row in range(len(found.tensors)) if row not in gone])
        untrained = [name for name in state.weights if name not in state.parameters and name not in shared]
        buffers = _buffers(source, state, untrained, stage)
        frozen = [name for name in untrained if name not in set(buffers)]
        info = {**source.info, "zero_stage": stage, "buffers": buffers, "frozen": frozen}
        numbers = {str(own.key): own.name for own in state.parameters.values() if isinstance(own.key, int)}
        if numbers:  # which weights that are gone later cannot tell
            info["optimizer_parameters"] = numbers
        info["model_dtype"] = _model_dtype(source, state, options)
        return found.replace(info=info)

    def left_out(
        self,
        source: Manifest,
        blobs: Sequence[Blob],
        mesh: Mapping[str, int],
        rank_state: Literal["keep", "drop", "emit"] | None,
    ) -> Mapping[str, str]:
        """Weights of trained parameters at stage 3, which has their masters only."""
        del mesh, rank_state
        if source.info["zero_stage"] != 3:
            return {}
        state = TargetState.of(source.tensors, blobs, source.info)
        shared = source.info.get("shared", {})
        why = "stage 3 stores fp32 masters alone; the weights are rounded from these when they are loaded"
        return {
            source.tensors.fqns[row]: why
            for name, row in state.weights.items()
            if shared.get(name, name) in state.parameters
        }

    def place(
        self,
        tensors: TensorTable,
        blobs: Sequence[Blob],
        mesh: Mapping[str, int],
        info: Mapping[str, Any],
        options: WriterOptions,
    ) -> BoxTable:
        """Each rank's part of every flat vector; weights on the first rank, at stage 3 buffers on all."""
        return TargetParts.of(tensors, blobs, info, mesh=mesh, options=options).slots.boxes

    def lay_out(self, request: WriteRequest) -> LayOut:
        """The folder; ``latest`` is written last.

        Raises:
            Unsupported: what torch cannot save, or DeepSpeed has no place for.
            LayoutError: parameters of a vector have different steps.
        """
        check_dtypes(request.tensors)
        mesh = dict(zip(request.mesh_axes, request.mesh_sizes, strict=True))
        parts = TargetParts.of(request.tensors, request.blobs, request.info, mesh=mesh, options=request.options)
        tag = str(request.info.get("tag") or f"global_step{step_of(parts.state, request.info) or 0}")
        if tag.endswith("_universal"):
            tag = tag.removesuffix("_universal")
        files = WrittenFiles(TargetFiles(parts, request, f"{tag}/").files())
        file, offset = files.places(len(request.boxes))
        homeless = np.flatnonzero(offset < 0)
        if len(homeless):
            fqn = request.tensors.fqns[int(request.boxes.tensor[homeless[0]])]
            raise LayoutError(f"{counted(len(homeless), 'box', 'are')} in no file of the target", where=fqn)
        manifest = request.manifest(
            self.name,
            [*files.entries(), FileEntry(LATEST, len(tag))],
            file=file,
            offset=offset,
            blobs=request.blobs,
            notes=parts.notes(),
        )
        segments = (*files.segments(), Segment(LATEST, 0, tag.encode()))
        return LayOut(manifest, segments, LATEST, needs_crc32=True, seal=files.seal)


def _check_joined(source: Manifest) -> None:
    if source.info.get("unjoined"):
        raise LayoutError(
            "tensor-parallel shards of the source are not joined",
            where=str(source.info["unjoined"][0]),
            hint="describe it in universal_checkpoint_info.json beside the source's files",
        )


def _model_dtype(source: Manifest, state: TargetState, options: WriterOptions) -> str:
    """Of the weights as the run shall have them: asked for, recorded, that of weights beside masters, or of masters."""
    if options.model_dtype is not None:
        return options.model_dtype.name
    trained = [source.tensors.dtypes[row].name for name, row in state.weights.items() if name in state.parameters]
    return str(source.info.get("model_dtype") or (trained[0] if trained else "float32"))


def _buffers(source: Manifest, state: TargetState, untrained: Sequence[str], stage: int) -> list[str]:
    """Names among ``untrained`` weights that are no parameters.

    Only DeepSpeed records them. Of other sources all are taken for buffers, which keeps each whole and loads either
    way; but at stage 3 a frozen parameter would have to be cut.
    """
    if source.info.get("zero_stage") is not None:
        return [name for name in untrained if name in set(source.info.get("buffers", ()))]
    unsure = [name for name in untrained if source.tensors.dtypes[state.weights[name]].kind in ("float", "complex")]
    if stage == 3 and unsure:
        raise LayoutError(
            f"{counted(len(unsure), 'weight', 'have')} no optimizer state, and nothing tells whether they are "
            "buffers, frozen parameters or second names of others: stage 3 cuts the ones and not the others",
            where=unsure[0],
            hint="use --zero-stage 1 or 2, which store them all alike",
        )
    return list(untrained)


WRITER = DeepSpeedWriter()
