"""Manifests merged side by side come apart again as they were."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt_tool.errors import FormatError
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.merge import merge_manifests, replace_chunks, rows_of_part, split_manifest
from ckpt_tool.manifest.model import Blob, FileRange, Manifest
from ckpt_tool.manifest.subset import only_tensors
from tests.synthetic import make_source


def parts() -> list[tuple[str, Manifest]]:
    """Two parts of different widths, the second with an object and strides."""
    first = make_source({"a": np.zeros((4, 2), np.float32)}, {"a": [Box((0, 0), (2, 2)), Box((2, 0), (2, 2))]}).manifest
    second = make_source({"b": np.zeros(3, np.int64), "c": np.zeros((), np.int8)}, {"b": [Box((0,), (3,))], "c": []})
    blob = Blob("lr", "json", FileRange("f0", 1, 2), path=("lr",))
    return [("model", first), ("optim", second.manifest.replace(blobs=(blob,)))]


def rows(manifest: Manifest) -> list[object]:
    """Everything that a manifest lists, as records."""
    chunks = [manifest.chunks.record(i, manifest.tensors, manifest.files) for i in range(len(manifest.chunks))]
    return [*manifest.tensors, *chunks, *manifest.files, *manifest.blobs]


def test_split_undoes_merge() -> None:
    """Each part comes back with its own rows, paths and widths."""
    merged = merge_manifests(parts(), format_name="bundle", root="memory://x")
    assert merged.tensors.fqns == ("a", "b", "c")
    assert merged.files.paths == ("model/f0", "model/f1", "optim/f0", "optim/f1")
    for span, (folder, part) in zip([(0, 1), (1, 3)], parts(), strict=True):
        again = split_manifest(merged, rows_of_part(merged, folder, span), format_name=part.format)
        assert rows(again) == rows(part)
        assert again.root == f"memory://x/{folder}"


def test_chunks_of_one_part_are_replaced() -> None:
    """New chunks of a part, with strides, leave the others as they are."""
    merged = merge_manifests(parts(), format_name="bundle", root="memory://x")
    picked = rows_of_part(merged, "optim", (1, 3))
    part = split_manifest(merged, picked, format_name="x")
    moved = part.chunks.replace(offset=part.chunks.offset + 100, strides=np.full_like(part.chunks.sizes, 1))
    chunks = replace_chunks(merged, picked, moved)
    assert chunks.offset.tolist() == [*merged.chunks.offset[:2].tolist(), int(part.chunks.offset[0]) + 100]
    assert chunks.strides is not None
    assert chunks.strides[:2].tolist() == [[2, 1], [2, 1]]
    assert chunks.tensor.tolist() == merged.chunks.tensor.tolist()


def test_a_part_of_some_rows() -> None:
    """Where chunks, files, objects or tensors of a merged manifest are left out, a part has what is left of its own."""
    merged = merge_manifests(parts(), format_name="bundle", root="memory://x")
    fewer = merged.replace(chunks=merged.chunks.take([1, 2]), blobs=())
    for folder, span, expected in (("model", (0, 1), rows(parts()[0][1])[:1]), ("optim", (1, 3), [])):
        again = split_manifest(fewer, rows_of_part(fewer, folder, span), format_name="x")
        assert len(again.chunks) == 1
        assert rows(again)[: len(expected)] == expected
        assert again.chunks.record(0, again.tensors, again.files).fqn == ("a" if folder == "model" else "b")
    one = only_tensors(merged, [1])
    again = split_manifest(one, rows_of_part(one, "optim", None), format_name="x")
    assert (again.tensors.fqns, len(again.chunks)) == (("b",), 1)
    assert len(split_manifest(one, rows_of_part(one, "model", None), format_name="x").tensors) == 0


def test_one_name_in_two_parts_is_refused() -> None:
    """A tensor that two folders hold is no bundle."""
    part = parts()[0][1]
    with pytest.raises(FormatError, match="'a' is in 'one' and in 'two'"):
        merge_manifests([("one", part), ("two", part)], format_name="bundle", root="memory://x")
