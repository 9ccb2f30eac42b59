"""The ``.metadata`` of one of veScale's folders: that of torch 2.2, for which it was released.

Beside torch 2.4's it has ``TensorProperties`` of another module, and knows no id of a save.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tool.formats._dcp.metadata_pickle import (
    MetadataPickle,
    WrittenChunks,
    WrittenItem,
    WrittenTensor,
    begin_metadata,
)
from ckpt_tool.manifest.model import KeyPath

__all__ = ["metadata_pickle"]

_METADATA = "torch.distributed.checkpoint.metadata"
_PROPERTIES = ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING")
_STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_BUILD, _STOP, _SETITEMS = b"b", b".", b"u"


def metadata_pickle(
    tensors: Sequence[WrittenTensor],
    chunks: WrittenChunks,
    blobs: Sequence[tuple[str, KeyPath, WrittenItem]],
    *,
    save_id: str,
) -> MetadataPickle:
    """The content of ``.metadata``; arguments as in that of DCP, of which ``save_id`` has no place here."""
    del save_id
    pickle = MetadataPickle(_PROPERTIES)
    begin_metadata(pickle, _METADATA, tensors, chunks, blobs, _STORAGE_INFO)
    pickle.add(_SETITEMS, _BUILD, _STOP)
    return pickle
