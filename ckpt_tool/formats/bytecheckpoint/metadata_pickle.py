"""The ``.metadata`` of a section that is being written: ByteCheckpoint's ``Metadata`` with a shell for each chunk."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ckpt_tool.dtypes import DType
from ckpt_tool.formats._dcp.metadata_pickle import (
    MetadataPickle,
    WrittenChunks,
    WrittenItem,
    WrittenTensor,
    begin_metadata,
    index_piece,
    text_piece,
)
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._torch_file.written import fresh_tensor
from ckpt_tool.formats.bytecheckpoint.location import MODULE
from ckpt_tool.manifest.model import KeyPath

__all__ = ["metadata_pickle"]

_VERSION = "0.0.2"
_NEW, _BUILD, _STOP, _MARK, _SETITEMS, _NONE, _EMPTY_DICT = b")\x81", b"b", b".", b"(", b"u", b"N", b"}"


def metadata_pickle(
    tensors: Sequence[WrittenTensor], chunks: WrittenChunks, blobs: Sequence[tuple[str, KeyPath, WrittenItem]]
) -> bytes:
    """The bytes of a section's ``.metadata``; every item of a tensor is its packed elements.

    Args:
        tensors: in the order in which the state dict is to be rebuilt.
        chunks: of all tensors, in their order.
        blobs: key, nested keys and item of each object that is not a tensor.
    """
    pickle = MetadataPickle()
    begin_metadata(pickle, MODULE, tensors, chunks, blobs, (MODULE, "_StorageInfo"))
    pickle.add(pickle.text("all_tensor_metadata"))
    _add_shells(pickle, tensors, chunks, [fqn for fqn, _, _ in blobs])
    pickle.add(pickle.text("bytecheckpoint_version"), text_piece(_VERSION))
    pickle.add(pickle.text("user_defined_dict"), _EMPTY_DICT, _SETITEMS, _BUILD, _STOP)
    return pickle.finished()


def _add_shells(
    pickle: MetadataPickle, tensors: Sequence[WrittenTensor], chunks: WrittenChunks, blobs: Sequence[str]
) -> None:
    """Pushes the dict of MetadataIndex to shells; equal boxes have equal ones."""
    shells: dict[tuple[str, tuple[int, ...]], bytes] = {}
    pickle.add(_EMPTY_DICT, _MARK)
    for fqn in blobs:
        pickle.add(index_piece(pickle, fqn, None, ()), _NONE)
    row = 0
    for tensor in tensors:
        ndim = len(tensor.shape)
        for number in range(tensor.n_chunks):
            key = (tensor.dtype.name, tuple(chunks.sizes[row, :ndim].tolist()))
            shell = shells.get(key)
            if shell is None:
                shell = shells[key] = _shell(tensor.dtype, key[1])
            pickle.add(index_piece(pickle, tensor.fqn, number, chunks.offsets[row, :ndim].tolist()), shell)
            row += 1
    pickle.add(_SETITEMS)


def _shell(dtype: DType, sizes: tuple[int, ...]) -> bytes:
    """The piece that pushes the pickled shell of a packed tensor, as bytes."""
    shell = dump_pickle(fresh_tensor(0, dtype, sizes))
    return b"C" + bytes([len(shell)]) + shell if len(shell) < 256 else b"B" + struct.pack("<I", len(shell)) + shell
