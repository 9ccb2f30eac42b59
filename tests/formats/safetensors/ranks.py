"""A checkpoint of four ranks with every odd type, laid out by the writer and filled with known bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_tool.formats.base import Source, WriteRequest
from ckpt_tool.formats.safetensors import rank_files
from ckpt_tool.formats.safetensors.rank_writer import WRITER
from ckpt_tool.geometry.box import Box
from tests.formats.conformance import assemble
from tests.formats.safetensors.places import meta, request, written

READER = rank_files.READER
METAS = [
    meta("w", "float32", (4, 3)),
    meta("opt.w.exp_avg", "float32", (4, 3), section="optimizer", path=("opt", 0, "w", "exp_avg")),
    meta("z", "complex128", (2,)),
    meta("flag", "bool", (3,), section="other"),
    meta("empty", "bfloat16", (0, 5)),
    meta("scalar", "int64", ()),
    meta("fp4", "float4_e2m1fn_x2", (2, 2)),
]
BOXES = [
    ("w", Box((0, 0), (2, 3)), 0),
    ("flag", Box((0,), (3,)), 0),
    ("w", Box((2, 0), (1, 3)), 1),
    ("w", Box((3, 0), (1, 3)), 1),
    ("opt.w.exp_avg", Box((0, 0), (4, 1)), 1),
    ("opt.w.exp_avg", Box((0, 1), (4, 2)), 0),
    ("z", Box((0,), (2,)), 3),
    ("flag", Box((0,), (3,)), 3),
    ("scalar", Box((), ()), 0),
    ("fp4", Box((1, 0), (1, 2)), 1),
    ("fp4", Box((0, 0), (1, 2)), 0),
]


def payloads_of(asked: WriteRequest) -> tuple[list[bytes], dict[str, bytes]]:
    """Bytes of each box, and of each whole tensor, of random content."""
    random = np.random.default_rng(7)
    whole = {m.fqn: random.integers(0, 256, (*m.shape, m.dtype.itemsize), dtype=np.uint8) for m in asked.tensors}
    found = []
    for row in range(len(asked.boxes)):
        m = asked.tensors.record(int(asked.boxes.tensor[row]))
        ndim = len(m.shape)
        box = Box(tuple(asked.boxes.offsets[row, :ndim].tolist()), tuple(asked.boxes.sizes[row, :ndim].tolist()))
        found.append(whole[m.fqn][box.slices].tobytes())
    return found, {fqn: array.tobytes() for fqn, array in whole.items()}


def saved(asked: WriteRequest) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """``(files, whole tensors)`` of a request."""
    payloads, whole = payloads_of(asked)
    return written(WRITER.lay_out(asked), payloads), whole


def read_all(source: Source) -> dict[str, bytes]:
    """Whole tensors by our reader."""
    manifest = READER.read(source)
    return {m.fqn: assemble(source.store, manifest, manifest.chunks, m.fqn).data for m in manifest.tensors}


def full_request(**fields: Any) -> WriteRequest:
    """Four ranks, one of which stores nothing, and every odd type."""
    return request(METAS, BOXES, 4, mesh_axes=("dp", "tp"), mesh_sizes=(2, 2), info={"step": 3}, **fields)
