"""Packed manifests: what comes back is what went in, over the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from ckpt_tool.errors import FormatError
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.packed import from_packed, to_packed
from tests.manifest.made import described, manifests


def packed(manifest: Manifest) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The parts laid end to end."""
    return np.frombuffer(b"".join(bytes(part) for part in to_packed(manifest)), dtype=np.uint8)


@settings(max_examples=50, deadline=None)
@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    """Every column, name, path, file and blob comes back, over the packed bytes themselves."""
    data = packed(manifest)
    found = from_packed(data)
    assert described(found) == described(manifest)
    assert not len(found.chunks) or np.shares_memory(found.chunks.offset, data)


@settings(max_examples=20, deadline=None)
@given(manifests())
def test_damage(manifest: Manifest) -> None:
    """Data that is not whole is refused."""
    whole = packed(manifest)
    head = int.from_bytes(whole[:8].tobytes(), "little")
    for data in (whole[:0], whole[: 8 + head // 2], np.full(64, 16, dtype=np.uint8)):
        with pytest.raises(FormatError):
            from_packed(data)
