"""The table of formats has a row for each reader and writer, and says how each is recognised."""

from __future__ import annotations

import pytest

from ckpt_tool.api.formats.table import FormatRow, format_rows
from ckpt_tool.formats.registry import readers, writer, writer_names


@pytest.mark.parametrize("row", format_rows(), ids=lambda row: row.name)
def test_every_row_is_whole(row: FormatRow) -> None:
    """What it is, and how it is told, are said; what is read has a reader."""
    assert row.what
    assert bool(row.recognised) == row.reads


def test_names_are_unique_and_writers_are_found_by_them() -> None:
    """A short name is another word for one of them."""
    names = [reader.name for reader in readers()]
    assert len(set(names)) == len(names)
    assert [writer(name).name for name in writer_names()] == list(writer_names())
    assert writer("torch").name == "torch-save"
