"""What is done with a checkpoint that may be anything: every step of its reader but to read payload."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from ckpt_tool.errors import CkptError
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.detect import detect
from ckpt_tool.storage.memory import MemoryStore

__all__ = ["looked_at"]


def looked_at(files: dict[str, bytes]) -> None:
    """Detect, read, resolve, look for checksums, check, load objects.

    Raises:
        CkptError: it cannot be read at all.
    """
    store = MemoryStore(files)
    source = Source(store, store.listing())
    reader = detect(source)
    manifest = reader.read(source)
    for step in (
        lambda: reader.resolve(source, manifest, np.arange(len(manifest.chunks), dtype=np.int64)),
        lambda: list(reader.checksums(source, manifest)),
        lambda: list(reader.check(source, manifest)),
        lambda: reader.load_blobs(source, manifest, range(len(manifest.blobs))),
    ):
        with suppress(CkptError):
            step()
