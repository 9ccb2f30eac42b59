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
    add_planner_data,
    add_state_dict_metadata,
    add_storage_data,
)
from ckpt_tool.manifest.model import KeyPath

__all__ = ["metadata_pickle"]

_METADATA = "torch.distributed.checkpoint.metadata"
_PROPERTIES = ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING")
_STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_NEW, _BUILD, _STOP, _MARK, _SETITEMS, _EMPTY_DICT = b")\x81", b"b", b".", b"(", b"u", b"}"


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
    pickle.add(pickle.name(_METADATA, "Metadata", keep=True), _NEW, _EMPTY_DICT, _MARK)
    pickle.add(pickle.text("state_dict_metadata"))
    add_state_dict_metadata(pickle, tensors, chunks, [fqn for fqn, _, _ in blobs])
    pickle.add(pickle.text("planner_data"))
    paths = [(tensor.fqn, tensor.path) for tensor in tensors] + [(fqn, path) for fqn, path, _ in blobs]
    add_planner_data(pickle, paths)
    pickle.add(pickle.text("storage_data"))
    add_storage_data(pickle, tensors, chunks, blobs, _STORAGE_INFO)
    pickle.add(_SETITEMS, _BUILD, _STOP)
    return pickle
