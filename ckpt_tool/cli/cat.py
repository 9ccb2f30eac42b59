"""``ckpt cat``: the numbers of one tensor, or of a box of it."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_tool.cli.options import DEFAULT_MEMORY, Json, Memory, Overwrite, Quiet, Source
from ckpt_tool.cli.output import output
from ckpt_tool.cli.text import Cell, Span, fitted, flat, line
from ckpt_tool.errors import UsageError
from ckpt_tool.sizes import parse_bytes

EXAMPLES = (
    "ckpt cat run/step-500 'model.norm.weight[0:6]'",
    "ckpt cat run/step-500 model.norm.weight --out norm.npy",
)

What = Annotated[
    str,
    typer.Argument(metavar="NAME[SLICE]", help="Tensor, or part of it: 'layers.0.weight[0:4, :]'."),
]
Out = Annotated[str | None, typer.Option("--out", metavar="FILE.npy", help="Write a .npy file instead.")]


def cat(
    source: Source,
    what: What,
    *,
    out: Out = None,
    overwrite: Overwrite = False,
    memory: Memory = DEFAULT_MEMORY,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print a tensor or a slice of it, or save it as .npy.

    Only the bytes of the slice are read.

    With --json: schema "ckpt-tool/cat/1": fqn, dtype, shape, values (nested; NaN and infinities are text), with --out
    file and note in their place.
    """
    from ckpt_tool.api.cat import cat as read_excerpt
    from ckpt_tool.api.cat import save_npy
    from ckpt_tool.cli.render_values import array_text

    sink = output(json=json, quiet=quiet)
    if overwrite and out is None:
        raise UsageError("--overwrite is for --out", hint="add --out FILE.npy, or leave it out")
    excerpt = read_excerpt(source, what, memory_budget_bytes=parse_bytes(memory, of="--memory"))
    shape = list(excerpt.array.shape)
    shown = "" if shape == list(excerpt.shape) else f"shown {shape}"
    title: list[Cell] = [Span(excerpt.fqn, "bold"), f"{excerpt.dtype} {list(excerpt.shape)}", Span(shown, "dim")]
    if out is not None:
        note = save_npy(excerpt, out, overwrite=overwrite)
        sink.talk([line("wrote ", Span(out, "green"), f"  {excerpt.dtype} {shape}")])
        if note:
            sink.talk([line(Span("note: ", "yellow"), note)])
        sink.json({**excerpt.described(), "file": out, "note": note})
        return
    sink.show(flat(fitted([title], "lll", sink.width)))
    sink.show(line(row) for row in array_text(excerpt.array, width=sink.width))
    sink.values(array_text(excerpt.array, width=sink.width, is_whole=True) if quiet else ())
    sink.json(excerpt.to_json())
