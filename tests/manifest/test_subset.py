"""Parts of manifests by file."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.subset import only_files
from tests.manifest.made import manifests


@given(manifests(), st.data())
def test_only_some_files(whole: Manifest, data: st.DataObject) -> None:
    """Chunks of the kept files stay in order and are numbered anew; tensors stay, with or without chunks."""
    kept = data.draw(st.lists(st.booleans(), min_size=len(whole.files), max_size=len(whole.files)))
    part = only_files(whole, kept)
    names = [path for path, is_kept in zip(whole.files.paths, kept, strict=True) if is_kept]
    assert list(part.files.paths) == names
    assert part.tensors is whole.tensors
    expected = [whole.chunks.record(row, whole.tensors, whole.files) for row in range(len(whole.chunks))]
    actual = [part.chunks.record(row, part.tensors, part.files) for row in range(len(part.chunks))]
    assert actual == [chunk for chunk in expected if chunk.where.path in names]
