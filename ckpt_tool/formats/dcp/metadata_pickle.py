"""The ``.metadata`` of a checkpoint that is being written, as the pickle that torch's own classes would give.

A checkpoint has three records per chunk, so the pickle is put together from ready-made pieces, a few microseconds a
chunk; ``_pickle.dump`` walks objects and takes twenty times as long. Class layout: torch/distributed/checkpoint
metadata.py and filesystem.py, the same in torch 2.4 and 2.13 (``version``, which 2.4 does not know, becomes a plain
attribute there). Protocol 4 without frames, which are optional (PEP 3154).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tool.dtypes import DType
from ckpt_tool.manifest.model import KeyPath

__all__ = ["WrittenChunk", "WrittenItem", "WrittenTensor", "metadata_pickle"]

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"
"""``CURRENT_DCP_VERSION`` of torch 2.13."""

_MEMOIZE, _POP, _NEW, _BUILD, _STOP, _MARK, _SETITEMS, _REDUCE, _NONE = (
    b"\x94", b"0", b")\x81", b"b", b".", b"(", b"u", b"R", b"N",
)  # fmt: skip
_EMPTY_DICT, _EMPTY_LIST, _APPENDS, _TUPLE1, _TUPLE, _FALSE = b"}", b"]", b"e", b"\x85", b"t", b"\x89"


@dataclass(frozen=True, slots=True)
class WrittenItem:
    """Where one item lies."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """One box, in global coordinates, and its item."""

    offsets: Sequence[int]
    sizes: Sequence[int]
    item: WrittenItem


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """One tensor with its chunks."""

    fqn: str
    dtype: DType
    shape: Sequence[int]
    path: KeyPath
    chunks: Sequence[WrittenChunk]


class _Pieces:
    """Pieces of one pickle, and the numbers under which parts of it are remembered."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._known: dict[object, bytes] = {}
        self._n_known = 0

    def remember(self, key: object) -> None:
        """Remember the value on top of the stack as ``key``."""
        self.parts.append(_MEMOIZE)
        number = self._n_known
        self._known[key] = b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)
        self._n_known += 1

    def known(self, key: object) -> bytes | None:
        """The piece that pushes what was remembered as ``key``."""
        return self._known.get(key)

    def text(self, value: str) -> bytes:
        """The piece that pushes a string; it is remembered when it is first needed."""
        found = self._known.get(value)
        if found is None:
            self.parts.append(_text(value))
            self.remember(value)
            self.parts.append(_POP)
            found = self._known[value]
        return found

    def name(self, module: str, name: str) -> bytes:
        """The piece that pushes a class or function."""
        key = (module, name)
        found = self._known.get(key)
        if found is None:
            self.parts += [self.text(module), self.text(name), b"\x93"]
            self.remember(key)
            self.parts.append(_POP)
            found = self._known[key]
        return found


def metadata_pickle(
    tensors: Sequence[WrittenTensor],
    blobs: Sequence[tuple[str, KeyPath, WrittenItem]],
    *,
    save_id: str,
    is_flattened: bool,
) -> bytes:
    """The bytes of ``.metadata``.

    Args:
        tensors: in the order in which the state dict is to be rebuilt.
        blobs: fqn, nested keys and item of each object that is not a tensor.
        save_id: identifies the save; torch only logs it.
        is_flattened: False leaves ``planner_data`` out, as ``flatten_state_dict=False`` does.
    """
    pieces = _Pieces()
    pieces.parts += [b"\x80\x04"]
    root = pieces.parts
    # The root's class comes first, so that the first bytes of the file tell what it is.
    root += [_text(_METADATA)]
    pieces.remember(_METADATA)
    root += [_text("Metadata")]
    pieces.remember("Metadata")
    root += [b"\x93", _NEW]
    _list_tensors(pieces, tensors, [fqn for fqn, _, _ in blobs])
    _planner_data(pieces, [(t.fqn, t.path) for t in tensors] + [(fqn, path) for fqn, path, _ in blobs], is_flattened)
    _storage_data(pieces, tensors, blobs)
    meta = [(name, _NONE) for name in ("checkpoint_id", "load_id")]
    fields = [(pieces.text(name), value) for name, value in meta]
    fields += [(pieces.text("save_id"), pieces.text(save_id)), (pieces.text("modules"), _EMPTY_LIST)]
    cls = pieces.name(_METADATA, "StorageMeta")
    version = pieces.text(_VERSION)
    keys = [pieces.text(name) for name in ("storage_meta", "version")]
    root += [_EMPTY_DICT, _MARK, keys[0], cls, _NEW, _EMPTY_DICT, _MARK]
    root += [piece for field in fields for piece in field]
    root += [_SETITEMS, _BUILD, keys[1], version, _SETITEMS, _BUILD, _STOP]
    return b"".join(root)
