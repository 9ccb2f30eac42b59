"""What is taken of a source, as a kind of target has it: names, shapes and objects of that, before it is placed."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tool.api.convert.conversion import Dropped
from ckpt_tool.dtypes import DType
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.records import dataclass, field

__all__ = ["Taken"]


@dataclass(frozen=True)
class Taken:
    """A manifest with its objects, and what was done for it."""

    manifest: Manifest
    blobs: tuple[Blob, ...]
    dropped: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    """Tensors that get another dtype in the target."""
