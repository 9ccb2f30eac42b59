"""``ckpt diff``: do two checkpoints hold the same, and if not, what differs and perhaps why."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_tool.cli.name_options import Facts, Family, NamingFile, TrueVocab
from ckpt_tool.cli.options import DEFAULT_MEMORY, Choice, Exclude, Include, Json, Memory, Quiet, Section, Workers
from ckpt_tool.cli.output import output
from ckpt_tool.sizes import parse_bytes

EXAMPLES = (
    "ckpt diff run/step-500 copy/of/step-500",
    "ckpt diff run/step-500 weights --section model --allow-cast",
    "ckpt diff megatron/iter_0000500 hf_model --section model --names hf",
)

_DIFFERENCES = 1


class Names(Choice):
    """How names of both sides are brought together."""

    auto = "auto"
    exact = "exact"
    hf = "hf"


A = Annotated[str, typer.Argument(metavar="A", help="Checkpoint: a path or a URL.")]
B = Annotated[
    str,
    typer.Argument(
        metavar="B",
        help="What is held against it: a checkpoint, or names, shapes and types alone: a file of ckpt inspect --json, "
        'or one like {"NAME": {"dtype": "bf16", "shape": [4, 8]}}.',
    ),
]
MapNames = Annotated[
    list[str] | None,
    typer.Option(
        "--map-names",
        metavar="RE=>TEXT",
        help=r"Rename on both sides before pairing: 're:^model\.(.*)=>\1'. Repeatable, in order.",
    ),
]
StripPrefix = Annotated[
    list[str] | None,
    typer.Option("--strip-prefix", metavar="TEXT", help="Take this off names, on both sides. Repeatable."),
]


def diff(
    a: A,
    b: B,
    *,
    include: Include = None,
    exclude: Exclude = None,
    section: Annotated[Section | None, typer.Option("--section", help="Only this part.")] = None,
    map_names: MapNames = None,
    strip_prefix: StripPrefix = None,
    names: Annotated[
        Names,
        typer.Option(
            "--names",
            help="Pair leftovers without outer keys and wrapper prefixes (auto), or do not (exact); hf shows those of "
            "Megatron and torchtitan as those of transformers before: fused ones apart, rows of padding left out.",
        ),
    ] = Names.auto,
    family: Family = "auto",
    naming: NamingFile = None,
    fact: Facts = None,
    true_vocab: TrueVocab = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="Also random states, extra state and objects.")
    ] = False,
    allow_cast: Annotated[
        bool, typer.Option("--allow-cast", help="A tensor rounded to a narrower type counts as the same.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Names, shapes and types only; no payload is read.")] = False,
    no_reasons: Annotated[bool, typer.Option("--no-reasons", help="Do not look for why tensors differ.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="List tensors that are the same, too.")] = False,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Lines shown of each kind, 0 for all.")] = 12,
    memory: Memory = DEFAULT_MEMORY,
    workers: Workers = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two checkpoints, tensor by tensor.

    Either may be of any format and layout. Bits are compared first, values where bits differ; NaN equals NaN of the
    same bits.
    Exit status 0 when all is the same, 1 when anything differs.

    With --json: schema "ckpt-tool/diff/1": same, quick, seconds, compared_nbytes, a and b {url, format, tensors,
    nbytes, ignored}, counts by status, ignored, notes, hint, groups [{status, reason, count}], tensors [{fqn, fqn_b,
    status, dtype_a, dtype_b, shape_a, shape_b, accepted, reason, compared, differing, nan_payload, non_finite,
    signed_zero, max_abs, max_rel, max_ulp, first {index, a, b}, bounds}], objects [{fqn, status, a, b}];
    same tensors with --all.
    """
    from ckpt_tool.api.arguments import parse_facts
    from ckpt_tool.api.trust.diff import diff as compare
    from ckpt_tool.cli.progress import progress_bar
    from ckpt_tool.cli.render_diff import report_lines

    sink = output(json=json, quiet=quiet)
    replacements = [_replacement(text) for text in map_names or ()]
    with progress_bar(sink, "comparing") as moved:
        report = compare(
            a,
            b,
            include=include or (),
            exclude=exclude or (),
            section=None if section is None else str(section),
            map_names=replacements,
            strip_prefixes=strip_prefix or (),
            names=names.value,
            family=family,
            naming=naming,
            facts=parse_facts(fact or ()),
            true_vocab=true_vocab,
            everything=everything,
            allow_cast=allow_cast,
            quick=quick,
            reasons=not no_reasons,
            memory_budget_bytes=parse_bytes(memory, of="--memory"),
            n_workers=workers,
            progress=moved,
        )
    if sink.mode == "human":
        sink.show(report_lines(report, width=sink.width, limit=limit or None, with_same=show_all))
    sink.json(report.to_json(with_same=show_all) if json else {})
    sink.values(f"{each.status} {each.fqn}" for each in report.tensors if show_all or each.status != "same")
    if not report.is_same:
        raise typer.Exit(_DIFFERENCES)


def _replacement(text: str) -> tuple[str, str]:
    from ckpt_tool.errors import UsageError

    pattern, arrow, replacement = text.rpartition("=>")
    if not arrow:
        raise UsageError(f"{text!r} is no map of names", hint=r"write it as 're:^model\.(.*)=>\1'")
    return pattern, replacement
