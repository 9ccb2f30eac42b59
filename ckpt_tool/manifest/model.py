"""A manifest says which n-D box of which tensor lives at which bytes of which file.

It is columns (``tables``) with small frozen records made on demand. It knows no format, opens no file, and holds no
tensor payload; objects that are not tensors are carried as blobs: the bytes where they lie, and a readable value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tool.errors import UnknownTensor
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import shell_word

if TYPE_CHECKING:
    from ckpt_tool.dtypes import DType
    from ckpt_tool.geometry.box import Box
    from ckpt_tool.manifest.items import ItemTable
    from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable

__all__ = ["ZEROS", "Blob", "Chunk", "FileEntry", "FileRange", "KeyPath", "Manifest", "MeshInfo", "TensorMeta"]

ZEROS = "zeros"
"""The codec of a file that is nowhere stored: ``nbytes`` zeros."""


KeyPath = tuple["str | int", ...]
"""Where a value sits in a nested state dict: dict keys and list positions."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """``length`` bytes of a file, ``path`` relative to the checkpoint's root."""

    path: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.length

    def __str__(self) -> str:
        """As error messages name it.

        >>> str(FileRange("a.pt", 64, 8))
        'a.pt:64+8'
        """
        return f"{self.path}:{self.offset}+{self.length}"


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor of the checkpoint."""

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    """Global shape, as stored in the checkpoint, never guessed from the chunks."""
    section: str
    """``model``, ``optimizer`` or ``other``."""
    path: KeyPath
    """Keys from the root of the state dict; ``(fqn,)`` where the format is flat."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel

    @property
    def nbytes(self) -> int:
        """Bytes of the packed elements."""
        return self.dtype.nbytes(self.numel)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored box of a tensor."""

    fqn: str
    box: Box
    """In global coordinates of the tensor."""
    where: FileRange
    """The bytes from the box's first element to its last; for an unresolved chunk, the container item around them."""
    strides: tuple[int, ...] | None
    """In elements; None for a packed row-major box."""
    flags: int
    """Bits of ``tables.ChunkFlag``."""
    rank: int | None
    """Rank that wrote it, None where the format does not tell."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file that chunks lie in, or the decoded content of a compressed part of one."""

    path: str
    nbytes: int
    """Size in bytes; of the decoded content where ``codec`` is set; -1 while unknown."""
    codec: str | None = None
    """``deflate`` or ``zstd``: chunk offsets count in the decoded content of ``part``; `ZEROS` for a file of zeros."""
    part: FileRange | None = None
    """The encoded bytes, None for a plain file."""


@dataclass(frozen=True, slots=True)
class Blob:
    """An object that is not a tensor: hyperparameters, random states, counters."""

    fqn: str
    kind: str
    """Encoding of ``where``: ``torch_save`` (a zip), ``pickle``, ``json``, ``text``, ``bytes``; ``value`` for none."""
    where: FileRange | None
    """Its bytes, None when it exists only as ``value`` (part of a larger pickle)."""
    value: Any = None
    """Inert Python value; None until it is read."""
    path: KeyPath = ()
    rank: int | None = None
    is_loaded: bool = False
    """Whether ``value`` holds the object (which may itself be None)."""
    within: KeyPath = ()
    """Keys that lead to it from what its bytes hold (Megatron has each object in a list of one)."""


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """The mesh that wrote the checkpoint, as far as the files tell."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    evidence: str
    """Where this is known from."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that is known of a checkpoint without reading tensor payload."""

    format: str
    """Name of the reader (``dcp``, ``safetensors``, ...)."""
    root: str
    """URL that file paths are relative to."""
    tensors: TensorTable
    chunks: ChunkTable
    files: FileTable
    blobs: tuple[Blob, ...] = ()
    mesh: MeshInfo | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    """What else the format says: ``step``, ``world_size``, ``torch_version``, ``metadata`` ... JSON-able."""
    notes: tuple[str, ...] = ()
    """What a person should know: assumptions with their evidence, files left out and why."""
    items: ItemTable | None = None
    """Which files hold items alone, and the items beside chunks and objects; None where the format does not tell."""
    url: str = ""
    """What its user calls it, which for a file is more than ``root``; empty where nobody said."""

    @property
    def where(self) -> str:
        """The name for messages: a command that it is given to opens this checkpoint."""
        return self.url or self.root

    def replace(self, **changes: Any) -> Manifest:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def tensor(self, fqn: str) -> TensorMeta:
        """The tensor called ``fqn``.

        Raises:
            NotFound: no such tensor; the hint names the nearest ones.
        """
        return self.tensors.record(self.tensor_id(fqn))

    def tensor_id(self, fqn: str) -> int:
        """Row of ``fqn`` in ``tensors``.

        Raises:
            UnknownTensor: no such tensor; the hint names the nearest ones.
        """
        row = self.tensors.index.get(fqn)
        if row is None:
            import difflib

            near = difflib.get_close_matches(fqn, self.tensors.fqns, n=3, cutoff=0.5)
            listed = f'list the names with "ckpt inspect {shell_word(self.where)}"'
            hint = "did you mean " + " or ".join(near) if near else listed
            if any(blob.fqn == fqn for blob in self.blobs):
                hint = f'it is an object: "ckpt inspect {shell_word(self.where)} --objects" shows its value'
            raise UnknownTensor(f"no tensor {fqn!r} among {len(self.tensors):,}", where=self.where, hint=hint)
        return row
