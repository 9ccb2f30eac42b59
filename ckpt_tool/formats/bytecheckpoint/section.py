"""A section is one folder with a ``.metadata``: the tensors and objects of the model, or of the optimizer.

Names are the section's, a dot, and the key: ``model.emb.weight``, ``optimizer.state.emb.weight.exp_avg``. Keys keep
what frameworks put in front of them (DDP: ``module.``), and parameters that DDP numbers stay numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tool.errors import FormatError
from ckpt_tool.formats._dcp.metadata import METADATA_NAME, MetadataFile, foreign_root, load_metadata
from ckpt_tool.formats._dcp.table import tabulate
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.bytecheckpoint.flat import flat_parameters, unflattened_section
from ckpt_tool.formats.bytecheckpoint.location import MODULE
from ckpt_tool.formats.bytecheckpoint.shells import place_chunks
from ckpt_tool.manifest.flat_parameters import FlatParameter
from ckpt_tool.manifest.model import KeyPath, Manifest
from ckpt_tool.manifest.tables import SECTIONS, TensorTable
from ckpt_tool.records import dataclass

__all__ = ["SectionFile", "read_section", "section_manifest"]


@dataclass(frozen=True, slots=True)
class SectionFile:
    """The metadata of one section, parsed."""

    name: str
    metadata: MetadataFile
    flat: Mapping[str, FlatParameter]

    @property
    def version(self) -> str | None:
        """Release of the library that wrote it."""
        version = self.metadata.extra.get("bytecheckpoint_version")
        return version if isinstance(version, str) else None


def read_section(data: bytes, name: str, where: str) -> SectionFile:
    """The content of a section's ``.metadata``.

    Raises:
        FormatError: it is another kind of metadata, or a field is of the wrong type.
        UnsafePickle: it asks for a callable that can do harm.
    """
    foreign = foreign_root(data[:256], MODULE)
    if foreign is not None:
        raise FormatError(f"expected metadata of ByteCheckpoint, got {foreign}", where=where)
    metadata = load_metadata(data, where)
    return SectionFile(name, metadata, flat_parameters(metadata.extra.get("user_defined_dict"), where))


def section_manifest(source: Source, section: SectionFile, flat: Mapping[str, FlatParameter], name: str) -> Manifest:
    """The manifest of a section whose folder is ``source``; every place is exact. No request.

    Args:
        source: the section's folder.
        section: its metadata.
        flat: flat parameters of the model, which the optimizer's section does not repeat.
        name: of the format.

    Raises:
        FormatError: the metadata contradicts itself; the message names the tensor.
    """
    where = f"{section.name}/{METADATA_NAME}"
    tables = tabulate([section.metadata], source.listing.sizes)
    tensors = tables.tensors
    chunks = place_chunks(tensors, tables.chunks, section.metadata.extra.get("all_tensor_metadata"), where)
    if flat:
        tensors, chunks = unflattened_section(tensors, chunks, flat, where)
    return Manifest(
        format=name,
        root=source.listing.url,
        tensors=_named(tensors, section.name),
        chunks=chunks,
        files=tables.files,
        blobs=tuple(
            replace(blob, fqn=f"{section.name}.{blob.fqn}", path=(section.name, *blob.path)) for blob in tables.blobs
        ),
        info=_info(tables.empty),
        items=tables.items.with_chunks(tables.chunks),
    )


def _named(tensors: TensorTable, section: str) -> TensorTable:
    """The tensors with the section in front of names and paths."""
    paths: tuple[KeyPath, ...] = tensors.paths or tuple((fqn,) for fqn in tensors.fqns)
    code = SECTIONS.index(section)
    kinds = tensors.section.copy()
    kinds[:] = code
    return replace(
        tensors,
        fqns=tuple(f"{section}.{fqn}" for fqn in tensors.fqns),
        paths=tuple((section, *map(_number, path[:-1]), path[-1]) for path in paths),
        section=kinds,
    )


def _number(key: str | int) -> str | int:
    """DDP keeps numbers of parameters as text; as keys they are numbers again."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key


def _info(empty: Mapping[int, int]) -> dict[str, Any]:
    return {"n_empty_chunks": sum(empty.values())} if empty else {}
