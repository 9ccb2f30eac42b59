"""Files that are not what their name says are told for what they are, with what to do."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.errors import FormatError
from ckpt_tool.formats._content import content_of, what_is
from ckpt_tool.formats._folder import folder_content, named_content
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.safetensors import single
from ckpt_tool.storage.memory import MemoryStore


def _zip(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, b"x")
    return out.getvalue()


def _tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a"))
    return out.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
FILES = {
    "a git-LFS pointer": LFS,
    "an HTML page": b"<!DOCTYPE html>\n<html><body>401</body></html>",
    "an XML error reply of an object store": b'<?xml version="1.0"?>\n<Error><Code>NoSuchKey</Code></Error>',
    "a gzip file": gzip.compress(b"x" * 99),
    "a zip archive": _zip("weights/readme.txt"),
    "a torch.save file (zip)": _zip("archive/data.pkl"),
    "a torch.save file (the stream of torch before 1.6)": pickle.dumps(0x1950A86A20F9469CFC6C, 2)
    + pickle.dumps(1001, 2),
    "a pickle": pickle.dumps({"state_dict": [1.0]}, 4),
    "JSON text": b'{"metadata": {}, "weight_map": {}}',
    "a GGUF file": b"GGUF\x03\0\0\0" + bytes(40),
    "an empty file": b"",
    "only zero bytes at its start": bytes(600),
    "a tar archive": _tar(),
    "a numpy array": b"\x93NUMPY\x01\0" + bytes(40),
    "plain text": b"epoch 3, loss 1.2",
    "an error reply of a server": b"404: Not Found",
}


@pytest.mark.parametrize(("what", "raw"), FILES.items(), ids=FILES)
def test_each_kind_is_named(what: str, raw: bytes) -> None:
    """Content is told by its first bytes alone."""
    assert what_is(raw[:512]) == what


@pytest.mark.parametrize(("what", "raw"), FILES.items(), ids=FILES)
def test_renamed_files_are_called_what_they_are(what: str, raw: bytes) -> None:
    """R86: in place of an absurd header length the error names the content, and the hint says what to do."""
    store = MemoryStore({"model.safetensors": raw})
    source = Source(store, store.listing())
    with pytest.raises(FormatError) as caught:
        single.READER.read(source)
    content = content_of(raw[:512])
    assert content is not None
    assert str(caught.value) == f"model.safetensors: not a safetensors file but {what}"
    assert caught.value.hint == content.fix


def test_a_pointer_says_how_to_fetch_the_file() -> None:
    """The hint of a git-LFS pointer has the true size and the command."""
    content = content_of(LFS)
    assert content is not None
    assert content.fix == (
        'the pointer alone was cloned, of a file of 4,976,698,672 bytes: run "git lfs pull" in the repository'
    )


def test_a_safetensors_file_is_recognised() -> None:
    """Also by a reader that expected something else."""
    assert what_is(b"\x40\0\0\0\0\0\0\0" + b'{"a":') == "a safetensors file"


def test_unknown_bytes_are_nothing() -> None:
    """No guess is made."""
    assert what_is(np.arange(200, 256, dtype=np.uint8).tobytes()) is None


@given(st.binary(max_size=600))
def test_any_bytes_have_an_answer(head: bytes) -> None:
    """Nothing raises."""
    assert what_is(head) is None or isinstance(what_is(head), str)


@pytest.mark.parametrize(
    ("path", "what"),
    [("model.onnx", "an ONNX model"), ("model.ckpt-9.data-00000-of-00001", "a part of a TensorFlow checkpoint")],
)
def test_models_of_other_programs_are_named(path: str, what: str) -> None:
    """What a name tells of a file that is no checkpoint, alone and in a folder."""
    found, in_folder = named_content(path), folder_content({path: 9, "README.md": 1})
    assert found is not None
    assert found.what == what
    assert in_folder is not None
    assert in_folder.what == f"{what} ({path})"
