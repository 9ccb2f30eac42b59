"""torch.save files read into numpy arrays with the container layer alone: the slow and obvious way."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.formats._pickle.legacy import is_legacy, read_legacy
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._zip.directory import is_big_endian, payload_offset, read_directory, read_member

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures" / "torch"
PT_FILES = FIXTURES / "pt_files" / "ckpt"


def reader(data: bytes) -> Callable[[int, int], bytes]:
    """A ``read(offset, length)`` over bytes."""
    return lambda offset, length: data[offset : offset + length]


def file_reader(path: Path) -> tuple[Callable[[int, int], bytes], int, int]:
    """A ``read(offset, length)`` over a file, its size, and the descriptor to close."""
    descriptor = os.open(path, os.O_RDONLY)
    return (lambda offset, length: os.pread(descriptor, length, offset)), path.stat().st_size, descriptor


def pickle_of(path: Path) -> bytes:
    """The bytes of ``data.pkl`` of a zip, or the whole file when it is a bare pickle."""
    data = path.read_bytes()
    if data[:4] != b"PK\x03\x04":
        return data
    read = reader(data)
    member = read_directory(read, len(data), where=path.name).record("data.pkl")
    assert member is not None
    return read_member(read, member, where=path.name)


def open_file(data: bytes, where: str) -> tuple[Any, Callable[[str], bytes], bool]:
    """The object of a torch.save file, a function from storage key to bytes, and whether these are big-endian."""
    read = reader(data)
    if is_legacy(data):
        legacy = read_legacy(read, len(data), where=where)
        return legacy.root, lambda key: read(*legacy.storages[key]), not legacy.is_little_endian
    directory = read_directory(read, len(data), where=where)
    member = directory.record("data.pkl")
    assert member is not None
    root = load_pickle(read_member(read, member, where=where), where=where)

    def storage(key: str) -> bytes:
        found = directory.record(f"data/{key}")
        assert found is not None
        if found.is_stored:
            return read(payload_offset(read, found, where=where), found.nbytes)
        return read_member(read, found, where=where)

    return root, storage, is_big_endian(read, directory, where=where)


def array_of(tensor: TensorRef, raw: bytes, *, big_endian: bool = False) -> npt.NDArray[Any]:
    """The tensor's elements, from the bytes of its storage; raw bytes where numpy has no such dtype."""
    dtype = tensor.dtype.as_numpy()
    width = dtype.itemsize
    if big_endian and tensor.dtype.component_bytes > 1:
        part = tensor.dtype.component_bytes
        raw = np.frombuffer(raw, np.uint8).reshape(-1, part)[:, ::-1].tobytes()
    flat = np.frombuffer(raw, dtype, count=len(raw) // width)
    index = np.full(tensor.shape, tensor.offset)
    for axis, stride in enumerate(tensor.strides):
        index += stride * np.arange(tensor.shape[axis]).reshape([-1 if k == axis else 1 for k in range(index.ndim)])
    view = flat[index]
    view = view.conj() if tensor.conj else view
    return np.ascontiguousarray(-view if tensor.neg else view).reshape(tensor.shape)
