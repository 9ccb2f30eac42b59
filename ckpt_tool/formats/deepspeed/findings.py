"""Faults that only checkpoints of DeepSpeed can have, and the comparison of what several ranks hold of the same.

Copies need not be cut alike: ranks flatten other parameters before them. So each rank's copy is laid out as a tensor of
its own, and their elements are compared, not their chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from ckpt_tool.formats._torch_file import headers
from ckpt_tool.formats._torch_file.described import manifest_of
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.deepspeed.build import build
from ckpt_tool.formats.deepspeed.modules import Weights
from ckpt_tool.formats.deepspeed.opened import Checkpoint
from ckpt_tool.formats.deepspeed.placement import Placement
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkTable
from ckpt_tool.sizes import counted

__all__ = ["WITHOUT_OPTIMIZER", "checkpoint_findings", "copy_findings", "parameter_of"]

_BLOCK_NBYTES = 8 << 20
WITHOUT_OPTIMIZER = (
    "no optimizer partition (*zero_pp_rank_*_optim_states.pt) is here, and ZeRO saved some: DeepSpeed cannot train on "
    "from these files"
)


def checkpoint_findings(manifest: Manifest) -> Iterator[Finding]:
    """What reading found already; no request."""
    for path in manifest.info.get("missing_files", ()):
        said = f"{path} is missing: its rank's part of the tensors is not here"
        yield Finding("missing-file", Severity.ERROR, said, where=FileRange(path, 0, 0))
    if manifest.info.get("optimizer_lost"):
        yield Finding("optimizer-lost", Severity.WARNING, WITHOUT_OPTIMIZER)
    for name in manifest.info.get("absent_weights", ()):
        message = f"{name!r}: weight data absent (frozen?): the files have its name, not its elements"
        yield Finding("absent-weight", Severity.ERROR, message, fqn=f"module.{name}")
    for state in manifest.info.get("states_left_out", ()):
        yield Finding("unknown-state", Severity.WARNING, f"optimizer state {state!r} is neither flat nor one value")


def parameter_of(fqn: str) -> str:
    """The parameter that a tensor is, or is the state of.

    >>> parameter_of("module.norm.weight"), parameter_of("optimizer.state.norm.weight.exp_avg")
    ('norm.weight', 'norm.weight')
    """
    state = fqn.removeprefix("optimizer.state.")
    return fqn.removeprefix("module.") if state == fqn else state.rpartition(".")[0]


def copy_findings(
    source: Source, found: Checkpoint, weights: Weights, names: Sequence[str], info: Mapping[str, Any]
) -> Iterator[Finding]:
    """Tensors of ``names`` whose copies differ; of those that could not be joined, the ones whose shards are equal.

    Cost: the bytes of all copies, in blocks of 8 MiB, and the local headers of their files.
    """
    placement = Placement(
        tp_world_size=found.tp_world_size,
        rules=None,
        shapes=weights.shapes,
        buffers=frozenset(),
        apart=frozenset(name for shapes in weights.shapes.values() for name in shapes),
    )
    built = build(found, placement, weights)
    manifest = manifest_of("deepspeed", source.listing.url, found.opened, built.entries, built.assembly, {})
    manifest = manifest.replace(chunks=built.chunks.joined(manifest.tensors, manifest.chunks))
    wanted = set(names)
    copies: dict[str, dict[str, int]] = {}
    for row, fqn in enumerate(manifest.tensors.fqns):
        base, found_mark, rest = fqn.partition("@mp")
        name = base.removeprefix("module.").removeprefix("optimizer.state.")
        if found_mark and name in wanted:
            rank, _, state = rest.partition(".")
            copies.setdefault(f"{base}.{state}" if state else base, {})[rank] = row
    held = np.zeros(len(manifest.tensors), dtype=np.int64)
    np.add.at(held, manifest.chunks.tensor, manifest.chunks.volume)
    is_held = held == manifest.tensors.numel  # a pipeline stage has no weights of its own of what it shares
    copies = {fqn: {rank: row for rank, row in own.items() if is_held[row]} for fqn, own in copies.items()}
    rows = np.flatnonzero(np.isin(manifest.chunks.tensor, [row for own in copies.values() for row in own.values()]))
    chunks = headers.resolve(source, manifest, rows)
    unjoined = set(info.get("unjoined", ()))
    averaged = set(info.get("averaged", ()))
    equal: list[str] = []
    for fqn, by_rank in copies.items():
        name = parameter_of(fqn)
        digests = {rank: _digest(source, manifest, chunks, row) for rank, row in by_rank.items()}
        is_equal = len(set(digests.values())) == 1
        if name in unjoined:
            equal += [fqn] if is_equal and len(digests) > 1 else []
        elif len(set(digests.values())) > 1:
            yield Finding(
                "different-replicas",
                Severity.WARNING if name in averaged else Severity.ERROR,
                f"{fqn!r}: model-parallel ranks {', '.join(digests)} should hold the same, and hold "
                f"{counted(len(set(digests.values())), 'different value')}; that of the first is taken",
                fqn=fqn,
            )
    if unjoined:
        yield Finding(
            "rules-needed",
            Severity.WARNING,
            f"nothing says how the shards of {counted(len(unjoined), 'tensor')} join; "
            f"{counted(len(equal), 'have equal byte')} on all "
            f"ranks, so they may be replicas: {', '.join(equal[:20]) or 'none'}",
        )


def _digest(source: Source, manifest: Manifest, chunks: ChunkTable, row: int) -> bytes:
    """Of the elements of one copy, in row-major order, with dtype and shape."""
    meta = manifest.tensors.record(row)
    digest = blake2b(repr((meta.dtype.name, meta.shape)).encode(), digest_size=16)
    rows = chunks.rows_of(row)
    order = np.lexsort(tuple(chunks.offsets[rows].T[::-1])) if meta.shape else np.arange(len(rows))
    for chunk in rows[order].tolist():
        entry = manifest.files.entries[chunks.file[chunk]]
        start, length = int(chunks.offset[chunk]), int(chunks.length[chunk])
        if entry.codec is not None:
            digest.update(repr((entry.path, start, length)).encode())
            continue
        for offset in range(start, start + length, _BLOCK_NBYTES):
            digest.update(source.store.read(entry.path, offset, min(_BLOCK_NBYTES, start + length - offset)))
    return digest.digest()
