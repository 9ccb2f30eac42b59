"""Weights by the optimizer's fp32 masters, as DeepSpeed's ``zero_to_fp32`` gives them."""

from __future__ import annotations

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.convert.conversion import Dropped
from ckpt_tool.errors import NotFound
from ckpt_tool.manifest.masters import with_masters
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.sizes import counted

__all__ = ["of_masters"]


def of_masters(checkpoint: Checkpoint, manifest: Manifest) -> tuple[Manifest, list[Dropped], list[str]]:
    """The model's tensors with the bytes of masters, what is left out then, and notes.

    Raises:
        NotFound: there are no masters.
    """
    found, n_without = with_masters(manifest, checkpoint.load_blobs())
    n_weights = len(found.tensors)
    if n_without == n_weights:
        raise NotFound(
            "the optimizer has no fp32 masters of the weights",
            where=checkpoint.url,
            hint="leave out --masters: the weights are all there is",
        )
    kept = set(found.tensors.fqns)
    dropped = [Dropped(fqn, "optimizer state") for fqn in manifest.tensors.fqns if fqn not in kept]
    note = (
        f"{counted(n_weights - n_without, 'weight', 'are')} the optimizer's fp32 masters; "
        f"{counted(n_without, 'tensor', 'have')} none"
    )
    return found, dropped, [note]
