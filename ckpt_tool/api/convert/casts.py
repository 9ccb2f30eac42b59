"""Casts that a caller asks for: which types there are, which tensors they take, and what they are not."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.dtypes import dtype as dtype_named
from ckpt_tool.errors import Unsupported, UsageError
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import SECTIONS, TensorTable
from ckpt_tool.sizes import counted

__all__ = ["cast_model", "cast_notes", "wanted_dtype"]

_SCALE = re.compile(r"scale|absmax|SCB", re.IGNORECASE)
"""In the names of what quantised weights are multiplied by."""


def wanted_dtype(name: str | None) -> DType | None:
    """The floating type that a caller asks for by ``name``.

    Raises:
        UsageError: no such type, or one that values are not just rounded to.
    """
    if name is None:
        return None
    hint = "one of: " + " ".join(kind.name for kind in DTYPES.values() if kind.is_castable)
    try:
        found = dtype_named(str(name))
    except Unsupported as error:
        raise UsageError(error.message, hint=hint) from None
    if not found.is_castable:
        raise UsageError(f"floating weights are cast to floating types, {found.name} is none", hint=hint)
    return found


def cast_model(tensors: TensorTable, dtype: DType | None, *, buffers: Collection[str] = ()) -> TensorTable:
    """``tensors`` with the floating ones of the model section in another dtype.

    Optimizer state keeps its own, and so do ``buffers``, by name in the module: a training program casts parameters.
    """
    if dtype is None:
        return tensors
    model, kept = SECTIONS.index("model"), frozenset(buffers)
    dtypes = tuple(
        dtype if kind.is_castable and section == model and not {fqn, fqn.partition(".")[2]} & kept else kind
        for fqn, kind, section in zip(tensors.fqns, tensors.dtypes, tensors.section.tolist(), strict=True)
    )
    return replace(tensors, dtypes=dtypes)


def cast_notes(manifest: Manifest, dtype: DType | None) -> list[str]:
    """What a cast does not do: packed weights stay as they are, and of quantised ones nothing is multiplied out."""
    if dtype is None:
        return []
    tensors, notes = manifest.tensors, []
    packed = [kind.name for kind in tensors.dtypes if kind.kind == "float" and not kind.is_castable]
    if packed:
        notes.append(f"{counted(len(packed), 'tensor', 'are')} {', '.join(sorted(set(packed)))}, packed, and stay so")
    config = manifest.info.get("config")
    method = config.get("quantization_config") if isinstance(config, dict) else None
    narrow = [kind.name for kind in tensors.dtypes if kind.is_castable and kind.bits < 16]
    if method is not None or (narrow and any(_SCALE.search(fqn) for fqn in tensors.fqns)):
        notes.append(
            "the weights are quantised: a cast rounds values and scales each by itself, it multiplies nothing out; "
            "without --dtype they stay what they are"
        )
    return notes
