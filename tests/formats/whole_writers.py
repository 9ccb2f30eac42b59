"""What tests of writers of whole trees have in common: a layout filled with random bytes, and every type read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.formats.base import Reader
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import KeyPath, Manifest
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import all_rows, assemble, source_of
from tests.formats.torch_save.laid_out import filled, request_of


def written(writer: Any, request: Any) -> tuple[MemoryStore, dict[str, bytes]]:
    """The files of a request whose tensors hold random bytes, and these by name."""
    rng = np.random.default_rng(0)
    payload = {meta.fqn: rng.integers(0, 2, meta.nbytes, dtype=np.uint8).tobytes() for meta in request.tensors}
    return MemoryStore(filled(writer.lay_out(request), payload, is_sealed=False)), payload


def assert_every_dtype_comes_back(writer: Any, reader: Reader, kinds: Sequence[str]) -> Manifest:
    """A matrix, a scalar and an empty array of each of ``kinds`` are read as they were written: below ``model``."""
    shapes = {"matrix": (3, 5), "scalar": (), "empty": (0, 4)}
    tensors: dict[KeyPath, tuple[DType, tuple[int, ...]]] = {
        ("model", kind, name): (DTYPES[kind], shape) for kind in kinds for name, shape in shapes.items()
    }
    boxes = [(row, Box.whole(shape), 0) for row, (_, shape) in enumerate(tensors.values()) if Box.whole(shape).volume]
    store, payload = written(writer, request_of(tensors, boxes))
    manifest = reader.read(source_of(store))
    chunks = reader.resolve(source_of(store), manifest, all_rows(manifest))
    found = {fqn: assemble(store, manifest, chunks, fqn) for fqn in manifest.tensors.fqns}
    assert {fqn: (one.dtype, one.shape, one.data) for fqn, one in found.items()} == {
        ".".join(map(str, path)): (kind.name, shape, payload[".".join(map(str, path))])
        for path, (kind, shape) in tensors.items()
    }
    return manifest
