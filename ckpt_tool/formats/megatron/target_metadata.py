"""The ``.metadata`` of a distributed checkpoint that is being written: torch's ``Metadata``, as mcore fills it.

Keys are final names, so that there is no planner data; mcore up to 0.15 adds facts about flattened tensors. Source:
mcore 0.12 and 0.19, ``dist_checkpointing/strategies/torch.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_tool.formats._dcp.metadata_pickle import (
    MetadataPickle,
    WrittenChunks,
    WrittenItem,
    WrittenTensor,
    add_state_dict_metadata,
    add_storage_data,
    integer_piece,
    text_piece,
)

__all__ = ["metadata_pickle"]

_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_VERSION = "1.0.0"
"""``CURRENT_DCP_VERSION`` of torch 2.13."""
_NEW, _BUILD, _STOP, _MARK, _SETITEMS, _NONE, _EMPTY_DICT, _TUPLE = (
    b")\x81", b"b", b".", b"(", b"u", b"N", b"}", b"t",
)  # fmt: skip


def metadata_pickle(
    tensors: Sequence[WrittenTensor],
    chunks: WrittenChunks,
    objects: Sequence[tuple[str, WrittenItem]],
    flattened: Mapping[str, Sequence[int]] | None = None,
) -> bytes:
    """The bytes of ``.metadata``.

    Args:
        tensors: under their stored names.
        chunks: their boxes.
        objects: objects with their items.
        flattened: by name, the shapes of tensors that are stored as flattened ranges; None for a version of mcore that
            does not know of them.
    """
    pickle = MetadataPickle()
    # The root's class comes first, so that the first bytes of the file tell what it is.
    pickle.add(pickle.name(_METADATA, "Metadata", keep=True), _NEW, _EMPTY_DICT, _MARK)
    pickle.add(pickle.text("state_dict_metadata"))
    add_state_dict_metadata(pickle, tensors, chunks, [key for key, _ in objects])
    pickle.add(pickle.text("planner_data"), _NONE)
    pickle.add(pickle.text("storage_data"))
    add_storage_data(pickle, tensors, chunks, [(key, (key,), item) for key, item in objects], _STORAGE_INFO)
    pickle.add(pickle.text("storage_meta"), _NONE)
    if flattened is not None:
        shape_name = pickle.text("nd_reformulated_orig_global_shape")
        pickle.add(pickle.text("mcore_data"), _EMPTY_DICT, _MARK)
        for key, shape in flattened.items():
            sizes = b"".join(integer_piece(size) for size in shape)
            pickle.add(pickle.text(key), _EMPTY_DICT, _MARK, shape_name, _MARK, sizes, _TUPLE, _SETITEMS)
        pickle.add(_SETITEMS)
    pickle.add(pickle.text("version"), text_piece(_VERSION), _SETITEMS, _BUILD, _STOP)
    return pickle.finished()
