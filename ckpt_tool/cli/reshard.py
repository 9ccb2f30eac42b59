"""``ckpt reshard``: the same tensors, cut for another mesh."""

from __future__ import annotations

from typing import Annotated, Any

from ckpt_tool.cli.name_options import Facts, Family, NamesOf, NamingFile, TrueVocab
from ckpt_tool.cli.options import (
    DEFAULT_MEMORY,
    NAMES,
    Arguments,
    ConfigFile,
    DataMode,
    Digest,
    DigestFile,
    Dp,
    DpMode,
    DryRun,
    Dtype,
    Engine,
    EngineName,
    Ep,
    Etp,
    Exclude,
    FirstStageLayers,
    FlatTable,
    Include,
    Json,
    LastStageLayers,
    McoreVersion,
    Memory,
    MeshText,
    NoFsync,
    OfRanks,
    OptimStyleName,
    Overwrite,
    PlanJson,
    Pp,
    Processes,
    Quiet,
    RandomStates,
    Replicas,
    Resume,
    RulesFile,
    Sidecar,
    Source,
    Split,
    StoredReplicas,
    Target,
    ToFormat,
    Tp,
    UncoveredAs,
    UnequalAs,
    Vpp,
    Workers,
    ZeroStage,
    option,
)
from ckpt_tool.cli.output import output
from ckpt_tool.errors import UsageError
from ckpt_tool.sizes import parse_bytes

EXAMPLES = (
    "ckpt reshard run/step-500 tp4-pp2-dp2 --tp 4 --pp 2 --dp 2",
    "ckpt reshard run/step-500 tp4 --tp 4 --dry-run",
    "ckpt reshard hf-model mcore --to megatron-dist --tp 4",
)


def reshard(
    source: Source,
    target: Target,
    *,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    vpp: Vpp = 1,
    first_stage_layers: FirstStageLayers = None,
    last_stage_layers: LastStageLayers = None,
    mesh: MeshText = None,
    to: ToFormat = "dcp",
    zero_stage: ZeroStage = None,
    dp_mode: DataMode = DpMode.shard,
    rules: RulesFile = None,
    default: UncoveredAs = None,
    replicas: StoredReplicas = Replicas.auto,
    rank_state: OfRanks = None,
    unequal: UnequalAs = None,
    flat: FlatTable = None,
    optim_style: OptimStyleName = None,
    names: Annotated[
        NamesOf,
        option(
            "--names",
            NAMES,
            "hf: names of a Hugging Face model, AdamW's state as torch has it; megatron-fsdp: those of Megatron's "
            "fsdp_dtensor; source: as they are.",
        ),
    ] = NamesOf.source,
    family: Family = "auto",
    naming: NamingFile = None,
    fact: Facts = None,
    true_vocab: TrueVocab = None,
    config: ConfigFile = None,
    mcore_version: McoreVersion = None,
    rng: RandomStates = None,
    arg: Arguments = None,
    dtype: Dtype = None,
    include: Include = None,
    exclude: Exclude = None,
    memory: Memory = DEFAULT_MEMORY,
    workers: Workers = None,
    processes: Processes = 1,
    engine: EngineName = Engine.local,
    split: Split = None,
    sidecar: Sidecar = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    no_fsync: NoFsync = False,
    digest: Digest = True,
    write_manifest: DigestFile = None,
    dry_run: DryRun = False,
    plan_json: PlanJson = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the same tensors cut for another mesh.

    A manifest of digests is written beside DST: it proves any other copy equal, whatever its format and layout.

    With --json: schema "ckpt-tool/conversion/1": target_url, format, n_tensors, n_files, nbytes, report, dropped,
    notes, manifest_url. With --dry-run too: schema "ckpt-tool/plan/1": the plan's bytes, requests, memory, mesh, casts,
    dropped, notes.
    """
    from ckpt_tool.api.arguments import parse_arguments, parse_facts
    from ckpt_tool.api.convert.reshard import prepare_reshard
    from ckpt_tool.cli.conversion import digest_place, run_conversion
    from ckpt_tool.cli.sharing import prepared, process_count

    sink = output(json=json, quiet=quiet)
    if rng is not None and not to.startswith("megatron"):
        raise UsageError(
            f"--rng is for targets of Megatron, and {to} is none", hint="--rank-state keep or drop says it"
        )
    if rng is not None and rank_state is not None:
        raise UsageError("--rng and --rank-state both say what becomes of random states", hint="leave one out")
    options: dict[str, Any] = {
        "source": source,
        "target": target,
        "mesh": mesh,
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "ep": ep,
        "etp": etp,
        "vpp": vpp,
        "first_stage_layers": first_stage_layers,
        "last_stage_layers": last_stage_layers,
        "to": to,
        "zero_stage": zero_stage,
        "rules": rules,
        "default": None if default is None else default.value,
        "dp_mode": dp_mode.value,
        "replicas": replicas.value,
        "dtype": dtype,
        "include": include or (),
        "exclude": exclude or (),
        "rank_state": rank_state.value if rank_state is not None else None if rng is None else rng.value,
        "mcore_version": mcore_version,
        "unequal": unequal,
        "flat": flat,
        "optim_style": None if optim_style is None else optim_style.value,
        "names": names.value,
        "family": family,
        "naming": naming,
        "facts": parse_facts(fact or ()),
        "true_vocab": true_vocab,
        "config": config,
        "arguments": parse_arguments(arg or ()),
        "memory_budget_bytes": parse_bytes(memory, of="--memory"),
        "n_workers": workers,
        "overwrite": overwrite,
        "resume": resume,
        "durable": not no_fsync,
        "digest": digest_place(digest, write_manifest),
        "sidecar": sidecar,
    }
    n_processes = process_count(processes, engine.value, dry_run=dry_run)
    with prepared(
        sink, prepare_reshard, options, split=split, n_processes=n_processes, engine=engine.value
    ) as conversion:
        run_conversion(sink, conversion, dry_run=dry_run, plan_json=plan_json)
