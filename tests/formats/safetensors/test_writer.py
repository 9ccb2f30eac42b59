"""The writer of whole tensors: what it lays out is read by the reference library, torch and transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file as load_numpy

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import LayoutError, Unsupported, UsageError
from ckpt_tool.formats.base import WriteRequest, WriterOptions
from ckpt_tool.formats.safetensors import index_file, single
from ckpt_tool.formats.safetensors.writer import WRITER, split
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob, TensorMeta
from ckpt_tool.manifest.tables import TensorTable
from tests.formats.conformance import FIXTURES, Truth, assemble, truth_of
from tests.formats.safetensors.places import meta, opened, request, source_and_store, written

INDEX = "model.safetensors.index.json"
TRUTH = FIXTURES / "torch/hf_single"


def _real(**options: object) -> tuple[WriteRequest, list[bytes], dict[str, Truth]]:
    """A request for a real model, with its payloads."""
    truth = truth_of(TRUTH)()
    metas = [meta(fqn, tensor.dtype, tensor.shape) for fqn, tensor in truth.items()]
    asked = request(metas, options=WriterOptions(**options))  # type: ignore[arg-type]
    return asked, [tensor.data for tensor in truth.values()], truth


def _saved(files: dict[str, bytes], folder: Path) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def test_the_library_reads_one_file(tmp_path: Path) -> None:
    """numpy, torch and ``safe_open`` see every tensor bit for bit, with the metadata that loaders ask for."""
    import torch
    from safetensors.torch import load_file as load_torch

    asked, payloads, truth = _real(metadata={"made": "here"})
    layout = WRITER.lay_out(asked)
    path = _saved(written(layout, payloads), tmp_path) / "model.safetensors"
    loaded = load_torch(path)
    assert (layout.commit_path, sorted(loaded)) == (None, sorted(truth))
    for fqn, tensor in loaded.items():
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert (tuple(tensor.shape), raw) == (truth[fqn].shape, truth[fqn].data)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt", "made": "here"}
        assert file.get_tensor("buf_scalar").shape == ()


def test_our_reader_reads_it_back() -> None:
    """Shards, index and total size agree with each other, and every bit with the truth."""
    asked, payloads, truth = _real(max_shard_nbytes=10_000)
    layout = WRITER.lay_out(asked)
    files = written(layout, payloads)
    source, _ = source_and_store(files)
    manifest = index_file.READER.read(source)
    assert {f: assemble(source.store, manifest, manifest.chunks, f) for f in truth} == truth
    assert list(index_file.READER.check(source, manifest)) == []
    assert layout.commit_path == INDEX
    assert layout.segments[-1].path == INDEX
    index = json.loads(files[INDEX])
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in truth.values())
    assert set(index["weight_map"].values()) == {e.path for e in layout.manifest.files}


@pytest.mark.parametrize("limit", [1, 5000, 9312, 10_000, 100_000])
def test_shards_hold_no_more_than_the_limit(limit: int) -> None:
    """A file ends before the tensor that would exceed the limit; one that alone exceeds it has its own file."""
    asked, payloads, _ = _real(max_shard_nbytes=limit)
    layout = WRITER.lay_out(asked)
    sizes: dict[int, list[int]] = {}
    for row, file in enumerate(layout.manifest.chunks.file.tolist()):
        sizes.setdefault(file, []).append(len(payloads[row]))
    n_files = len(layout.manifest.files)
    assert all(sum(held) <= limit or sum(n > 0 for n in held) == 1 for held in sizes.values())
    assert [e.path for e in layout.manifest.files] == (
        ["model.safetensors"]
        if n_files == 1
        else [f"model-{i + 1:05d}-of-{n_files:05d}.safetensors" for i in range(n_files)]
    )
    assert (layout.commit_path is None) == (n_files == 1)


def test_bytes_follow_the_request_and_stay_aligned() -> None:
    """Tensors lie in the request's order, wide elements first in a file so that none is misaligned."""
    metas = [meta("b", "bool", (3,)), meta("x", "float32", (2,)), meta("a", "float32", (1,)), meta("i", "int64", (1,))]
    chunks = WRITER.lay_out(request(metas)).manifest.chunks
    start = int(chunks.offset.min())
    assert start % 64 == 0
    assert (chunks.offset - start).tolist() == [20, 8, 16, 0]


def test_the_index_lists_only_what_is_written() -> None:
    """R34: no ghost key: the map's keys are the request's tensors."""
    metas = [meta(f"t{i}", "uint8", (10,)) for i in range(5)]
    files = written(WRITER.lay_out(request(metas, options=WriterOptions(max_shard_nbytes=20))), [bytes(10)] * 5)
    assert sorted(json.loads(files[INDEX])["weight_map"]) == [m.fqn for m in metas]


def test_files_are_split_before_the_library_s_header_limit() -> None:
    """R85: names alone can exceed what the reference reader takes; the writer starts a new file in time."""
    table = TensorTable.from_records([meta(f"{i:04d}" + "n" * 996, "uint8", (1,)) for i in range(100)])
    files = split(table, max_shard_nbytes=None, max_header_nbytes=100_000)
    assert [len(f) for f in files] == [16] * 6 + [4]
    assert [row for f in files for row in f] == list(range(100))


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 60))
def test_split_keeps_order_and_limits(sizes: list[int], limit: int) -> None:
    """Every tensor is in one file, in order, and a file with several holds no more than the limit."""
    table = TensorTable.from_records([meta(str(i), "uint8", (n,)) for i, n in enumerate(sizes)])
    files = split(table, max_shard_nbytes=limit, max_header_nbytes=1 << 30)
    assert [row for f in files for row in f] == list(range(len(sizes)))
    assert all(sum(sizes[r] for r in f) <= limit for f in files if len(f) > 1)


def test_empty_tensors_need_no_box() -> None:
    """A tensor without elements is written though no chunk row exists for it."""
    layout = WRITER.lay_out(
        request([meta("e", "float32", (0, 5)), meta("w", "uint8", (2,))], [("w", Box.whole((2,)), 0)])
    )
    files = written(layout, [b"ab"])
    source, _ = source_and_store(files)
    assert single.READER.read(source).tensor("e").shape == (0, 5)


def test_no_tensors_are_an_empty_file(tmp_path: Path) -> None:
    """The library reads a file of nothing."""
    folder = _saved(written(WRITER.lay_out(request([])), []), tmp_path)
    assert load_numpy(folder / "model.safetensors") == {}


@pytest.mark.parametrize(
    "boxes",
    [
        [("w", Box((0,), (2,)), 0), ("w", Box((2,), (2,)), 0)],
        [("w", Box((0,), (3,)), 0)],
        [("w", Box((0,), (4,)), 0), ("w", Box((0,), (4,)), 1)],
        [],
    ],
    ids=["cut", "part", "twice", "absent"],
)
def test_only_whole_tensors_are_written(boxes: list[tuple[str, Box, int]]) -> None:
    """Anything else would be lost or ambiguous."""
    with pytest.raises(LayoutError, match="expected one whole box of each tensor") as caught:
        WRITER.lay_out(request([meta("w", "uint8", (4,))], boxes, 2))
    assert "'w'" in caught.value.message


def test_types_and_objects_that_do_not_fit_are_listed() -> None:
    """The message has the type, one tensor of it and how many there are; the hint says what to do."""
    with pytest.raises(Unsupported, match=r"complex128 \('a'\), qint8 \('c'\); 3 tensors in all") as caught:
        WRITER.lay_out(
            request([meta("a", "complex128", (1,)), meta("b", "complex128", (1,)), meta("c", "qint8", (1,))])
        )
    assert caught.value.hint == "leave them out with --exclude dtype:complex128 --exclude dtype:qint8"
    with pytest.raises(Unsupported, match=r"holds tensors only, and there are 1 other object: 'step'"):
        WRITER.lay_out(request([], blobs=(Blob("step", "value", None, 3, is_loaded=True),)))


@pytest.mark.parametrize("name", ["model.bin", ".safetensors", "a/b.safetensors"])
def test_file_names_are_checked(name: str) -> None:
    """A name that no reader would look for is a usage error."""
    with pytest.raises(UsageError, match="is no name for a safetensors file"):
        WRITER.lay_out(request([], options=WriterOptions(file_name=name)))


def test_a_file_name_names_shards_and_index_too() -> None:
    """The stem is used everywhere."""
    options = WriterOptions(file_name="adapter_model.safetensors", max_shard_nbytes=1)
    layout = WRITER.lay_out(request([meta("a", "uint8", (1,)), meta("b", "uint8", (1,))], options=options))
    assert layout.commit_path == "adapter_model.safetensors.index.json"
    assert layout.manifest.files.paths[0] == "adapter_model-00001-of-00002.safetensors"


@pytest.mark.peer
@pytest.mark.parametrize("limit", [None, 30_000])
def test_transformers_loads_what_was_written(limit: int | None, tmp_path: Path) -> None:
    """``from_pretrained`` finds no missing, unexpected or mismatched key, and the weights are the source's.

    Needs CKPT_PEER_TRANSFORMERS, the python of an environment with transformers and torch.
    """
    folder = FIXTURES / "deepspeed/hf_st_tied"
    with opened(folder / "ckpt") as source:
        manifest = index_file.READER.read(source)
        metas: list[TensorMeta] = list(manifest.tensors)
        payloads = [assemble(source.store, manifest, manifest.chunks, m.fqn).data for m in metas]
    layout = WRITER.lay_out(request(metas, options=WriterOptions(max_shard_nbytes=limit)))
    assert (layout.commit_path is None) == (limit is None)
    _saved(written(layout, payloads), tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "ckpt/config.json").read_bytes())
    script = f"""
import json, torch
from transformers import AutoModelForCausalLM
model, info = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, output_loading_info=True, dtype="auto")
raw = {{k: v.contiguous().view(torch.uint8).numpy().tobytes().hex() for k, v in model.state_dict().items()}}
print(json.dumps([{{k: sorted(map(str, v)) for k, v in info.items()}}, raw]))
"""
    python = os.environ["CKPT_PEER_TRANSFORMERS"]
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    info, loaded = json.loads(done.stdout.splitlines()[-1])
    truth = truth_of(folder)()
    assert all(not found for found in info.values())
    assert loaded == {fqn: tensor.data.hex() for fqn, tensor in truth.items()}


def test_columns_are_aligned_with_the_request() -> None:
    """Chunk rows are the request's box rows, whatever their order in the files."""
    metas = [meta("a", "uint8", (1,)), meta("b", "int64", (1,)), meta("c", "uint8", (1,))]
    boxes = [(m.fqn, Box.whole(m.shape), 0) for m in reversed(metas)]
    chunks = WRITER.lay_out(request(metas, boxes)).manifest.chunks
    assert chunks.tensor.tolist() == [2, 1, 0]
    assert (chunks.offset - chunks.offset.min()).tolist() == [9, 0, 8]
    assert np.array_equal(chunks.length, [1, 8, 1])
    assert DTYPES["int64"].itemsize == 8


@pytest.mark.parametrize(
    ("kinds", "hint"),
    [
        (("complex128",), "leave them out with --exclude dtype:complex128, or choose --to torch-save"),
        (("complex32", "bool"), "leave them out with --exclude dtype:complex32, or choose --to torch-save"),
    ],
)
def test_what_is_said_to_do_can_be_done(kinds: tuple[str, ...], hint: str) -> None:
    """Only floating weights are cast, so a cast is no way out for others."""
    with pytest.raises(Unsupported) as caught:
        WRITER.lay_out(request([meta(kind, kind, (1,)) for kind in kinds]))
    assert caught.value.hint == hint
