"""A template is a list of tensors without their bytes: what a model expects.

``ckpt inspect --json`` saves one; people and programs write others, in either of these forms, alone or under a key
``tensors``, where a type has any of its names and more keys say nothing::

    {"model.norm.weight": {"dtype": "bfloat16", "shape": [64]}, ...}       as the header of a safetensors file
    [{"fqn": "model.norm.weight", "dtype": "bfloat16", "shape": [64]}, ...]
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.dtypes import dtype
from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats.base import Checksum, Probe, Source
from ckpt_tool.manifest.codec import SCHEMA, without_chunks
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import ChunkTable, IntArray
from ckpt_tool.storage.open import open_store

__all__ = ["is_template", "open_template"]

_MAX_BYTES = 1 << 30
_MAX_SIZE = 1 << 63
_METADATA = "__metadata__"
_FORM = 'write {"NAME": {"dtype": "bfloat16", "shape": [4, 8]}, ...}, or save that of a checkpoint: ckpt inspect --json'


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
        FormatError: the file lists tensors, and does not say of one what it is.
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
    try:
        manifest = _manifest(found, os.fspath(url))
    except BaseException:
        store.close()
        raise
    if manifest is None:
        store.close()
        return None
    return Checkpoint(os.fspath(url), Source(store, listing), _TemplateReader(manifest), manifest, 1)


def _manifest(found: Any, url: str) -> Manifest | None:
    """What a JSON document lists; None where it is no list of tensors."""
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        listed = _listed(found)
        if not listed:
            return None
        tensors = [_tensor(fqn, fields, url) for fqn, fields in listed]
        found = {"schema": SCHEMA, "format": "", "root": "", "mesh": None, "tensors": tensors}
        found |= {"info": {}, "notes": [], "files": [], "blobs": []}
    try:
        return without_chunks(found).replace(format="template", root=url)
    except FormatError as error:
        raise FormatError(error.message, where=error.where or url, hint=error.hint) from None


def _listed(found: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Names with what is said of each, where a document lists tensors; shapes alone are such a list, if a poor one."""
    if isinstance(found, dict) and isinstance(found.get("tensors"), dict | list):
        found = found["tensors"]
    if isinstance(found, dict):
        listed = [
            (
                fqn,
                {"shape": fields} if isinstance(fields, list) and all(type(size) is int for size in fields) else fields,
            )
            for fqn, fields in found.items()
            if fqn != _METADATA
        ]
    elif isinstance(found, list):
        listed = [(row.get("fqn", row.get("name")) if isinstance(row, dict) else None, row) for row in found]
    else:
        return []
    is_list = all(isinstance(fqn, str) and isinstance(fields, dict) for fqn, fields in listed)
    return listed if is_list and any("shape" in fields for _, fields in listed) else []


def _tensor(fqn: str, fields: Mapping[str, Any], url: str) -> dict[str, Any]:
    """What the schema says of a tensor."""
    shape, name = fields.get("shape"), fields.get("dtype")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < _MAX_SIZE for size in shape):
        raise FormatError(f"{fqn!r}: expected a shape such as [4, 8], got {json.dumps(shape)}", where=url, hint=_FORM)
    if not isinstance(name, str):
        raise FormatError(
            f'{fqn!r}: expected a dtype such as "bfloat16", got {json.dumps(name)}', where=url, hint=_FORM
        )
    try:
        element = dtype(name)
    except Unsupported as error:
        raise FormatError(f"{fqn!r}: {error.message}", where=url, hint=error.hint) from None
    return {"fqn": fqn, "dtype": element.name, "shape": shape, "section": section_of((fqn,), fqn)}
