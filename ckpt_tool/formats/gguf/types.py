"""Element types of GGUF: plain numbers, and blocks of quantised ones.

A block is a fixed number of elements in a fixed number of bytes that only its own kernel reads; here it is one opaque
element, so that blocks are listed, compared and copied whole. Source: ggml ``ggml.h`` and ``ggml-common.h`` (types and
block sizes), in the table of ``gguf`` 0.19 ``constants.py``.
"""

from __future__ import annotations

from functools import cache

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.records import dataclass

__all__ = ["GgmlType", "ggml_number", "ggml_type"]


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One type."""

    name: str
    dtype: DType
    """Of one block; of one element where a block is one."""
    block: int
    """Elements in a block."""


_PLAIN = {
    0: ("F32", "float32"), 1: ("F16", "float16"), 24: ("I8", "int8"), 25: ("I16", "int16"), 26: ("I32", "int32"),
    27: ("I64", "int64"), 28: ("F64", "float64"), 30: ("BF16", "bfloat16"),
}  # fmt: skip
# Name, elements and bytes of a block. Q8_1 (9) is of computations only and stands in no file.
_BLOCKS = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip


@cache
def ggml_type(number: int) -> GgmlType | None:
    """The type of this number, None for one that is not known."""
    if number in _PLAIN:
        name, dtype = _PLAIN[number]
        return GgmlType(name, DTYPES[dtype], 1)
    if number in _BLOCKS:
        name, block, nbytes = _BLOCKS[number]
        return GgmlType(name, DType(name, 8 * nbytes, "opaque"), block)
    return None


def ggml_number(dtype: DType) -> tuple[int, int] | None:
    """Number of the type, and elements in one of its blocks, for elements of this dtype; None where there is none.

    >>> ggml_number(DTYPES["bfloat16"]), ggml_number(DTYPES["bool"])
    ((30, 1), None)
    """
    for number in (*_PLAIN, *_BLOCKS):
        found = ggml_type(number)
        if found is not None and found.dtype == dtype:
            return number, found.block
    return None
