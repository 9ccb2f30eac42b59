"""A digest table says what each tensor of a checkpoint holds, and each file, in a few bytes: the content manifest.

Written beside or apart from a checkpoint, it proves a copy of any format and layout equal. Knows no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from ckpt_tool.checksum import crc32
from ckpt_tool.errors import FormatError, IntegrityError, Unsupported
from ckpt_tool.manifest.digest import ContentDigest
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.records import dataclass

__all__ = ["SCHEMA", "SUFFIX", "DigestRow", "DigestTable", "FileDigest", "parse_table"]

SCHEMA = "ckpt-tool/digests/1"
SUFFIX = ".digests.json"
"""Of a file beside the checkpoint that it describes."""
_MAX_SIZE, _MAX_NDIM = 1 << 62, 64


@dataclass(frozen=True, slots=True)
class DigestRow:
    """One tensor."""

    fqn: str
    section: str
    digest: ContentDigest


@dataclass(frozen=True, slots=True)
class FileDigest:
    """One file as such."""

    path: str
    """Relative to the checkpoint's root."""
    nbytes: int
    crc32: int | None
    sha256: str | None = None
    """Hexadecimal; either of the two is there."""


@dataclass(frozen=True)
class DigestTable:
    """What a checkpoint holds."""

    format: str
    """Name of the reader; content does not depend on it, files do."""
    rows: tuple[DigestRow, ...]
    files: tuple[FileDigest, ...] = ()
    originals: tuple[DigestRow, ...] = ()
    """The tensors that those of a conversion were made of (split, joined, renamed), under their own names."""

    @cached_property
    def tensors(self) -> dict[str, ContentDigest]:
        """Digests by fqn."""
        return {row.fqn: row.digest for row in self.rows}

    def known_as(self, fqns: Collection[str]) -> tuple[DigestRow, ...]:
        """The rows whose names are more of these: those of the tensors, or of what they were made of."""
        n_rows, n_originals = (sum(row.fqn in fqns for row in rows) for rows in (self.rows, self.originals))
        return self.originals if n_originals > n_rows else self.rows

    @property
    def is_wide(self) -> bool:
        """Whether every tensor has the wide sum."""
        return all(row.digest.wide is not None for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The table as JSON-able values.

        Schema ``ckpt-tool/digests/1``: ``schema``, ``format``, ``tensors[] {fqn dtype shape section crc32 wide}``,
        ``files[] {path nbytes crc32 sha256}``, ``originals[]`` like ``tensors`` where there are any, and ``check``, the
        CRC-32 of the compact JSON of ``[tensors, files]``, or of ``[tensors, files, originals]``.
        ``crc32`` (8 hex digits) is that of the tensor's row-major little-endian bytes, or of the file's; ``wide`` (32
        digits), ``crc32`` of a file and ``sha256`` are left out where they were not taken. Later versions only add
        keys.
        """
        tensors = [_row_json(row) for row in self.rows]
        files = [_file_json(file) for file in self.files]
        listed: dict[str, Any] = {"tensors": tensors, "files": files}
        if self.originals:
            listed["originals"] = [_row_json(row) for row in self.originals]
        return {"schema": SCHEMA, "format": self.format, **listed, "check": _check(*listed.values())}

    def to_text(self) -> str:
        """The content of a file that `parse_table` reads: JSON with a line for each tensor and file."""
        document = self.to_json()
        lines = ["{"]
        for key, value in document.items():
            if isinstance(value, list):
                rows = [f"  {json.dumps(each)}" for each in value]
                lines += [f"{json.dumps(key)}: [", ",\n".join(rows), "],"] if rows else [f"{json.dumps(key)}: [],"]
            else:
                lines.append(f"{json.dumps(key)}: {json.dumps(value)},")
        lines[-1] = lines[-1].removesuffix(",")
        return "\n".join([*lines, "}"]) + "\n"


def parse_table(text: str | bytes, *, where: str) -> DigestTable:
    """The table that a file holds.

    Raises:
        FormatError: it is no such file.
        IntegrityError: it was changed after it was written.
        Unsupported: a later schema.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "ckpt verify SRC --against OTHER compares with a checkpoint"
        raise FormatError("expected a manifest of digests, got no JSON", where=where, hint=hint) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, str) or not schema.startswith("ckpt-tool/digests/"):
        hint = 'write one with "ckpt verify SRC --write-manifest FILE"'
        raise FormatError(f"expected a manifest of digests ({SCHEMA}), got schema {schema!r}", where=where, hint=hint)
    if schema != SCHEMA:
        raise Unsupported(f"expected schema {SCHEMA}, got {schema}", where=where, hint="a later version reads it")
    try:
        table = DigestTable(
            str(document["format"]),
            tuple(_row(each) for each in document["tensors"]),
            tuple(_file(each) for each in document["files"]),
            tuple(_row(each) for each in document.get("originals", ())),
        )
        expected = document["check"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"a manifest of digests that lacks what belongs in it: {error!r}", where=where) from error
    got = _check(*(document[key] for key in ("tensors", "files", "originals") if key in document))
    if got != expected:
        message = f"the manifest itself was changed after it was written: its check is {got}, expected {expected!r}"
        raise IntegrityError(message, where=where, hint="take another copy of it")
    if len(table.tensors) != len(table.rows) or len({row.fqn for row in table.originals}) != len(table.originals):
        raise FormatError("a tensor is listed twice", where=where)
    return table


def _check(*lists: Any) -> str:
    return f"{crc32(json.dumps(lists, ensure_ascii=True, separators=(',', ':')).encode()):08x}"


def _row_json(row: DigestRow) -> dict[str, Any]:
    found = row.digest
    wide = {} if found.wide is None else {"wide": f"{found.wide:032x}"}
    return {
        "fqn": row.fqn,
        "dtype": found.dtype,
        "shape": list(found.shape),
        "section": row.section,
        "crc32": f"{found.crc32:08x}",
        **wide,
    }


def _row(each: Mapping[str, Any]) -> DigestRow:
    if each["section"] not in SECTIONS:
        raise ValueError(f"section {each['section']!r}")
    shape = tuple(each["shape"])
    if not all(type(size) is int and 0 <= size < _MAX_SIZE for size in shape) or len(shape) > _MAX_NDIM:
        raise ValueError(f"shape {each['shape']!r}")
    wide = int(each["wide"], 16) if "wide" in each else None
    digest = ContentDigest(str(each["dtype"]), shape, _crc32(each["crc32"]), wide)
    return DigestRow(str(each["fqn"]), each["section"], digest)


def _crc32(text: str) -> int:
    if len(text) != 8:
        raise ValueError(f"CRC-32 {text!r}")
    return int(text, 16)


def _file_json(file: FileDigest) -> dict[str, Any]:
    sums = {} if file.crc32 is None else {"crc32": f"{file.crc32:08x}"}
    if file.sha256 is not None:
        sums["sha256"] = file.sha256
    return {"path": file.path, "nbytes": file.nbytes, **sums}


def _file(each: Mapping[str, Any]) -> FileDigest:
    crc = _crc32(each["crc32"]) if "crc32" in each else None
    sha256 = str(each["sha256"]) if "sha256" in each else None
    if crc is None and sha256 is None:
        raise ValueError(f"no sum of {each['path']!r}")
    return FileDigest(str(each["path"]), int(each["nbytes"]), crc, sha256)
