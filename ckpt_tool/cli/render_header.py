"""The header of an inspection: what it is, who wrote it, and a table of sizes by section and element type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckpt_tool.cli.text import Cell, Line, Span, columns, line, wrap
from ckpt_tool.sizes import format_bytes

if TYPE_CHECKING:
    from ckpt_tool.api.inspect import Inspection

__all__ = ["counted", "header_lines"]

_LABEL_WIDTH = 9


def counted(n: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "file"), counted(2000, "box")
    ('1 file', '2,000 boxes')
    """
    plural = noun if n == 1 else noun + ("es" if noun.endswith("x") else "s")
    return f"{n:,} {plural}"


def header_lines(found: Inspection, *, width: int) -> list[Line]:
    """The header block, an empty line at its end."""
    facts: list[tuple[str, str]] = [("format", _format(found))]
    if found.step is not None:
        facts.append(("step", f"{found.step:,}"))
    writer = _writer(found)
    if writer:
        facts.append(("written", writer))
    facts += [("tensors", _counts(found)), ("bytes", _bytes(found))]
    lines = [line(Span(found.url, "bold"))]
    for label, text in facts:
        lines += wrap(text, width, line("  ", Span(label.ljust(_LABEL_WIDTH), "cyan")), " " * (_LABEL_WIDTH + 2))
    return [*lines, line(), *_totals(found), line()]


def _format(found: Inspection) -> str:
    details = [
        f"{name.removesuffix('_version').replace('_', ' ')} {value}"
        for name, value in found.manifest.info.items()
        if name.endswith("_version") and isinstance(value, str | int | float)
    ]
    return f"{found.format} ({', '.join(details)})" if details else found.format


def _writer(found: Inspection) -> str:
    parts = []
    if found.world_size is not None:
        parts.append(f"by {counted(found.world_size, 'rank')}")
    if found.mesh is not None:
        sizes = " ".join(f"{axis}={size}" for axis, size in zip(found.mesh.axes, found.mesh.sizes, strict=True))
        parts.append(f"mesh {sizes} ({found.mesh.evidence})")
    return ", ".join(parts)


def _counts(found: Inspection) -> str:
    n = len(found.manifest.tensors)
    of = "" if n == found.n_tensors_in_all else f" of {found.n_tensors_in_all:,}"
    boxes, files = counted(len(found.manifest.chunks), "box"), counted(len(found.manifest.files), "file")
    objects = f"; {counted(len(found.objects), 'other object')}" if found.objects else ""
    return f"{n:,}{of}, stored as {boxes} in {files}{objects}"


def _bytes(found: Inspection) -> str:
    text = f"{format_bytes(found.nbytes)} ({found.nbytes:,})"
    if found.stored_nbytes > found.nbytes:
        text += f", with replicas {format_bytes(found.stored_nbytes)}"
    return text


def _totals(found: Inspection) -> list[Line]:
    """A row per section, a column per element type."""
    totals = found.totals
    sections = list(dict.fromkeys(row.section for row in totals))
    by_dtype: dict[str, int] = {}
    for row in totals:
        by_dtype[row.dtype] = by_dtype.get(row.dtype, 0) + row.nbytes
    dtypes = sorted(by_dtype, key=lambda name: -by_dtype[name])
    sizes: Mapping[tuple[str, str], int] = {(row.section, row.dtype): row.nbytes for row in totals}
    heads = ["section", "tensors", *dtypes, *(["all"] if len(dtypes) > 1 else [])]
    table: list[list[Cell]] = [[Span(head, "bold") for head in heads]]
    for section in sections:
        own = [row for row in totals if row.section == section]
        cells: list[Cell] = [Span(section, "green"), f"{sum(row.n_tensors for row in own):,}"]
        cells += [
            format_bytes(sizes[section, dtype]) if (section, dtype) in sizes else Span("-", "dim") for dtype in dtypes
        ]
        if len(dtypes) > 1:
            cells.append(format_bytes(sum(row.nbytes for row in own)))
        table.append(cells)
    return columns(table, "l" + "r" * (len(heads) - 1), gap=3, indent="  ")
