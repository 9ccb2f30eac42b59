"""Elements as plain numbers of their width, and the few changes that stored bits can need."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType
from ckpt_tool.engine.base import CastEffect
from ckpt_tool.manifest.tables import ChunkFlag

__all__ = ["apply_flags", "bit_dtype", "count_changes"]

_BY_WIDTH = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # numpy has no 128-bit integer; complex moves bits as well


def bit_dtype(dtype: DType) -> np.dtype[Any]:
    """A numpy type of the same width that copies elements bit for bit; bytes for widths that numpy lacks."""
    itemsize = dtype.bits // 8 if dtype.bits % 8 == 0 else 1
    return np.dtype(_BY_WIDTH.get(itemsize, f"V{itemsize}"))


def apply_flags(elements: npt.NDArray[Any], dtype: DType, flags: int) -> None:
    """Turn stored bits into the tensor's, in place; ``elements`` is a contiguous array of ``bit_dtype``.

    Byte order first, then the lazy views of torch: ``neg`` flips signs (two's complement for integers), ``conj`` those
    of imaginary parts.
    """
    if flags & ChunkFlag.BIG_ENDIAN and dtype.component_bytes > 1:
        elements.view(f"u{dtype.component_bytes}").byteswap(inplace=True)
    if not flags & (ChunkFlag.NEGATE | ChunkFlag.CONJUGATE):
        return
    parts = elements.view(f"u{dtype.component_bytes}").reshape(-1)
    sign = np.array(1 << (8 * dtype.component_bytes - 1), dtype=parts.dtype)
    if flags & ChunkFlag.NEGATE:
        if dtype.kind in {"float", "complex"}:
            parts ^= sign
        else:
            np.negative(parts, out=parts)
    if flags & ChunkFlag.CONJUGATE and dtype.kind == "complex":
        parts[1::2] ^= sign


def count_changes(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> CastEffect:
    """How many values a cast changed, the largest errors among finite values, and how many left these.

    NaN stays NaN, and zero stays zero, so that every error has a value to be in proportion to.
    """
    wide = np.complex128 if before.dtype.kind == "c" else np.float64
    exact, cast = before.astype(wide), after.astype(wide)
    changed = (exact != cast) & ~(np.isnan(exact) & np.isnan(cast))
    n_changed = int(np.count_nonzero(changed))
    if not n_changed:
        return CastEffect()
    exact, cast = exact[changed], cast[changed]
    is_finite = np.isfinite(exact) & np.isfinite(cast)
    n_overflowed = int(np.count_nonzero(np.isfinite(exact) & ~np.isfinite(cast)))
    exact, cast = exact[is_finite], cast[is_finite]
    errors = np.abs(exact - cast)
    return CastEffect(
        n_changed, float(errors.max(initial=0.0)), n_overflowed, float((errors / np.abs(exact)).max(initial=0.0))
    )
