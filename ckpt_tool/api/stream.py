"""A stream is one rank's tensors of a layout, one after another, in bounded memory: what an inference engine loads."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ckpt_tool.api.arguments import check_arguments, check_files
from ckpt_tool.api.checkpoint import Checkpoint, open_checkpoint
from ckpt_tool.api.convert.mesh import asked_mesh
from ckpt_tool.api.convert.selection import select_tensors
from ckpt_tool.api.convert.stored_boxes import placed_by_rules
from ckpt_tool.api.unchanged import unchanged
from ckpt_tool.errors import UsageError
from ckpt_tool.geometry.box import Box
from ckpt_tool.layout.place import Placed
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.select import is_name, texts

__all__ = ["DEFAULT_STREAM_MEMORY_BYTES", "stream"]

DEFAULT_STREAM_MEMORY_BYTES = 256 << 20


def stream(  # noqa: PLR0913 - the options of a command
    url: str | os.PathLike[str],
    *,
    mesh: str | None = None,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    rank: int = 0,
    rules: str | os.PathLike[str] | None = None,
    default: Literal["shard0", "replicate"] | None = None,
    dp_mode: Literal["shard", "replicate"] = "replicate",
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    sections: str | Sequence[str] | None = ("model",),
    as_torch: bool = False,
    memory_budget_bytes: int = DEFAULT_STREAM_MEMORY_BYTES,
) -> Generator[tuple[str, Any], None, None]:
    """``(fqn, local tensor)`` for every tensor of which ``rank`` holds something, in the checkpoint's order.

    While one batch of tensors is used, the next is read; a batch is a quarter of the budget, or one tensor where that
    is larger. Each tensor is a new array, its taker's to keep. Nothing is opened before the first is asked for.

    Args:
        url: checkpoint of any readable format.
        mesh: axes and sizes in rank order, slowest first (``pp=2,tp=4``); instead of the four sizes.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        dp: data-parallel ranks.
        ep: expert-parallel ranks, a divisor of ``dp``.
        rank: whose tensors.
        rules: rules file that adds to or overrides the built-in families.
        default: what to do with tensors that no rule covers, None to stop with their list.
        dp_mode: whether data-parallel ranks ``replicate``, or ``shard`` (FSDP).
        include: globs or ``re:`` patterns of tensors to take.
        exclude: globs or ``re:`` patterns of tensors to leave.
        sections: ``model``, ``optimizer``, ``other``; None for all.
        as_torch: give torch tensors; else numpy arrays, with ml_dtypes' types for bfloat16 and float8.
        memory_budget_bytes: bound for the batch in use, the one being read and the buffers.

    Raises:
        LayoutError: names that no rule covers, a mesh that does not fit them, or no such rank.
        UsageError: a mesh that is none.
        StorageError: a file has changed while it was read; after the last tensor.
        CkptError: see ``errors``.
    """
    check_arguments(
        default=(default, (None, "shard0", "replicate")), dp_mode=(dp_mode, ("shard", "replicate")),
        tp=(tp, 1), pp=(pp, 1), dp=(dp, 1), ep=(ep, 1), rank=(rank, 0), memory_budget_bytes=(memory_budget_bytes, 1),
    )  # fmt: skip
    check_files(rules=rules)
    include, exclude = texts(include), texts(exclude)
    if mesh is not None and (tp, pp, dp, ep) != (1, 1, 1, 1):
        raise UsageError("mesh already names the sizes of all axes", hint="leave out tp, pp, dp and ep")
    target = asked_mesh(mesh, tp=tp, pp=pp, dp=dp, ep=ep)
    target.coord(rank)
    with open_checkpoint(url, memory_budget_bytes=memory_budget_bytes // 4) as opened:
        checkpoint = opened
        if include and not exclude and all(map(is_name, include)):
            checkpoint = opened.part_of(include)
        manifest = select_tensors(
            checkpoint, include=include, exclude=exclude, sections=sections, unequal=None
        ).manifest
        placed = placed_by_rules(manifest, manifest.tensors, target, rules=rules, default=default, dp_mode=dp_mode)[0]
        boxes = _boxes_of_rank(manifest, placed, rank)
        checkpoint.resolve([fqn for fqn, _ in boxes])
        batches = _batches(manifest, boxes, memory_budget_bytes // 4)
        with unchanged(checkpoint), ThreadPoolExecutor(1, thread_name_prefix="ckpt-read-ahead") as ahead:
            pending = [ahead.submit(_read, checkpoint, batch) for batch in batches[:1]]
            for number in range(len(batches)):
                tensors = pending.pop().result()
                if number + 1 < len(batches):
                    pending.append(ahead.submit(_read, checkpoint, batches[number + 1]))
                tensors.reverse()
                while tensors:  # each is let go of here before the next is asked for
                    fqn, array = tensors.pop()
                    yield fqn, (_as_torch(checkpoint, fqn, array) if as_torch else array)
                    del array


def _boxes_of_rank(manifest: Manifest, placed: Placed, rank: int) -> list[tuple[str, list[Box]]]:
    """Boxes of each tensor that the rank holds, in the order in which they make up its local tensor."""
    tensors = manifest.tensors
    found: dict[int, list[Box]] = {}
    for row in np.flatnonzero(placed.rank == rank).tolist():
        tensor = int(placed.tensor[row])
        ndim = int(tensors.ndim[tensor])
        box = Box(tuple(placed.offsets[row, :ndim].tolist()), tuple(placed.sizes[row, :ndim].tolist()))
        found.setdefault(tensor, []).append(box)
    return [(tensors.fqns[tensor], boxes) for tensor, boxes in found.items()]


def _batches(
    manifest: Manifest, boxes: Sequence[tuple[str, list[Box]]], batch_nbytes: int
) -> list[list[tuple[str, list[Box]]]]:
    """Consecutive tensors, as many as fit ``batch_nbytes``, or one."""
    batches: list[list[tuple[str, list[Box]]]] = []
    room = 0
    for fqn, held in boxes:
        nbytes = manifest.tensor(fqn).dtype.nbytes(sum(box.volume for box in held))
        if nbytes > room or not batches:
            batches.append([])
            room = batch_nbytes
        batches[-1].append((fqn, held))
        room -= nbytes
    return batches


def _read(checkpoint: Checkpoint, batch: Sequence[tuple[str, list[Box]]]) -> list[tuple[str, npt.NDArray[Any]]]:
    arrays = iter(checkpoint.read([(fqn, box) for fqn, held in batch for box in held]))
    return [(fqn, _joined([next(arrays) for _ in held], held)) for fqn, held in batch]


def _joined(arrays: list[npt.NDArray[Any]], boxes: Sequence[Box]) -> npt.NDArray[Any]:
    """The local tensor: parts of a fused tensor lie one behind the other, along the dimension in which they differ."""
    if len(arrays) == 1:
        return arrays[0]
    differs = [d for d in range(boxes[0].ndim) if len({(box.offsets[d], box.sizes[d]) for box in boxes}) > 1]
    return np.concatenate(arrays, axis=differs[0])


def _as_torch(checkpoint: Checkpoint, fqn: str, array: npt.NDArray[Any]) -> Any:
    from ckpt_tool.frameworks.tensors import torch_tensor

    return torch_tensor(array, checkpoint.manifest.tensor(fqn).dtype, array.shape)
