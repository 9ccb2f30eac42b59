"""Options that several commands share: a flag means, and says in ``--help``, the same everywhere.

Those of a command with many options are listed under headings (`LAYOUT` ...), which the help of the others leaves out.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

__all__ = [
    "DEFAULT_MEMORY",
    "NAMES",
    "SELECTION",
    "WRITTEN",
    "Arguments",
    "Choice",
    "ConfigFile",
    "DataMode",
    "Default",
    "Digest",
    "DigestFile",
    "Dp",
    "DpMode",
    "DryRun",
    "Dtype",
    "Engine",
    "EngineName",
    "Ep",
    "Exclude",
    "FirstStageLayers",
    "Include",
    "Json",
    "LastStageLayers",
    "Masters",
    "McoreVersion",
    "Memory",
    "MeshText",
    "NoFsync",
    "OfRanks",
    "OptimStyle",
    "OptimStyleName",
    "Overwrite",
    "PlanJson",
    "Pp",
    "Processes",
    "Quiet",
    "RandomStates",
    "RankState",
    "Replicas",
    "Resume",
    "Rng",
    "RulesFile",
    "Section",
    "Sidecar",
    "Source",
    "Split",
    "StoredReplicas",
    "Target",
    "Tied",
    "ToFormat",
    "Tp",
    "UncoveredAs",
    "UnequalAs",
    "Vpp",
    "Workers",
    "ZeroStage",
    "option",
]


LAYOUT = "Layout of the target"
WRITTEN = "What is written"
NAMES = "Names"
MEGATRON = "For a Megatron target"
SELECTION = "Which tensors"
WORK = "How it runs"


def option(flags: str, heading: str, help: str, metavar: str | None = None, **settings: Any) -> Any:
    """What typer is told of an option: its flags, the heading it stands under, its help and the name of its value."""
    return typer.Option(*flags.split(), help=help, metavar=metavar, rich_help_panel=heading, **settings)


class Choice(str, Enum):
    """One of several words; a member is its own text."""

    def __str__(self) -> str:
        return str(self.value)


class Section(Choice):
    """Parts of a checkpoint."""

    model = "model"
    optimizer = "optimizer"
    other = "other"


class DpMode(Choice):
    """What data-parallel ranks do to a tensor."""

    shard = "shard"
    replicate = "replicate"


class Default(Choice):
    """What to do with a tensor that no rule covers."""

    shard0 = "shard0"
    replicate = "replicate"


class Replicas(Choice):
    """How often a replicated box is stored."""

    auto = "auto"
    once = "once"
    all = "all"


class RankState(Choice):
    """What to do with states of single ranks."""

    keep = "keep"
    drop = "drop"


class OptimStyle(Choice):
    """How an optimizer names its state."""

    ids = "ids"
    fqn = "fqn"
    fqn_flat = "fqn-flat"


class Engine(Choice):
    """Who starts processes."""

    local = "local"
    ray = "ray"


class Rng(Choice):
    """What to do with random states of a Megatron run."""

    keep = "keep"
    drop = "drop"
    emit = "emit"


class Tied(Choice):
    """What to do with tensors that share their bytes."""

    auto = "auto"
    keep = "keep"
    drop = "drop"


Source = Annotated[
    str, typer.Argument(metavar="SRC", help="Checkpoint: a path, or a URL such as s3://bucket/step-500.")
]
Target = Annotated[str, typer.Argument(metavar="DST", help="Where to write: a path or a URL.")]

Tp = Annotated[int, option("--tp", LAYOUT, "Tensor-parallel ranks.", "N", min=1)]
Pp = Annotated[int, option("--pp", LAYOUT, "Pipeline stages.", "N", min=1)]
Dp = Annotated[int, option("--dp", LAYOUT, "Data-parallel ranks.", "N", min=1)]
Ep = Annotated[int, option("--ep", LAYOUT, "Expert-parallel ranks, a divisor of --dp.", "N", min=1)]
Vpp = Annotated[int, option("--vpp", LAYOUT, "Model chunks (virtual stages) per stage.", "N", min=1)]
Etp = Annotated[
    int | None,
    option(
        "--etp", LAYOUT, "Megatron: tensor-parallel ranks of experts, if not --tp. --ep times --etp must divide --tp "
        "times --dp.", "N", min=1,
    ),
]  # fmt: skip
FirstStageLayers = Annotated[
    int | None, option("--first-stage-layers", LAYOUT, "Layers of the first stage, if not its share.", "N", min=0)
]
LastStageLayers = Annotated[
    int | None, option("--last-stage-layers", LAYOUT, "Layers of the last stage, if not its share.", "N", min=0)
]
MeshText = Annotated[
    str | None,
    option(
        "--mesh",
        LAYOUT,
        "Instead of --tp, --pp, --dp, --ep and --etp: axes in rank order, slowest first, as in pp=2,dp=4,tp=2.",
        "AXES",
    ),
]
DataMode = Annotated[
    DpMode, option("--dp-mode", LAYOUT, "Cut tensors over data-parallel ranks as FSDP does, or store one copy for all.")
]
RulesFile = Annotated[
    str | None,
    option("--rules", LAYOUT, "Rules (TOML, JSON) for names that the model's family has no rule for.", "FILE"),
]
UncoveredAs = Annotated[
    Default | None,
    option(
        "--default", LAYOUT, "For tensors that no rule covers: cut them along dimension 0, or give every rank a copy. "
        "Without this they stop the command.",
    ),
]  # fmt: skip

ToFormat = Annotated[
    str,
    option(
        "--to",
        WRITTEN,
        "dcp, deepspeed, megatron-dist, megatron-legacy, rank-files, torch-ranks, bytecheckpoint, torch-checkpointing, "
        "torchsnapshot, vescale, orbax; for one rank deepspeed-universal, nanotron, safetensors, torch-save.",
        "FORMAT",
    ),
]
ZeroStage = Annotated[
    int | None, option("--zero-stage", WRITTEN, "deepspeed: ZeRO stage; by default that of SRC.", "N", min=1, max=3)
]
Dtype = Annotated[
    str | None,
    option("--dtype", WRITTEN, "Cast the model's floating-point tensors (bf16, fp32 ...); casts are listed.", "NAME"),
]
Masters = Annotated[
    bool, option("--masters", WRITTEN, "The optimizer's fp32 master weights instead of the weights rounded from them.")
]
StoredReplicas = Annotated[
    Replicas,
    option("--replicas", WRITTEN, "Store what several ranks hold once, for all of them, or as the format needs."),
]
UnequalAs = Annotated[
    list[str] | None,
    option(
        "--unequal",
        WRITTEN,
        "For tensors that differ between ranks when no file says how they join: take the first rank's (first), join "
        "them along a dimension (concat:DIM), or as the model's family or a file cuts them (rules, rules:FILE). "
        "Repeatable; the last one that fits counts.",
        "[GLOB=]HOW",
    ),
]
FlatTable = Annotated[
    str | None,
    option(
        "--flat",
        WRITTEN,
        "What FSDP1's flat parameters hold: names and shapes, as TOML or JSON; docs/layouts.md has a way to get it.",
        "FILE",
    ),
]
OptimStyleName = Annotated[
    OptimStyle | None,
    option("--optim-style", WRITTEN, "Key the optimizer's state by number or by name; by default as in SRC."),
]
OfRanks = Annotated[
    RankState | None,
    option("--rank-state", WRITTEN, "When the number of ranks changes: keep or drop what each rank has for itself "
           "(random states, positions in the data)."),
]  # fmt: skip
Sidecar = Annotated[
    bool | None,
    option(
        "--sidecar/--no-sidecar", WRITTEN, "dcp: also write the metadata as Arrow columns, which ckpt opens at once; "
        "by default from 10,000 chunks on.",
    ),
]  # fmt: skip
Digest = Annotated[
    bool,
    option("--digest/--no-digest", WRITTEN, "Record a digest of each tensor in DST.digests.json."),
]
DigestFile = Annotated[str | None, option("--write-manifest", WRITTEN, "Record the digests in FILE instead.", "FILE")]

ConfigFile = Annotated[
    str | None, option("--config", MEGATRON, "The model's config.json, where SRC has none beside it.", "FILE")
]
Arguments = Annotated[
    list[str] | None,
    option(
        "--arg", MEGATRON, "An argument of the run that is to load the result: make_vocab_size_divisible_by=64. "
        "Repeatable.", "NAME=VALUE",
    ),
]  # fmt: skip
McoreVersion = Annotated[
    str | None,
    option(
        "--mcore-version", MEGATRON, "megatron-dist: write for this megatron-core, as in 0.12; by default for the "
        "newest (0.19).", "VERSION",
    ),
]  # fmt: skip
RandomStates = Annotated[
    Rng | None,
    option(
        "--rng", MEGATRON, "Random states: keep those of SRC, drop them, or emit those that a new run with its seed "
        "starts from; by default keep where the grid is the same.",
    ),
]  # fmt: skip

Include = Annotated[
    list[str] | None,
    option(
        "--include --tensor",
        SELECTION,
        "Only tensors that match: a glob ('*' crosses dots, {a,b} is either), re:REGEX or dtype:GLOB. Repeatable.",
        "GLOB",
    ),
]
Exclude = Annotated[
    list[str] | None,
    option("--exclude", SELECTION, "No tensors (and no objects) that match. Repeatable.", "GLOB"),
]

DEFAULT_MEMORY = "1GiB"
Memory = Annotated[str, option("--memory", WORK, "Bound for all buffers together.", "SIZE")]
Workers = Annotated[
    int | None,
    option("--workers", WORK, "Threads or processes that move bytes; by default one per core, up to 8.", "N", min=1),
]
Processes = Annotated[
    int, option("--processes", WORK, "Share the work among this many processes of this machine.", "N", min=1)
]
EngineName = Annotated[
    Engine, option("--engine", WORK, "Start the --processes here, or in a Ray cluster that shares the folders.")
]
Split = Annotated[
    str | None,
    option(
        "--split", WORK, "This is process I (from 0) of N that were started alike; by default what torchrun, srun or "
        "mpirun says. 0/1 runs alone.", "I/N",
    ),
]  # fmt: skip
Overwrite = Annotated[bool, option("--overwrite", WORK, "Replace what is there.")]
Resume = Annotated[bool, option("--resume", WORK, "Go on with an unfinished DST of the same command.")]
NoFsync = Annotated[bool, option("--no-fsync", WORK, "Do not wait until the disk has it: faster, not crash-safe.")]
DryRun = Annotated[bool, option("--dry-run", WORK, "Show the plan, write nothing.")]
PlanJson = Annotated[str | None, option("--plan-json", WORK, "Save the plan as JSON; - for stdout.", "FILE")]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document (errors too, on stderr).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print bare values only, and errors.")]
