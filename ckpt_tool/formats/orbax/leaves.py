"""A state as a tree of leaves, as Orbax describes it: arrays, numbers, text, and what is empty.

Numbers become arrays of no dimension, as Orbax stores them (``int64``, ``float64``, ``bool``); text and what is empty
are in the description alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ckpt_tool.errors import Unsupported
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats.base import WriteRequest
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["NewLeaf", "leaves_of", "tree_document"]

_SEQUENCE, _DICT = 1, 2
_EMPTY = ("None", "Dict", "List", "Tuple")
_SHOWN = 3
_DOCUMENTS = ("_METADATA", "_CHECKPOINT_METADATA", "_strings.json", "commit_success.txt")
"""Files that stand beside the arrays."""


@dataclass(frozen=True, slots=True)
class NewLeaf:
    """One leaf to be written."""

    path: KeyPath
    """Positions in lists are numbers, every key of a dict is text."""
    kind: str
    """``np.ndarray``, ``scalar``, ``string``, ``None``, ``Dict``, ``List``, ``Tuple``."""
    tensor: int | None = None
    """Row of the request's tensors, for such an array."""
    value: Any = None
    """The array of a number, or the text."""

    @property
    def name(self) -> str:
        """What its array is called in the store."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class _Row:
    """A tensor's place in the nested state."""

    number: int


def _is_folder(name: str) -> bool:
    """Whether an array can be kept under this name; as in Orbax, folders lie in folders where it has a slash.

    >>> [_is_folder(name) for name in ("mlp/~/linear.w", "a//b", "../a", "_METADATA")]
    [True, False, False, False]
    """
    parts = name.split("/")
    return all(part and not part.startswith(".") for part in parts) and parts[0] not in _DOCUMENTS


def leaves_of(request: WriteRequest) -> tuple[list[NewLeaf], tuple[str, ...]]:
    """Every leaf of the state, tensors and objects, in order of first appearance; and notes of what no leaf can hold.

    Raises:
        Unsupported: names that collide, or that no folder can have.
    """
    values: list[tuple[KeyPath, Any]] = [
        (meta.path or (meta.fqn,), _Row(row)) for row, meta in enumerate(request.tensors)
    ]
    first = {blob.fqn: blob for blob in reversed(request.blobs)}
    values += [(blob.path or (fqn,), blob.value) for fqn, blob in reversed(first.items())]
    found = list(_walk(nest(values, int_keyed=request.info.get("int_keyed_dicts", ())), ()))
    leaves = [leaf for leaf in found if leaf.kind]
    lost = [leaf.name for leaf in found if not leaf.kind]
    seen: set[str] = set()
    for leaf in leaves:
        if leaf.name in seen or not _is_folder(leaf.name):
            why = "two leaves have the name" if leaf.name in seen else "no folder can have the name"
            raise Unsupported(f"{why} {leaf.name!r}", hint="leave it out with --exclude")
        seen.add(leaf.name)
    inner = [name for name in seen if any(name[:at] in seen for at, letter in enumerate(name) if letter == "/")]
    if inner:
        raise Unsupported(f"its folder would lie in that of another array: {min(inner)!r}", hint="see --exclude")
    if not lost:
        return leaves, ()
    shown = ", ".join(lost[:_SHOWN]) + (" ..." if len(lost) > _SHOWN else "")
    note = f"{counted(len(lost), 'object', 'are')} left out, for Orbax holds arrays, numbers and text: {shown}"
    return leaves, (f"{note}; --to torch-save keeps them",)


def _walk(value: Any, path: KeyPath) -> Iterator[NewLeaf]:
    if isinstance(value, _Row):
        yield NewLeaf(path, "np.ndarray", value.number)
    elif isinstance(value, Mapping | list | tuple) and not value:
        yield NewLeaf(path, "List" if isinstance(value, list) else "Tuple" if isinstance(value, tuple) else "Dict")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            yield from _walk(inner, (*path, position))
    else:
        yield _single(value, path)


def _single(value: Any, path: KeyPath) -> NewLeaf:
    """A leaf without keys; of no kind where Orbax has none."""
    if value is None:
        return NewLeaf(path, "None")
    if type(value) is str:
        return NewLeaf(path, "string", value=value)
    if type(value) is bool or isinstance(value, np.bool_):
        return NewLeaf(path, "scalar", value=np.array(value, dtype=np.bool_))
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return NewLeaf(path, "scalar", value=np.array(value, dtype=np.int64))
    if type(value) is float:
        return NewLeaf(path, "scalar", value=np.array(value, dtype=np.float64))
    if isinstance(value, np.ndarray | np.number) and np.asarray(value).dtype.kind in "biufc":
        array = np.asarray(value)
        return NewLeaf(path, "np.ndarray", value=np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")))
    return NewLeaf(path, "", value=value)


def tree_document(leaves: list[NewLeaf], write_shapes: Mapping[str, list[int]]) -> dict[str, Any]:
    """What ``_METADATA`` says; ``write_shapes`` are chunks by name of array."""
    rows = {}
    for leaf in leaves:
        keys = [{"key": str(key), "key_type": _SEQUENCE if isinstance(key, int) else _DICT} for key in leaf.path]
        said: dict[str, Any] = {"value_type": leaf.kind, "skip_deserialize": leaf.kind in _EMPTY}
        if leaf.name in write_shapes:
            said["write_shape"] = write_shapes[leaf.name]
        rows[str(tuple(map(str, leaf.path)))] = {"key_metadata": keys, "value_metadata": said}
    return {
        "tree_metadata": rows,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
