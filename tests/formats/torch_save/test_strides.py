"""Views of a storage: chunks with offset and strides are what numpy's ``as_strided`` says they are."""

from __future__ import annotations

import io
from itertools import accumulate

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.formats.torch_save.reader import READER
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import all_rows, assemble, source_of


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides (also 0, overlapping, permuted) and offset of a view, in elements."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    dense = [*accumulate(shape[:0:-1], lambda a, b: a * max(b, 1), initial=1)][::-1][: len(shape)]
    strides = tuple(draw(st.permutations(dense)) if draw(st.booleans()) else draw(st.just(dense)))
    strides = tuple(draw(st.sampled_from([stride, stride, 0, stride + 1, 2 * stride])) for stride in strides)
    return shape, strides, draw(st.integers(0, 5))


@settings(max_examples=150, deadline=None)
@given(made=st.lists(views(), min_size=1, max_size=4), is_legacy=st.booleans())
def test_views_are_what_numpy_says(
    made: list[tuple[tuple[int, ...], tuple[int, ...], int]], *, is_legacy: bool
) -> None:
    """Tensors of one storage with any shape, strides and offset: the manifest's chunks hold their elements in order."""
    needed = [
        offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else offset
        for shape, strides, offset in made
    ]
    base = torch.arange(max(1, *needed), dtype=torch.int32)
    state = {f"v{i}": base.as_strided(shape, strides, offset) for i, (shape, strides, offset) in enumerate(made)}
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=not is_legacy)
    store = MemoryStore({"a.pt": buffer.getvalue()})
    manifest = READER.read(source_of(store))
    chunks = READER.resolve(source_of(store), manifest, all_rows(manifest))
    elements = np.arange(len(base), dtype=np.int32)
    for i, (shape, strides, offset) in enumerate(made):
        expected = np.lib.stride_tricks.as_strided(elements[offset:], shape, tuple(4 * s for s in strides))
        assert assemble(store, manifest, chunks, f"v{i}").data == expected.tobytes()
    assert len(chunks) == sum(0 not in shape for shape, _, _ in made)


def test_no_chunk_is_longer_than_its_elements_reach() -> None:
    """A view of a large storage reads from its first element to its last, not the whole storage."""
    base = torch.arange(10_000, dtype=torch.int64)
    buffer = io.BytesIO()
    torch.save({"tail": base[-3:], "every": base[::1000], "same": base[5:6].expand(4, 7)}, buffer)
    manifest = READER.read(source_of(MemoryStore({"a.pt": buffer.getvalue()})))
    assert manifest.chunks.length.tolist() == [3 * 8, (9 * 1000 + 1) * 8, 8]
    strides = [manifest.chunks.record(row, manifest.tensors, manifest.files).strides for row in range(3)]
    assert strides == [None, (1000,), (0, 0)]
