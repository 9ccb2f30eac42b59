"""Lengths of items told in columns are those of the items."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.formats._dcp.item_lengths import item_lengths
from ckpt_tool.formats._dcp.pickle_rows import Recalled, Rows
from ckpt_tool.formats._dcp.written_items import ItemKinds, is_writable
from ckpt_tool.formats.base import BoxTable
from ckpt_tool.manifest.model import TensorMeta
from ckpt_tool.manifest.tables import TensorTable, pad_shapes

NAMES = sorted(name for name, dtype in DTYPES.items() if is_writable(dtype))
SIZE = st.one_of(
    st.integers(0, 3), st.sampled_from([255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**33]), st.integers(1, 10**6)
)


BOX = st.tuples(st.sampled_from(NAMES), st.lists(SIZE, max_size=3).filter(lambda sizes: prod(sizes) < 1 << 54))


@given(st.lists(BOX, min_size=1, max_size=12))
def test_every_item_has_the_length_that_was_told(boxes: list[tuple[str, list[int]]]) -> None:
    """Numbers of every width, payloads of every remainder and beyond 4 GiB, tensors without elements or dimensions."""
    metas = [
        TensorMeta(str(i), DTYPES[name], tuple(sizes), "model", (str(i),)) for i, (name, sizes) in enumerate(boxes)
    ]
    tensors = TensorTable.from_records(metas)
    width = tensors.shape.shape[1]
    sizes = pad_shapes([sizes for _, sizes in boxes], width, 1)
    n = len(boxes)
    found = item_lengths(
        tensors, BoxTable(np.arange(n, dtype=np.int32), np.zeros_like(sizes), sizes, np.zeros(n, np.int32))
    )
    kinds = [ItemKinds().kind(meta.dtype, meta.shape) for meta in metas]
    assert [column.tolist() for column in found] == [
        [kind.nbytes for kind in kinds], [len(kind.head) for kind in kinds], [kind.payload_nbytes for kind in kinds],
    ]  # fmt: skip


def test_rows_hold_the_largest_number_of_each_column() -> None:
    """A column of numbers has one opcode, the narrowest for all of them."""
    rows = Rows(2, [b"<", np.array([1, 300]), Recalled(np.array([7, 9])), np.array([2**31, 1]), b">"])
    assert b"".join(map(bytes, rows.written(0, 2))) == (
        b"<M\x01\x00h\x07\x8a\x08\x00\x00\x00\x80\x00\x00\x00\x00>"
        b"<M\x2c\x01h\x09\x8a\x08\x01\x00\x00\x00\x00\x00\x00\x00>"
    )
    assert rows.row_nbytes * 2 == sum(part.nbytes for part in rows.written(0, 2))
