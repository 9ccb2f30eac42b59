"""Saving writes the state of a training job as one checkpoint, beside the training, and commits it on all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpt_tool.api.job.extra_state import OnResize
from ckpt_tool.api.job.save_handle import SaveHandle
from ckpt_tool.api.job.saver import saver_of

__all__ = ["save"]


def save(  # noqa: PLR0913 - the options of a command
    state: Any,
    url: str | os.PathLike[str],
    *,
    async_: bool = True,
    format: str = "dcp",
    process_group: Any = None,
    extra_state: Mapping[str, Any] | None = None,
    on_resize: OnResize = "keep",
    step: int | None = None,
    overwrite: bool = True,
    durable: bool = True,
    digests: bool | None = None,
    overlap_staging: bool = False,
    timeout_s: float = 600.0,
) -> SaveHandle:
    """Save ``state``; every rank of the process group calls this with its own state.

    Tensors may be plain (the same on every rank that has one of that name), DTensors of any placements, ShardedTensors,
    parameters made of these, or what megatron-core wraps. What several ranks hold is written once, by the one that has
    least to write; in ``dcp`` and ``bytecheckpoint`` boxes too large to be shared out evenly are cut for that. Nothing
    is gathered. Other values are written by the lowest rank that has one of that name. Modules stand for their state
    dicts, as do other objects that have one.

    The state is copied into shared memory, from which a process beside each rank writes it. When the call returns the
    state may be changed, unless ``overlap_staging`` is set. At most two saves are under way: a third one waits. Saves
    are completed in the order of their calls. The files of ``url`` appear in one step once all ranks' bytes are
    durable; what was there before stays until then.

    The first save of a job finds the other ranks by three small collectives; later ones use no collective at all.

    Args:
        state: nested dicts and lists, as ``{"model": model.state_dict(), "optim": ...}``.
        url: a folder to be made, as a path that all ranks see, or a URL (S3, HDFS, what fsspec knows).
        async_: return when the state is copied; otherwise when the checkpoint is complete.
        format: a format whose files ranks can write together: ``dcp``, which ``torch.distributed.checkpoint`` reads;
            ``safetensors``, a file for each rank; ``bytecheckpoint``; or ``megatron``, for what ``sharded_state_dict``
            of megatron-core gives.
        process_group: the ranks that take part, None for all.
        extra_state: objects of this rank alone (random states, positions in data), to be read by `load_extra_state`.
        on_resize: what becomes of them when another number of ranks loads: each rank gets that of its number
            (``keep``), none gets any (``drop``), all get that of rank 0 (``rank0``).
        step: what the log of operations calls this save.
        overwrite: replace a checkpoint that is there already once the new one is complete, in one step but on S3,
            where the old one goes when all new bytes have arrived.
        durable: wait until bytes are on the device. False for measurements only.
        digests: sum up each tensor's content on the way, and leave the sums in ``<url>.digests.json``, by which
            ``ckpt verify --manifest`` proves this checkpoint, and any conversion of it. None for doing so where it
            costs little: where boxes have their bytes in runs of 1 KiB and more in their tensors.
        overlap_staging: return before the state is copied; call ``handle.wait_staged()`` before it is changed.
        timeout_s: longest time that the save may take, and that a rank waits for others.

    Raises:
        CkptError: this rank's state cannot be saved; the other ranks raise the same when they wait for their handles.
    """
    saver = saver_of(process_group)
    return saver.save(
        state, url, async_=async_, format=format, extra_state=extra_state, on_resize=on_resize, step=step,
        overwrite=overwrite, durable=durable, digests=digests, overlap_staging=overlap_staging, timeout_s=timeout_s,
    )  # fmt: skip
