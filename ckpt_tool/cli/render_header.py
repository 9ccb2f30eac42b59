"""The header of an inspection: what it is, who wrote it, and a table of sizes by section and element type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.cli.text import Cell, Line, Span, columns, line, wrap
from ckpt_tool.sizes import counted, format_bytes

if TYPE_CHECKING:
    from ckpt_tool.api.inspect import Inspection

__all__ = ["header_lines"]

_LABEL_WIDTH = 9
_WIDTH_OF_SECTIONS, _WIDTH_OF_DTYPE = 36, 12


def header_lines(found: Inspection, *, width: int) -> list[Line]:
    """The header block, an empty line at its end."""
    facts: list[tuple[str, str]] = [("format", _format(found))]
    if found.step is not None:
        facts.append(("step", f"{found.step:,}"))
    writer = _writer(found)
    if writer:
        facts.append(("written", writer))
    facts += [*found.run_facts, ("tensors", _counts(found)), ("bytes", _bytes(found))]
    lines = [line(Span(found.url, "bold"))]
    label_width = max(_LABEL_WIDTH, *(len(label) + 2 for label, _ in facts))
    for label, text in facts:
        lines += wrap(text, width, line("  ", Span(label.ljust(label_width), "cyan")), " " * (label_width + 2))
    return [*lines, line(), *_totals(found, width), line()]


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
    boxes, files = counted(len(found.manifest.chunks), "box"), counted(found.manifest.files.n_stored, "file")
    objects = f"; {counted(len(found.objects), 'other object')}" if found.objects else ""
    return f"{n:,}{of}, stored as {boxes} in {files}{objects}"


def _bytes(found: Inspection) -> str:
    text = f"{format_bytes(found.nbytes)} ({found.nbytes:,})"
    if found.stored_nbytes > found.nbytes:
        text += f", with replicas {format_bytes(found.stored_nbytes)}"
    return text


def _totals(found: Inspection, width: int) -> list[Line]:
    """A row per section, a column per element type; the small types share one where there are too many to fit."""
    by_dtype: dict[str, int] = {}
    for row in found.totals:
        by_dtype[row.dtype] = by_dtype.get(row.dtype, 0) + row.nbytes
    dtypes = sorted(by_dtype, key=lambda name: -by_dtype[name])
    n_fitting = max((width - _WIDTH_OF_SECTIONS) // _WIDTH_OF_DTYPE, 1)
    n_shown = len(dtypes) if len(dtypes) <= n_fitting else n_fitting - 1
    column_of = {dtype: min(at, n_shown) for at, dtype in enumerate(dtypes)}
    heads = dtypes[:n_shown] + ([f"{counted(len(dtypes) - n_shown, 'more type')}"] if n_shown < len(dtypes) else [])
    sections = list(dict.fromkeys(row.section for row in found.totals))
    table: list[list[Cell]] = [[Span(head, "bold") for head in ("section", "tensors", *heads, "all")]]
    for section in sections:
        own = [row for row in found.totals if row.section == section]
        sizes: list[int | None] = [None] * len(heads)
        for row in own:
            sizes[column_of[row.dtype]] = (sizes[column_of[row.dtype]] or 0) + row.nbytes
        cells = [Span("-", "dim") if nbytes is None else Span(format_bytes(nbytes)) for nbytes in sizes]
        n_tensors, nbytes = sum(row.n_tensors for row in own), sum(row.nbytes for row in own)
        table.append([Span(section, "green"), f"{n_tensors:,}", *cells, format_bytes(nbytes)])
    if len(heads) == 1:
        table = [row[:-1] for row in table]
    return columns(table, ("lr" + "r" * len(heads) + "r")[: len(table[0])], gap=3, indent="  ")
