"""``ckpt edit``: other names, fewer tensors, a right index, without moving payload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tool.cli.options import Choice, Json, NoFsync, Overwrite, Quiet, Source
from ckpt_tool.cli.output import output
from ckpt_tool.cli.text import Line, Span, line, wrap
from ckpt_tool.sizes import counted, format_bytes, some_of

if TYPE_CHECKING:
    from ckpt_tool.api.convert.edit import EditResult

EXAMPLES = (
    r"ckpt edit model renamed --rename '^model\.(.*)=\1'",
    "ckpt edit model slim --drop-optimizer",
    "ckpt edit model --fix-index --in-place",
)


class Repair(Choice):
    """What to do with tensors that share bytes."""

    copy = "copy"
    drop = "drop"


class Link(Choice):
    """How unchanged files come to the result."""

    auto = "auto"
    hard = "hard"
    clone = "clone"
    copy = "copy"


Out = Annotated[str | None, typer.Argument(metavar="[OUT]", help="Where the result goes; not with --in-place.")]


def edit(
    source: Source,
    target: Out = None,
    *,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="RE=TEXT",
            help=r"Rename by a regular expression: '^model\.(.*)=\1'. Repeatable, in order.",
        ),
    ] = None,
    strip_prefix: Annotated[
        list[str] | None,
        typer.Option("--strip-prefix", metavar="TEXT", help="Take this off the front of names. Repeatable."),
    ] = None,
    strip_wrappers: Annotated[
        bool,
        typer.Option(
            "--strip-wrappers", help="Take out module., _orig_mod., _fsdp_wrapped_module., _forward_module. and so on."
        ),
    ] = False,
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="GLOB", help="Leave out what fits. Repeatable."),
    ] = None,
    drop_optimizer: Annotated[bool, typer.Option("--drop-optimizer", help="Leave out the optimizer's state.")] = False,
    fix_index: Annotated[
        bool, typer.Option("--fix-index", help="Write weight_map and total_size anew from the headers.")
    ] = False,
    set_metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--set-metadata",
            metavar="KEY=TEXT",
            help="Text in safetensors headers; KEY= removes it. Repeatable.",
        ),
    ] = None,
    repair: Annotated[
        Repair | None,
        typer.Option(
            help="Tensors of a safetensors file that share bytes: copy gives each its own, drop keeps the first.",
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Put a PEFT adapter's tensors and config beside those of SRC, in one index; nothing is added up.",
        ),
    ] = None,
    link: Annotated[
        Link, typer.Option(help="Unchanged files: clones, hard links or copies; auto clones, else links.")
    ] = Link.auto,
    in_place: Annotated[bool, typer.Option("--in-place", help="Put the result in the place of SRC.")] = False,
    overwrite: Overwrite = False,
    no_fsync: NoFsync = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rename, drop and repair without moving payload.

    Headers are written anew; unchanged files are cloned or linked, other payload is copied by the kernel. SRC is a
    checkpoint of whole tensors in safetensors, of DCP, or a torch.save file, which is written anew. Two names that
    would become one are refused.

    With --json: schema "ckpt-tool/edit/1": target_url, format, n_tensors, n_files, nbytes, renamed [[old, new]],
    dropped [{fqn, why}], taken_over {linked_nbytes, cloned_nbytes, copied_nbytes, new_nbytes}, notes.
    """
    from ckpt_tool.api.convert.edit import edit as run
    from ckpt_tool.api.convert.edit_names import NameChanges, parse_rename

    sink = output(json=json, quiet=quiet)
    changes = NameChanges(
        [parse_rename(text) for text in rename or ()], strip_prefix or (), strip_wrappers, drop or (), drop_optimizer
    )
    result = run(
        source,
        target,
        changes=changes,
        fix_index=fix_index,
        metadata=dict(_setting(text) for text in set_metadata or ()),
        repair=None if repair is None else repair.value,
        adapter=adapter,
        link=link.value,
        in_place=in_place,
        overwrite=overwrite,
        durable=not no_fsync,
    )
    sink.show(_lines(result, sink.width))
    sink.notes(result.notes)
    sink.json(result.to_json())
    sink.values([result.target_url])


def _setting(text: str) -> tuple[str, str | None]:
    from ckpt_tool.errors import UsageError

    key, mark, value = text.partition("=")
    if not (key and mark):
        raise UsageError(f"--set-metadata takes KEY=TEXT, got {text!r}")
    return key, value or None


def _lines(result: EditResult, width: int) -> list[Line]:
    taken = result.taken_over
    ways = [
        f"{format_bytes(n)} {how}"
        for n, how in (
            (taken.cloned_nbytes, "cloned"),
            (taken.linked_nbytes, "in hard links"),
            (taken.copied_nbytes, "copied"),
            (taken.new_nbytes, "new"),
        )
        if n
    ]
    text = (
        f"{result.format}: {counted(result.n_tensors, 'tensor')} in {counted(result.n_files, 'file')}, "
        f"{format_bytes(result.nbytes)}: {', '.join(ways)}"
    )
    lines = wrap(text, width, line("wrote ", Span(result.target_url, "bold green"), "  "), "  ")
    if result.renamed:
        (old, new), more = result.renamed[0], len(result.renamed) - 1
        text = f"{old} is {new}{f', and {more:,} more' if more else ''}"
        lines += wrap(text, width, line(Span("renamed: ", "cyan")), "  ")
    by_why: dict[str, list[str]] = {}
    for each in result.dropped:
        by_why.setdefault(each.why, []).append(each.fqn)
    for why, fqns in by_why.items():
        text = f"{len(fqns):,}, {why}: {some_of(fqns)}"
        lines += wrap(text, width, line(Span("dropped: ", "yellow")), "  ")
    return lines
