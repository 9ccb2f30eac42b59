"""The writer of Lightning's ``.ckpt``: a torch.save file with weights under ``state_dict``, and what loading asks for.

What ``LightningModule.load_from_checkpoint`` and ``Trainer.test(ckpt_path=...)`` take (2.6). A run is gone on with only
from what Lightning saved itself, which has its optimizers and loops too: that is written again as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_tool.errors import Unsupported
from ckpt_tool.formats.base import LayOut, WriteRequest
from ckpt_tool.formats.torch_save.writer import WRITER as TORCH_SAVE
from ckpt_tool.manifest.model import Blob, KeyPath
from ckpt_tool.manifest.tables import SECTIONS

__all__ = ["WRITER", "LightningWriter"]

_STATE = "state_dict"
_VERSION = "pytorch-lightning_version"
_WRITTEN_FOR = "2.6.6"
_SHOWN = 3


class LightningWriter:
    """Lays out one file."""

    name = "lightning"
    per_rank = False

    def lay_out(self, request: WriteRequest) -> LayOut:
        """The file, which reads as any of torch.save; see `TorchSaveWriter`.

        Raises:
            Unsupported: the optimizer's state or objects of another program's, or what torch.save cannot hold.
            LayoutError: a tensor is not stored as one whole box.
        """
        tensors = request.tensors
        paths: list[KeyPath] = list(tensors.paths or ((fqn,) for fqn in tensors.fqns))
        is_own = any(path[:1] == (_STATE,) for path in paths) and any(
            blob.path == (_VERSION,) for blob in request.blobs
        )
        if not is_own:
            others = [*np.array(tensors.fqns, dtype=object)[tensors.section != SECTIONS.index("model")].tolist()]
            others += [blob.fqn for blob in request.blobs]
            if others:
                shown = ", ".join(map(str, others[:_SHOWN]))
                raise Unsupported(
                    f"Lightning keeps {len(others):,} of these in another form than any other program: {shown}",
                    hint="ckpt export SRC DST --to lightning, without --all, takes the weights alone",
                )
            held = tuple(
                (_STATE, *(path[1:] if path[0] == _STATE else (fqn,)))
                for fqn, path in zip(tensors.fqns, paths, strict=True)
            )
            request = replace(request, tensors=replace(tensors, paths=held), blobs=tuple(_asked_for(request.info)))
        found = TORCH_SAVE.lay_out(request)
        return replace(found, manifest=found.manifest.replace(format=self.name, blobs=request.blobs))


def _asked_for(info: Any) -> list[Blob]:
    """What Lightning looks for in each file."""
    step = info.get("step")
    values = {"epoch": 0, "global_step": step if type(step) is int else 0, _VERSION: _WRITTEN_FOR}
    return [Blob(key, "value", None, value, (key,), is_loaded=True) for key, value in values.items()]


WRITER = LightningWriter()
