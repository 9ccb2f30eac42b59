"""The ``.metadata`` of a checkpoint that is being written: torch's ``Metadata`` with all its parts."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tool.formats._dcp.metadata_pickle import (
    MetadataPickle,
    WrittenChunks,
    WrittenItem,
    WrittenTensor,
    begin_metadata,
    text_piece,
)
from ckpt_tool.manifest.model import KeyPath

__all__ = ["VERSION", "metadata_pickle"]

_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
VERSION = "1.0.0"
"""``CURRENT_DCPVERSION`` of torch 2.13."""
_NEW, _BUILD, _STOP, _MARK, _SETITEMS, _NONE, _EMPTY_DICT, _EMPTY_LIST = (
    b")\x81", b"b", b".", b"(", b"u", b"N", b"}", b"]",
)  # fmt: skip


def metadata_pickle(
    tensors: Sequence[WrittenTensor],
    chunks: WrittenChunks,
    blobs: Sequence[tuple[str, KeyPath, WrittenItem]],
    *,
    save_id: str,
) -> MetadataPickle:
    """The content of ``.metadata``.

    Args:
        tensors: in the order in which the state dict is to be rebuilt.
        chunks: of all tensors, in their order.
        blobs: fqn, nested keys and item of each object that is not a tensor.
        save_id: identifies the save; torch only logs it.
    """
    pickle = MetadataPickle()
    begin_metadata(pickle, _METADATA, tensors, chunks, blobs, _STORAGE_INFO)
    pickle.add(pickle.text("storage_meta"))
    pickle.add(pickle.name(_METADATA, "StorageMeta"), _NEW, _EMPTY_DICT, _MARK)
    for name, value in (("checkpoint_id", _NONE), ("save_id", text_piece(save_id)), ("load_id", _NONE)):
        pickle.add(pickle.text(name), value)
    pickle.add(pickle.text("modules"), _EMPTY_LIST, _SETITEMS, _BUILD)
    pickle.add(pickle.text("version"), text_piece(VERSION), _SETITEMS, _BUILD, _STOP)
    return pickle
