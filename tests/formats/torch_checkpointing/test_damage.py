"""Changed bytes in files of torch-checkpointing: an error of this package or a reading, never a stray exception."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.errors import CkptError
from ckpt_tool.formats.torch_checkpointing.reader import READER
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import all_rows, source_of
from tests.formats.torch_checkpointing.real import METADATA, files_of

FILES = files_of("fsdp2_tp_4x2_uneven")


@pytest.mark.parametrize("path", [METADATA, "model_1.pt"])
@given(changes=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_changed_bytes(path: str, changes: list[tuple[int, int]]) -> None:
    """Up to four bytes are anything."""
    data = bytearray(FILES[path])
    for at, value in changes:
        data[at % len(data)] = value
    source = source_of(MemoryStore({**FILES, path: bytes(data)}))
    try:
        manifest = READER.read(source)
        list(READER.check(source, manifest))
        READER.resolve(source, manifest, all_rows(manifest))
        READER.load_blobs(source, manifest, range(len(manifest.blobs)))
    except CkptError as error:
        assert error.message  # noqa: PT017 - whether it raises depends on the bytes
