"""``ckpt inspect``: what a checkpoint holds and where it lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tool.cli.options import Choice, Exclude, Include, Json, Quiet, Section, Source
from ckpt_tool.cli.output import Output, output
from ckpt_tool.cli.text import Line
from ckpt_tool.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tool.api.checkpoint import Checkpoint
    from ckpt_tool.api.inspect import Inspection

EXAMPLES = (
    "ckpt inspect run/step-500",
    "ckpt inspect run/step-500 --section model --flat --sort size",
    "ckpt inspect s3://bucket/run/step-500 --map model.norm.weight",
)

_LINES_BY_DEFAULT = 200


class By(Choice):
    """What to list."""

    tensor = "tensor"
    file = "file"
    rank = "rank"


class Sort(Choice):
    """Order of a flat list."""

    name = "name"
    size = "size"
    shape = "shape"
    dtype = "dtype"


def inspect(
    source: Source,
    *,
    include: Include = None,
    exclude: Exclude = None,
    section: Annotated[Section | None, typer.Option(help="Only this part.")] = None,
    by: Annotated[By, typer.Option(help="List tensors, files or ranks.")] = By.tensor,
    sort: Annotated[Sort | None, typer.Option(help="Order of a flat list of tensors.")] = None,
    tree: Annotated[
        bool | None, typer.Option("--tree/--flat", help="Tensors as a tree, equal layers folded, or one a line.")
    ] = None,
    depth: Annotated[int | None, typer.Option(min=1, metavar="N", help="Levels of the tree.")] = None,
    shard_map: Annotated[
        str | None,
        typer.Option("--map", metavar="NAME", help="Draw where the boxes of one tensor lie."),
    ] = None,
    shards: Annotated[
        bool, typer.Option("--shards", help="Exact bytes of each box, in --json, --parquet, --map.")
    ] = False,
    objects: Annotated[bool, typer.Option("--objects", help="Show what is not a tensor; nothing is executed.")] = False,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Show optimizers in one normal form.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Most lines of a list, 0 for all.", show_default="200")
    ] = None,
    parquet: Annotated[
        str | None,
        typer.Option("--parquet", metavar="FILE", help="Also save the boxes as a table."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what a checkpoint holds and where each part of it lies.

    Reads metadata only, never a tensor, and executes nothing.

    With --json: schema "ckpt-tool/manifest/1": format, root, mesh, info, notes, tensors [{fqn, dtype, shape, nbytes,
    section, chunks}], files, blobs, with --shards chunks [{fqn, offsets, sizes, file, offset, length, rank}]; besides
    url, step, world_size, nbytes, stored_nbytes, totals, by_file, by_rank. With --map: schema "ckpt-tool/map/1": fqn,
    dtype, shape, nbytes, chunks.
    """
    from ckpt_tool.api.checkpoint import open_checkpoint
    from ckpt_tool.api.inspect import inspect as look

    sink = output(json=json, quiet=quiet)
    if tree and sort is not None:
        raise UsageError("--sort orders a flat list, --tree keeps the checkpoint's order", hint="leave one out")
    of_list = {
        "--by": by is not By.tensor, "--sort": sort is not None, "--flat": tree is False, "--tree": tree,
        "--depth": depth is not None,
    }  # fmt: skip
    if shard_map is not None:
        selecting = {"--include": include, "--exclude": exclude, "--section": section, "--parquet": parquet}
        _refuse("--map", {**of_list, **selecting, "--objects": objects, "--optimizer": optimizer}, "draws one tensor")
    if by is not By.tensor:
        _refuse(f"--by {by}", {flag: of_list[flag] for flag in of_list if flag != "--by"}, f"lists {by}s, not tensors")
    if depth is not None:
        _refuse("--depth", {"--flat": tree is False, "--sort": sort is not None}, "is about the tree")
    if shards and not (json or parquet is not None or shard_map is not None):
        raise UsageError(
            "--shards is for --json, --parquet and --map", hint="add one of them: --map NAME draws one tensor's boxes"
        )
    shown = None if limit == 0 else _LINES_BY_DEFAULT if limit is None else limit
    with open_checkpoint(source) as checkpoint:
        if shard_map is not None:
            _show_map(sink, checkpoint, shard_map, exact=shards, limit=shown)
            return
        found = look(
            checkpoint,
            include=include or (),
            exclude=exclude or (),
            section=None if section is None else str(section),
            shards=shards or parquet is not None,
            objects=objects or optimizer,
        )
    if parquet is not None:
        _save(found, parquet)
    sink.json(found.to_json() if json else {})
    sink.values(_bare(found, by, sort) if quiet else ())
    if sink.mode == "human":
        is_flat = tree is False or sort is not None
        listed = _list(found, by, sort, is_flat=is_flat, width=sink.width, depth=depth, limit=shown)
        _show(sink, found, listed, objects=objects, optimizer=optimizer, limit=shown)


def _refuse(flag: str, others: Mapping[str, object], why: str) -> None:
    """Nothing, where none of the other options is given, which would be of no use beside this one.

    Raises:
        UsageError: one is.
    """
    given = [other for other, value in others.items() if value]
    if given:
        raise UsageError(f"{flag} {why}, so {given[0]} has no use here", hint=f"leave out {given[0]}")


def _show_map(sink: Output, checkpoint: Checkpoint, fqn: str, *, exact: bool, limit: int | None) -> None:
    from ckpt_tool.api.shard_map import shard_map
    from ckpt_tool.cli.render_map import map_lines

    found = shard_map(checkpoint, fqn, exact=exact)
    sink.show(map_lines(found, width=sink.width, limit=limit))
    sink.json(found.to_json())
    sink.values(each.file for each in found.boxes)


def _list(
    found: Inspection, by: By, sort: Sort | None, *, is_flat: bool, width: int, depth: int | None, limit: int | None
) -> list[Line]:
    """The table or tree that was asked for."""
    from ckpt_tool.cli.render_tables import file_lines, rank_lines, sorted_rows, tensor_lines
    from ckpt_tool.cli.render_tree import tree_lines

    if by is By.file:
        return file_lines(found.files, width=width, limit=limit)
    if by is By.rank:
        return rank_lines(found.ranks, width=width, limit=limit)
    if is_flat:
        return tensor_lines(sorted_rows(found.rows, None if sort is None else str(sort)), width=width, limit=limit)
    return tree_lines(found.rows, width=width, depth=depth, limit=limit)


def _show(
    sink: Output, found: Inspection, listed: list[Line], *, objects: bool, optimizer: bool, limit: int | None
) -> None:
    from ckpt_tool.cli.render_header import header_lines
    from ckpt_tool.cli.render_tables import object_lines, optimizer_lines

    sink.show(header_lines(found, width=sink.width))
    if optimizer:
        sink.show(optimizer_lines(found.optimizers, width=sink.width, limit=limit))
    if objects:
        sink.show([()] if optimizer else [])
        sink.show(object_lines(found, width=sink.width, limit=limit))
    if not (objects or optimizer):
        sink.show(listed)
    if found.notes:
        sink.show([()])
        sink.notes(found.notes)


def _bare(found: Inspection, by: By, sort: Sort | None) -> list[str]:
    from ckpt_tool.cli.render_tables import sorted_rows

    if by is By.file:
        return [row.path for row in found.files]
    if by is By.rank:
        return [str(row.rank) for row in found.ranks]
    return [row.fqn for row in sorted_rows(found.rows, None if sort is None else str(sort))]


def _save(found: Inspection, path: str) -> None:
    from ckpt_tool.api.inspect import save_parquet

    save_parquet(found, path)
