"""Moments are the optimizer's elementwise state; here their zero runs are compared with the weight and each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ckpt_tool.checks.optimizer import MOMENTS, model_names
from ckpt_tool.checks.zeros import Run, ZeroBox, judge_zeros, run_boxes
from ckpt_tool.geometry.columns import BoolArray
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.optimizer import optimizer_views
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.sizes import counted

__all__ = ["Family", "families_of", "family_members", "zero_findings"]

Family = Mapping[str, int]
"""Tensors of one parameter: ``weight`` and names of moments, each with its row in the tensor table."""


def families_of(manifest: Manifest) -> tuple[Family, ...]:
    """The moments of each parameter with its weight, as far as they have one shape."""
    tensors = manifest.tensors
    model = {fqn for fqn, s in zip(tensors.fqns, tensors.section, strict=True) if SECTIONS[s] == "model"}
    families: list[Family] = []
    for view in optimizer_views(manifest):
        names = model_names(view, model)
        for key, states in view.parameters.items():
            members = {s: tensors.index[fqn] for s, fqn in states.items() if s in MOMENTS and fqn in tensors.index}
            if not members:
                continue
            shape = tensors.shape_of(next(iter(members.values())))
            if key in names:
                members["weight"] = tensors.index[names[key]]
            families.append({name: row for name, row in members.items() if tensors.shape_of(row) == shape})
    return tuple(families)


def family_members(manifest: Manifest, families: tuple[Family, ...]) -> BoolArray:
    """bool[n_tensors]: tensors whose zero runs are of interest."""
    members = np.zeros(len(manifest.tensors), dtype=np.bool_)
    members[[row for family in families for row in family.values()]] = True
    return members


def zero_findings(
    manifest: Manifest, families: tuple[Family, ...], zeros: Mapping[int, tuple[Run, ...]]
) -> Iterator[Finding]:
    """Moments with long runs of exact zeros where something else of the parameter is alive, or across rows."""
    chunks, tensors = manifest.chunks, manifest.tensors
    boxes: dict[int, list[ZeroBox]] = {}
    for row, runs in zeros.items():
        tensor = int(chunks.tensor[row])
        boxes.setdefault(tensor, []).extend(run_boxes(runs, row, chunks.box(row, int(tensors.ndim[tensor]))))
    for family in families:
        for state, tensor in family.items():
            if state == "weight" or tensor not in boxes:
                continue
            found = _without_replicas(boxes[tensor])
            shape = tensors.shape_of(tensor)
            others = {name: _without_replicas(boxes.get(row, [])) for name, row in family.items() if name != state}
            judged = judge_zeros(shape, found, others)
            if judged is None:
                continue
            kind, reason, n = judged
            first = min(found, key=lambda zero: zero.box.offsets)
            flat = int(np.ravel_multi_index(first.box.offsets, shape)) if shape else 0
            numel = int(tensors.numel[tensor])
            said = (
                f"{n:,} of {counted(numel, 'element')} ({n / numel:.0%}) of {state} are exactly zero, from element "
                f"{flat:,} (index {list(first.box.offsets)}) on, {reason}"
            )
            severity = Severity.INFO if kind == "zero-rows" else Severity.WARNING
            path = manifest.files.paths[chunks.file[first.chunk]]
            where = FileRange(path, int(chunks.offset[first.chunk]), int(chunks.length[first.chunk]))
            yield Finding(kind, severity, said, tensors.fqns[tensor], where)


def _without_replicas(zeros: list[ZeroBox]) -> list[ZeroBox]:
    return list({zero.box: zero for zero in zeros}.values())
