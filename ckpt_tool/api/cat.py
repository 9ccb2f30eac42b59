"""Cat: one tensor, or a box of it, as an array; only the bytes of that box are read."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.api.checkpoint import DEFAULT_MEMORY_BYTES, Checkpoint, TensorView, open_checkpoint
from ckpt_tool.api.ranks_apart import with_ranks_apart
from ckpt_tool.errors import IntegrityError, TargetExists
from ckpt_tool.manifest.concatenate import fqn_without_rank, names_of_ranks
from ckpt_tool.manifest.select import parse_slice
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, shell_word, some_of
from ckpt_tool.storage.side_file import unwritable
from ckpt_tool.storage.target import open_target
from ckpt_tool.storage.urls import is_local, local_path

__all__ = ["Excerpt", "cat", "save_npy"]

# What numpy.load gives back without ml_dtypes: its own kinds. The others are stored as the unsigned integers of their
# width, as `.npy` would call them void and lose which type they were.
_NUMPY_KINDS = "biufc"


@dataclass(frozen=True)
class Excerpt:
    """Elements of a tensor, and what tensor they are of."""

    fqn: str
    dtype: str
    """torch's name; the array has ml_dtypes' type for bfloat16 and float8, raw bytes for packed types."""
    shape: tuple[int, ...]
    """Global shape of the tensor."""
    array: npt.NDArray[Any]

    def described(self) -> dict[str, Any]:
        """`to_json` without the values."""
        shape = list(self.array.shape)
        return {"schema": "ckpt-tool/cat/1", "fqn": self.fqn, "dtype": self.dtype, "shape": shape}

    def to_json(self) -> dict[str, Any]:
        """Schema ``ckpt-tool/cat/1``: ``schema fqn dtype shape values``; values nest like the array, raw bytes are hex.

        NaN and infinities, which JSON cannot say, are the texts ``nan``, ``inf`` and ``-inf``.
        """
        return {**self.described(), "values": _listed(self.array)}


def cat(
    source: Checkpoint | str | os.PathLike[str], what: str, *, memory_budget_bytes: int = DEFAULT_MEMORY_BYTES
) -> Excerpt:
    """The elements that ``what`` names.

    Args:
        source: an open checkpoint (it stays open), or where one is.
        what: a name, or a name with a slice as numpy writes it: ``layers.0.weight[0:4, :]``.
        memory_budget_bytes: bound for buffers; the array itself comes on top.

    Raises:
        NotFound: no such tensor; the hint names the nearest ones.
        IntegrityError: ranks saved different values of it, and nothing says how these join; each has a name of its own.
        UsageError: the slice does not fit the tensor.
    """
    if not isinstance(source, Checkpoint):
        with open_checkpoint(source, memory_budget_bytes=memory_budget_bytes) as opened:
            return cat(opened, what, memory_budget_bytes=memory_budget_bytes)
    part = source.part_of([what])
    if part is source and what.endswith("]"):
        part = source.part_of([parse_slice(what)[0]])
    fqn, index = (what, ()) if _is_name(what, part) else parse_slice(what)
    part = with_ranks_apart(part, {fqn, fqn_without_rank(fqn)})
    of_ranks = names_of_ranks(part.manifest.tensors.fqns).get(fqn, {})
    if of_ranks and fqn not in part.manifest.tensors.index:
        said = f"{fqn!r} is another one on each of {counted(len(of_ranks), 'rank')}, and nothing says how they join"
        names = some_of([shell_word(name) for name in of_ranks.values()])
        raise IntegrityError(said, where=part.url, hint=f"name one of them: {names}")
    view = TensorView(part, fqn)
    return Excerpt(fqn, view.dtype.name, view.shape, view[index])


def _is_name(what: str, checkpoint: Checkpoint) -> bool:
    """Whether it is all name, of a tensor or of what one rank has of it, and no slice."""
    index = checkpoint.manifest.tensors.index
    return what in index or fqn_without_rank(what) in index


def save_npy(excerpt: Excerpt, path: str, *, overwrite: bool = False) -> str | None:
    """Write ``path`` as a ``.npy`` file; a sentence on how to read it where ``numpy.load`` alone does not suffice.

    Raises:
        TargetExists: the file is there already.
        StorageError: it cannot be written.
    """
    if is_local(path) and os.path.isfile(local_path(path)) and not overwrite:
        raise TargetExists("exists already", where=path, hint="add --overwrite to replace it")
    array, note = excerpt.array, None
    if array.dtype.kind not in _NUMPY_KINDS or array.dtype.type.__module__ != "numpy":
        raw = array.view(f"u{array.dtype.itemsize}" if array.dtype.itemsize in {1, 2, 4, 8} else "u1")
        note = f"numpy has no {excerpt.dtype}, so {path} holds its bytes as {raw.dtype.name}"
        if array.dtype.type is not np.void:
            note += f"; read it with numpy.load({path!r}).view(ml_dtypes.{array.dtype.name})"
        array = raw
    if not is_local(path):
        _put_npy(path, array, overwrite=overwrite)
        return note
    try:
        with Path(local_path(path)).open("wb") as file:
            np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
    except OSError as error:
        raise unwritable(error, path) from error
    return note


def _put_npy(url: str, array: npt.NDArray[Any], *, overwrite: bool) -> None:
    content = io.BytesIO()
    np.lib.format.write_array(content, np.ascontiguousarray(array), allow_pickle=False)
    name, data = url.rpartition("/")[2], content.getbuffer()
    target = open_target(url, overwrite=overwrite, resume=False, durable=True, single_file=True)
    try:
        target.create(name, data.nbytes, is_last=True)
        target.write(name, 0, data)
        target.commit(name)
    except BaseException:
        target.abandon(discard=True)
        raise


def _listed(array: npt.NDArray[Any]) -> Any:
    if array.ndim:
        return [_listed(part) for part in array]
    value = array[()]
    if array.dtype.kind == "V" and array.dtype.type is np.void:
        return bytes(value).hex()
    if array.dtype.kind == "c":
        return [_number(value.real), _number(value.imag)]
    return _number(value)


def _number(value: Any) -> Any:
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.integer):
        return int(value)
    found = float(value)
    return found if np.isfinite(found) else str(found)
