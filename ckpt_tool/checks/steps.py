"""Steps are the counters that optimizers keep per parameter; read here, because a torn save leaves them mixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ckpt_tool.checks.extents import some_names
from ckpt_tool.checks.optimizer import step_findings
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.base import Reader, Source
from ckpt_tool.geometry.columns import BoolArray
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.optimizer import optimizer_views
from ckpt_tool.sizes import counted
from ckpt_tool.storage.store import Store

__all__ = ["MAX_STEPS_READ", "mixed_steps"]

MAX_STEPS_READ = 4096
"""More counters than this cost more requests than the answer is worth."""


def mixed_steps(
    manifest: Manifest, has_chunk: BoolArray, *, reader: Reader, source: Source, store: Store
) -> Iterator[Finding]:
    """Whether each optimizer's parameters are at one step, and every copy of a counter at the same.

    Where files differ and each is of one step, they are of several saves: an error. Parameters that differ otherwise
    may have begun to train later.

    Cost: one request of a few bytes for each copy of a counter that is a tensor, and what ``load_blobs`` costs for each
    that is an object; of more than ``MAX_STEPS_READ`` copies the first of each, of more counters none.
    """
    views = [view for view in optimizer_views(manifest) if any("step" in s for s in view.parameters.values())]
    wanted = {states["step"] for view in views for states in view.parameters.values() if "step" in states}
    if len(wanted) > MAX_STEPS_READ:
        return
    copies = _tensor_steps(manifest, wanted, has_chunk, store)
    yield from _mixed_copies(copies)
    copies |= _object_steps(manifest, wanted, reader, source)
    for view in views:
        steps: dict[str, float] = {}
        places: dict[str, set[float]] = {}
        for key, states in view.parameters.items():
            found = copies.get(states.get("step", ""))
            if found:
                steps[str(view.names.get(key, key)) if isinstance(key, int) else key] = found[0][1]
                for path, value in found:
                    places.setdefault(path, set()).add(value)
        yield from step_findings(view.prefix or "the optimizer", steps, places)


def _tensor_steps(
    manifest: Manifest, wanted: set[str], has_chunk: BoolArray, store: Store
) -> dict[str, list[tuple[str, float]]]:
    """By counter: the file of each copy, and its value."""
    chunks, tensors = manifest.chunks, manifest.tensors
    rows: dict[str, list[int]] = {}
    for fqn in wanted & tensors.index.keys():
        tensor = tensors.index[fqn]
        found = [row for row in chunks.rows_of(tensor).tolist() if has_chunk[row] and not chunks.flags[row]]
        is_number = tensors.dtypes[tensor].kind in {"float", "int", "uint"} and tensors.dtypes[tensor].numpy is not None
        if tensors.numel[tensor] == 1 and found and is_number:
            rows[fqn] = found
    if sum(map(len, rows.values())) > MAX_STEPS_READ:
        rows = {fqn: found[:1] for fqn, found in rows.items()}
    every = [(fqn, row) for fqn, found in rows.items() for row in found]
    ranges = [
        FileRange(manifest.files.paths[chunks.file[row]], int(chunks.offset[row]), int(chunks.length[row]))
        for _, row in every
    ]
    values: dict[str, list[tuple[str, float]]] = {}
    for (fqn, row), where, data in zip(every, ranges, store.fetch(ranges) if ranges else (), strict=True):
        dtype = tensors.dtypes[chunks.tensor[row]].as_numpy()
        if len(data) == dtype.itemsize:
            values.setdefault(fqn, []).append((where.path, float(np.frombuffer(data, dtype=dtype)[0])))
    return values


def _mixed_copies(copies: Mapping[str, Sequence[tuple[str, float]]]) -> Iterator[Finding]:
    """One finding where ranks hold different values of the same counters; names a file of each value."""
    differing = {fqn: found for fqn, found in copies.items() if len({value for _, value in found}) > 1}
    if not differing:
        return
    fqn = min(differing)
    files: dict[float, list[str]] = {}
    for path, value in differing[fqn]:
        files.setdefault(value, []).append(path)
    parts = [f"{value:g} in {some_names(paths, 2)}" for value, paths in sorted(files.items(), reverse=True)]
    n_more = len(differing) - 1
    more = f"; so it is with {counted(n_more, 'more counter')}" if n_more else ""
    said = f"copies of {fqn} differ: {'; '.join(parts)}: files of several saves are mixed{more}"
    yield Finding("mixed-steps", Severity.ERROR, said, fqn)


def _object_steps(
    manifest: Manifest, wanted: set[str], reader: Reader, source: Source
) -> dict[str, list[tuple[str, float]]]:
    """By counter that is an object: the file of the last copy, empty where it has none of its own, and its value."""
    rows = [number for number, blob in enumerate(manifest.blobs) if blob.fqn in wanted]
    try:
        blobs = reader.load_blobs(source, manifest, rows) if rows else ()
    except CkptError:  # an object that cannot be read is the reader's own finding
        return {}
    found = {blobs[number].fqn: blobs[number] for number in rows}
    return {
        fqn: [(blob.where.path if blob.where else "", float(blob.value))]
        for fqn, blob in found.items()
        if isinstance(blob.value, int | float) and not isinstance(blob.value, bool)
    }
