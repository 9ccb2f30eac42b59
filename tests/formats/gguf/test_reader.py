"""The reader of GGUF on files of llama.cpp's own library, and on files that lie."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.errors import CkptError, FormatError, NotFound, Unsupported
from ckpt_tool.formats.gguf.reader import READER
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import ReaderTests, source_of
from tests.formats.zoo import CHECKPOINTS, case
from tests.reports.made import as_bytes

BLOCKS = ("blk.0.ffn_up.weight", "blk.1.ffn_up.weight", "blk.2.ffn_up.weight")


class TestGguf(ReaderTests):
    """Plain and quantised, split, big-endian, a named file."""

    reader = READER
    reader_import = "ckpt_tool.formats.gguf.reader:READER"
    cases = (
        case("gguf_mixed", without_truth=BLOCKS, max_read_requests=1, max_resolve_requests=0),
        case("gguf_mixed", "ckpt/model.gguf", without_truth=BLOCKS, max_read_requests=1, max_resolve_requests=0),
        case("gguf_split", without_truth=BLOCKS, max_read_requests=3, max_resolve_requests=0),
        case("gguf_big", max_read_requests=1, max_resolve_requests=0),
    )


def test_blocks_are_what_they_are() -> None:
    """A quantised tensor is as many blocks as it has, of the bytes that each takes; the pairs are told."""
    with open_checkpoint(CHECKPOINTS / "gguf_mixed/ckpt") as checkpoint:
        found = {fqn: checkpoint.manifest.tensor(fqn) for fqn in BLOCKS}
        assert [(one.dtype.name, one.shape, one.dtype.itemsize) for one in found.values()] == [
            ("Q4_0", (4, 2), 18),
            ("Q8_0", (4, 2), 34),
            ("Q5_1", (4, 2), 24),
        ]
        metadata = checkpoint.manifest.info["metadata"]
        assert (metadata["general.architecture"], metadata["llama.block_count"]) == ("llama", 2)
        assert metadata["llama.rope.dimension_sections"][:3] == [1, 2, 3]
        assert checkpoint.objects()["tokenizer.ggml.tokens"][:3] == ["<s>", "a", "b"]


def test_export_of_what_is_not_quantised(tmp_path: Path) -> None:
    """Blocks are refused with what to type, and left out by it."""
    source = CHECKPOINTS / "gguf_mixed/ckpt"
    with pytest.raises(Unsupported, match="no such type: Q4_0") as caught:
        export(source, tmp_path / "m.safetensors")
    assert "--exclude" in (caught.value.hint or "")
    result = export(source, tmp_path / "m.safetensors", exclude=["dtype:Q*"], durable=False)
    truth = {fqn: tensor for fqn, tensor in as_bytes(source).items() if fqn not in BLOCKS}
    assert as_bytes(tmp_path / "m.safetensors") == truth
    assert {one.fqn for one in result.dropped} >= set(BLOCKS)
    export(source, tmp_path / "m.npz", durable=False)
    with np.load(tmp_path / "m.npz") as arrays:
        assert arrays[BLOCKS[0]].dtype.itemsize == 18
        assert arrays[BLOCKS[0]].shape == (4, 2)


def test_a_missing_file_of_a_split_is_told(tmp_path: Path) -> None:
    """Its tensors are unknown: the others are listed, with a note."""
    folder = shutil.copytree(CHECKPOINTS / "gguf_split/ckpt", tmp_path / "ckpt")
    (folder / "model-00002-of-00003.gguf").unlink()
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.manifest.info["missing_files"] == ["model-00002-of-00003.gguf"]
        assert len(checkpoint) == 4
    (folder / "other.gguf").write_bytes((folder / "model-00001-of-00003.gguf").read_bytes())
    with pytest.raises(NotFound, match=r"no checkpoint itself among 3 \.gguf, but files that are one each"):
        open_checkpoint(folder)


def test_another_name(tmp_path: Path) -> None:
    """Content tells."""
    shutil.copy(CHECKPOINTS / "gguf_mixed/ckpt/model.gguf", tmp_path / "weights")
    with open_checkpoint(tmp_path / "weights") as checkpoint:
        assert checkpoint.format == "gguf"


def text(value: str) -> bytes:
    """A text with its length."""
    return struct.pack("<Q", len(value)) + value.encode()


def made(pairs: bytes = b"", tensors: bytes = b"", *, n_pairs: int = 0, n_tensors: int = 0, version: int = 3) -> bytes:
    """A file with these bytes."""
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs) + pairs + tensors + bytes(64)


def tensor(name: str, *sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    """One tensor's description."""
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"GGUF", FormatError, "goes on to byte 8"),
        (made(version=1), Unsupported, "version 1, expected 2 or 3"),
        (made(n_tensors=1 << 60), FormatError, "tensors in"),
        (made(n_pairs=1 << 60), FormatError, "pairs in"),
        (made(struct.pack("<Q", 1 << 50), n_pairs=1), FormatError, "characters in"),
        (made(text("a") + struct.pack("<I", 77), n_pairs=1), FormatError, "unknown kind 77"),
        (made(text("a") + struct.pack("<IIQ", 9, 8, 1 << 40), n_pairs=1), FormatError, "values in"),
        (made(text("a") + struct.pack("<IIQ", 9, 4, 1 << 40), n_pairs=1), FormatError, "values in"),
        (made(text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, n_pairs=1), FormatError, "kind 9"),
        (made((text("a") + struct.pack("<IB", 0, 1)) * 2, n_pairs=2), FormatError, "there twice"),
        (made(text("general.alignment") + struct.pack("<II", 4, 0), n_pairs=1), FormatError, "alignment is 0"),
        (made(b"", tensor("w", 4, offset=1 << 40), n_tensors=1), FormatError, "'w' ends at byte"),
        (made(b"", tensor("w", 1 << 40, 1 << 40), n_tensors=1), FormatError, "has the sizes"),
        (made(b"", tensor("w", *[1] * 9), n_tensors=1), FormatError, "9 dimensions"),
        (made(b"", tensor("w", 4, kind=99), n_tensors=1), Unsupported, "type 99"),
        (made(b"", tensor("w", 33, kind=2), n_tensors=1), FormatError, "blocks of 32"),
        (made(b"", tensor("w", 4) * 2, n_tensors=2), FormatError, "'w' is there twice"),
    ],
)
def test_lies(data: bytes, kind: type[CkptError], message: str) -> None:
    """One clear error for each."""
    with pytest.raises(kind, match=message):
        READER.read(source_of(MemoryStore({"a.gguf": data})))


@pytest.mark.parametrize("kept", [3, 20, 100, 600, 1300, 2500, 3800])
def test_cut(kept: int) -> None:
    """Wherever a file ends early."""
    data = (CHECKPOINTS / "gguf_mixed/ckpt/model.gguf").read_bytes()[:kept]
    with pytest.raises(CkptError):
        READER.read(source_of(MemoryStore({"a.gguf": data})))
