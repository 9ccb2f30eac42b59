"""A template is a list of tensors without their bytes, as ``ckpt inspect --json`` saves one: what a model expects."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.errors import Unsupported
from ckpt_tool.formats.base import Checksum, Probe, Source
from ckpt_tool.manifest.codec import SCHEMA, without_chunks
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.tables import ChunkTable, IntArray
from ckpt_tool.storage.open import open_store

__all__ = ["is_template", "open_template"]

_MAX_BYTES = 1 << 30


class _TemplateReader:
    """Reads nothing: a template has no bytes."""

    name = "template"

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def probe(self, source: Source) -> Probe:  # noqa: ARG002
        """Never found by itself."""
        return Probe(0.0, "only where a template is asked for")

    def read(self, source: Source) -> Manifest:  # noqa: ARG002
        """The manifest."""
        return self._manifest

    def resolve(self, source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:  # noqa: ARG002
        """Refused."""
        raise Unsupported("a list of tensors holds none of their bytes", where=manifest.root)

    def load_blobs(self, source: Source, manifest: Manifest, rows: Sequence[int]) -> tuple[Blob, ...]:  # noqa: ARG002
        """Objects as far as they were saved."""
        return manifest.blobs

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum]:  # noqa: ARG002
        """None."""
        return iter(())

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:  # noqa: ARG002
        """None."""
        return iter(())


def is_template(checkpoint: Checkpoint) -> bool:
    """Whether names, shapes and types are all that there is."""
    return isinstance(checkpoint.reader, _TemplateReader)


def open_template(url: str | os.PathLike[str]) -> Checkpoint | None:
    """The template in a JSON file, None where the URL names something else.

    Raises:
        NotFound: nothing is there.
        FormatError: the file says that it is of the schema, and is not.
    """
    if not os.fspath(url).endswith(".json"):
        return None
    store, listing = open_store(url)
    name = listing.entry
    content = store.read(name, 0, listing.sizes[name]) if name and listing.sizes[name] <= _MAX_BYTES else b""
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        store.close()
        return None
    manifest = without_chunks(found).replace(format="template", root=os.fspath(url))
    return Checkpoint(os.fspath(url), Source(store, listing), _TemplateReader(manifest), manifest, 1)
