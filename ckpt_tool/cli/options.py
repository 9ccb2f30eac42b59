"""Options that several commands share: a flag means, and says in ``--help``, the same everywhere."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

__all__ = [
    "DEFAULT_MEMORY",
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
]


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
    str,
    typer.Argument(
        metavar="SRC", help="Checkpoint: a path, or a URL such as s3://bucket/step-500.", show_default=False
    ),
]
Target = Annotated[str, typer.Argument(metavar="DST", help="Where to write: a path or a URL.", show_default=False)]

Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        "--tensor",
        metavar="GLOB",
        help="Only tensors that fit: a glob ('*' crosses dots, {a,b} is either), re:REGEX or dtype:GLOB. Repeatable.",
        show_default=False,
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="GLOB",
        help="Leave out tensors that fit; what is written also lacks such objects. Repeatable.",
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="Cast the model's floating tensors (bf16, fp32 ...); every cast is reported.",
        show_default=False,
    ),
]

Masters = Annotated[
    bool,
    typer.Option(
        "--masters", help="The optimizer's fp32 masters in place of the weights, which are roundings of them."
    ),
]

Tp = Annotated[int, typer.Option("--tp", min=1, metavar="N", help="Tensor-parallel ranks.")]
Pp = Annotated[int, typer.Option("--pp", min=1, metavar="N", help="Pipeline stages.")]
Dp = Annotated[int, typer.Option("--dp", min=1, metavar="N", help="Data-parallel ranks.")]
Ep = Annotated[int, typer.Option("--ep", min=1, metavar="N", help="Expert-parallel ranks, a divisor of --dp.")]
Etp = Annotated[
    int | None,
    typer.Option(
        "--etp", min=1, metavar="N", help="Megatron: tensor-parallel ranks of experts, where not --tp; --ep times it "
        "divides --tp times --dp.", show_default=False,
    ),
]  # fmt: skip
Vpp = Annotated[int, typer.Option("--vpp", min=1, metavar="N", help="Model chunks (virtual stages) per stage.")]
FirstStageLayers = Annotated[
    int | None,
    typer.Option("--first-stage-layers", min=0, metavar="N", help="Layers of the first stage.", show_default=False),
]
LastStageLayers = Annotated[
    int | None,
    typer.Option("--last-stage-layers", min=0, metavar="N", help="Layers of the last stage.", show_default=False),
]
MeshText = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="AXES",
        help="Instead of --tp, --pp, --dp, --ep and --etp: axes in rank order, slowest first, as in pp=2,dp=4,tp=2.",
        show_default=False,
    ),
]
ToFormat = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="dcp, deepspeed, megatron-dist, megatron-legacy, rank-files, torch-ranks, bytecheckpoint, "
        "torch-checkpointing, torchsnapshot, vescale, orbax; for one rank deepspeed-universal, nanotron, "
        "safetensors, torch-save.",
    ),
]
ZeroStage = Annotated[
    int | None,
    typer.Option(
        "--zero-stage",
        min=1,
        max=3,
        metavar="N",
        help="deepspeed: what data-parallel ranks share out, 1 to 3; by default as in SRC.",
        show_default=False,
    ),
]
DataMode = Annotated[
    DpMode, typer.Option("--dp-mode", help="Cut tensors over data-parallel ranks (FSDP), or store one copy for all.")
]
RulesFile = Annotated[
    str | None,
    typer.Option("--rules", metavar="FILE", help="Rules (TOML) that add to the built-in families.", show_default=False),
]
UncoveredAs = Annotated[
    Default | None,
    typer.Option("--default", help="What to do with tensors that no rule covers; stops otherwise.", show_default=False),
]
StoredReplicas = Annotated[
    Replicas, typer.Option("--replicas", help="Store a replicated box once, on all its ranks, or as the format needs.")
]
UnequalAs = Annotated[
    list[str] | None,
    typer.Option(
        "--unequal",
        metavar="[GLOB=]HOW",
        help="Tensors that differ between ranks though no file says how they join: first rank's (first), or one "
        "behind another (concat:DIM). Repeatable.",
        show_default=False,
    ),
]
OptimStyleName = Annotated[
    OptimStyle | None,
    typer.Option(
        "--optim-style",
        help="Optimizer state by number, by parameter, or flat by parameter; as in the source otherwise.",
        show_default=False,
    ),
]
OfRanks = Annotated[
    RankState | None,
    typer.Option(
        "--rank-state",
        help="Random and data-loader states of single ranks, when their number changes.",
        show_default=False,
    ),
]

ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The model's config.json, for a target of Megatron, from a source that has none beside it.",
        show_default=False,
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        metavar="NAME=VALUE",
        help="An argument of the Megatron run that is to load the result: make_vocab_size_divisible_by=64. Repeatable.",
        show_default=False,
    ),
]

McoreVersion = Annotated[
    str | None,
    typer.Option(
        "--mcore-version",
        metavar="VERSION",
        help="megatron-dist: the megatron-core that is to load the result, as in 0.12; by default the newest (0.19).",
        show_default=False,
    ),
]
RandomStates = Annotated[
    Rng | None,
    typer.Option(
        "--rng",
        help="Megatron's random states: of SRC, none, or those of the start of a run, made of its seed; by default of "
        "SRC where the grid is the same.",
        show_default=False,
    ),
]

DEFAULT_MEMORY = "1GiB"
Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Bound for all buffers together.")]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", min=1, help="Threads or processes that move bytes; by default one per core, up to 8."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an unfinished DST of the same command.")]
NoFsync = Annotated[bool, typer.Option("--no-fsync", help="Do not wait until the disk has it: faster, not crash-safe.")]
Split = Annotated[
    str | None,
    typer.Option(
        "--split",
        metavar="I/N",
        help="Process I (from 0) of N started alike; as torchrun, srun and mpirun say, unless given. 0/1 is alone.",
        show_default=False,
    ),
]
Processes = Annotated[
    int, typer.Option("--processes", metavar="N", min=1, help="Processes of this machine that share the work.")
]
EngineName = Annotated[
    Engine,
    typer.Option(
        "--engine", help="Who starts the --processes: this machine, or a Ray cluster that shares the folders."
    ),
]
Sidecar = Annotated[
    bool | None,
    typer.Option(
        "--sidecar/--no-sidecar",
        help="With dcp: metadata as Arrow columns too, read at once; by default from 10,000 chunks on.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan, write nothing.")]
PlanJson = Annotated[
    str | None,
    typer.Option("--plan-json", metavar="FILE", help="Save the plan as JSON lines; - for stdout.", show_default=False),
]

Digest = Annotated[
    bool,
    typer.Option("--digest/--no-digest", help="Record what each tensor holds, on the way, in DST.digests.json."),
]
DigestFile = Annotated[
    str | None,
    typer.Option("--write-manifest", metavar="FILE", help="Record that in FILE instead.", show_default=False),
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document (errors too, on stderr).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print bare values only, and errors.")]
