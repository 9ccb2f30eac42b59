"""Metadata that contradicts itself, or means harm, is refused with the name of the tensor."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckpt_tool.errors import CkptError, FormatError, UnsafePickle, Unsupported
from ckpt_tool.formats._dcp.metadata import foreign_root, load_metadata
from ckpt_tool.formats._pickle.nodes import Global, Size
from ckpt_tool.formats.dcp.reader import READER
from tests.formats.dcp.build import Checkpoint, row_cut, saved, source


def refusal(checkpoint: Checkpoint) -> CkptError:
    """The error that reading raises."""
    with pytest.raises(CkptError) as caught:
        READER.read(source(checkpoint.files()))
    return caught.value


def deep_tuple() -> Any:
    """A tuple of tuples: were they hashed, deeper ones could end the process."""
    nested: Any = ()
    for _ in range(60):
        nested = (nested,)
    return nested


CASES: list[tuple[str, Callable[[Checkpoint], None], str]] = [
    ("outside", lambda c: c.change(2, offsets=Size((5, 0))), r"w: chunk at \[5, 0\] of sizes \[2, 3\] does not lie"),
    ("negative", lambda c: c.change(1, offsets=Size((-2, 0))), r"w: chunk at \[-2, 0\]"),
    ("negative size", lambda c: c.change(1, sizes=Size((-2, 3))), r"w: chunk at \[2, 0\] of sizes \[-2, 3\]"),
    ("dimensions", lambda c: c.change(1, offsets=Size((2,))), r"w: chunk with offsets or sizes \[2\], expected 2"),
    ("float", lambda c: c.change(1, offsets=(2.0, 0)), "offsets or sizes of a chunk of 'w' are no whole numbers"),
    ("nested", lambda c: c.change(1, offsets=(deep_tuple(), 0)), "offsets or sizes of a chunk of 'w'"),
    ("huge", lambda c: c.change(1, offsets=(1 << 70, 0)), "beyond 64 bits"),
    ("list", lambda c: c.change(1, sizes=[2, 3]), "chunks of 'w' are not tuples"),
    ("shape", lambda c: c.shapes.update(w=Size((6, -3))), "shape .* of 'w' are not tuples of sizes"),
    ("byte offset", lambda c: c.change(1, offset=-1), "storage of 'w': offset -1, length .* are no byte counts"),
    ("byte length", lambda c: c.change(1, length=1.5), "storage of 'w': offset 0, length 1.5 are no byte counts"),
    ("climbs", lambda c: c.change(1, path="../../etc/shadow"), "'w': path '../../etc/shadow' leaves"),
    ("absolute", lambda c: c.change(1, path="/etc/shadow"), "'w': path '/etc/shadow' leaves"),
    ("drive", lambda c: c.change(1, path="C:\\x"), "'w': path .* leaves"),
    ("no path", lambda c: c.change(1, path=None), "storage of 'w': a field is of the wrong type"),
    ("transform", lambda c: c.change(1, transforms=["stream.aes/1"]), "'w' was stored through .*stream.aes/1"),
    ("dtype", lambda c: c.dtypes.update(w=Global("torch", "float3")), "'w': 'torch.float3' is not a known dtype"),
    ("no dtype", lambda c: c.dtypes.update(w=32), "element type of 'w' is 32"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_contradictions_name_the_tensor(spoil: Callable[[Checkpoint], None], message: str) -> None:
    """Each number that cannot be is an error of this package that says which tensor it belongs to."""
    checkpoint = row_cut()
    spoil(checkpoint)
    error = refusal(checkpoint)
    assert isinstance(error, FormatError | Unsupported)
    assert re.search(message, str(error)), str(error)


def test_a_chunk_without_storage() -> None:
    """A chunk that is listed but stored nowhere is named."""
    checkpoint = row_cut()
    listed = list(checkpoint.items)
    del checkpoint.items[1]
    files = {**checkpoint.files(), ".metadata": checkpoint.metadata(listed=listed)}
    with pytest.raises(FormatError, match=r"no storage is recorded for the chunk at \[2, 0\] of 'w'"):
        READER.read(source(files))


def test_storage_of_no_chunk() -> None:
    """Storage that no tensor lists is named."""
    checkpoint = row_cut()
    files = {**checkpoint.files(), ".metadata": checkpoint.metadata(listed=checkpoint.items[:2])}
    with pytest.raises(FormatError, match=r"a chunk at \[4, 0\] of 'w' is stored, but not listed"):
        READER.read(source(files))


def test_code_in_the_pickle() -> None:
    """A pickle that would run a command is refused with the byte where it asks, and runs nothing."""

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            import os

            return os.system, ("echo harmed",)

    with pytest.raises(UnsafePickle, match=r"\.metadata:\d+: .*system"):
        load_metadata(pickle.dumps(Attack()), ".metadata")


def test_ranks_that_disagree() -> None:
    """Metadata files of two ranks must give a tensor one shape."""
    first, second = row_cut(), row_cut(rows=(2, 2, 4))
    files = {**first.files(), "__0.metadata": first.metadata(), "__1.metadata": second.metadata()}
    del files[".metadata"]
    with pytest.raises(
        FormatError, match=r"__1.metadata: 'w' is float32\[6, 3\] in __0.metadata and float32\[8, 3\] here"
    ):
        READER.read(source(files))


def test_a_pickle_of_something_else() -> None:
    """The first bytes tell whose pickle it is."""
    assert foreign_root(row_cut().metadata()[:256]) is None
    assert foreign_root(pickle.dumps({"a": 1})) == "a pickle of something else"
    assert foreign_root(b"\x80\x04\x8c\x08my.codex\x94\x8c\x08Metadata\x94\x93") == "a pickle of my.codex.Metadata"
    with pytest.raises(FormatError, match=r"expected a torch\.distributed\.checkpoint\.metadata\.Metadata"):
        load_metadata(pickle.dumps({"a": 1}), ".metadata")


def test_uneven_chunks_in_any_order() -> None:
    """Chunks of 1, 7 and 2 rows, two of them by one rank, are all there with their ranks (R4)."""
    whole = torch.arange(20.0).reshape(10, 2)
    checkpoint = Checkpoint()
    checkpoint.tensor("w", (10, 2), [(0, (9, 0), whole[9:]), (1, (0, 0), whole[:7]), (0, (7, 0), whole[7:9])])
    manifest = READER.read(source(checkpoint.files()))
    assert manifest.chunks.offsets.tolist() == [[9, 0], [0, 0], [7, 0]]
    assert manifest.chunks.sizes.tolist() == [[1, 2], [7, 2], [2, 2]]
    assert manifest.chunks.rank.tolist() == [0, 1, 0]


def test_empty_ranks() -> None:
    """A rank whose part is empty has no chunk, a 0-byte file does no harm, and the notes say who is empty (R1)."""
    whole = torch.arange(6.0)
    checkpoint = Checkpoint()
    parts = [(rank, (2 * rank,), whole[2 * rank : 2 * rank + 2].clone()) for rank in range(3)]
    checkpoint.tensor("w", (6,), [*parts, (3, (6,), whole[6:].clone())])
    manifest = READER.read(source({**checkpoint.files(), "__4_0.distcp": b""}))
    assert manifest.chunks.offsets.tolist() == [[0], [2], [4]]
    assert manifest.info["n_empty_chunks"] == 1
    assert manifest.info["world_size"] == 5
    assert manifest.notes == ("1 chunk holds no element and is left out (rank 3: 1)",)


def test_nothing_to_cut() -> None:
    """Tensors of no dimension, and of no element, keep their shapes (R22)."""
    checkpoint = Checkpoint()
    for fqn, shape in (("scalar", ()), ("none", (0,)), ("flat", (0, 4)), ("one", (1,))):
        checkpoint.tensor(fqn, shape, [(0, (0,) * len(shape), torch.ones(shape))])
    manifest = READER.read(source(checkpoint.files()))
    assert {t.fqn: t.shape for t in manifest.tensors} == {"scalar": (), "none": (0,), "flat": (0, 4), "one": (1,)}
    assert manifest.chunks.tensor.tolist() == [0, 3]


def test_key_paths() -> None:
    """Nested keys come from the planner's data, for tensors and for objects; a broken path is left out."""
    checkpoint = row_cut("optim.state.0.w")
    checkpoint.stored("optim.lr", 0, None, None, saved(0.5))
    checkpoint.planner_data = {"optim.state.0.w": ("optim", "state", 0, "w"), "optim.lr": ("optim", 1.5)}
    manifest = READER.read(source(checkpoint.files()))
    assert manifest.tensor("optim.state.0.w").path == ("optim", "state", 0, "w")
    assert manifest.tensor("optim.state.0.w").section == "optimizer"
    assert manifest.blobs[0].path == ("optim.lr",)
