"""``ckpt plan``: what a reshard would read and write, without a target."""

from __future__ import annotations

from ckpt_tool.cli.options import (
    DEFAULT_MEMORY,
    DataMode,
    Dp,
    DpMode,
    Dtype,
    Ep,
    Exclude,
    FirstStageLayers,
    Include,
    Json,
    LastStageLayers,
    Memory,
    MeshText,
    OfRanks,
    OptimStyleName,
    PlanJson,
    Pp,
    Quiet,
    Replicas,
    RulesFile,
    Source,
    StoredReplicas,
    ToFormat,
    Tp,
    UncoveredAs,
    UnequalAs,
    Vpp,
    Workers,
    ZeroStage,
)
from ckpt_tool.cli.output import output
from ckpt_tool.sizes import parse_bytes

_NOWHERE = "memory://plan"


def plan(
    source: Source,
    *,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    ep: Ep = 1,
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
    optim_style: OptimStyleName = None,
    dtype: Dtype = None,
    include: Include = None,
    exclude: Exclude = None,
    memory: Memory = DEFAULT_MEMORY,
    workers: Workers = None,
    plan_json: PlanJson = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what a reshard would read and write.

    With --json: {"schema": 1, source_format, target_format, mesh, fingerprint, bytes, requests, peak_memory_bytes,
    casts, dropped, notes}. Every byte range is in the file of --plan-json.
    """
    from ckpt_tool.api.convert.reshard import prepare_reshard
    from ckpt_tool.cli.conversion import save_plan, show_plan

    sink = output(json=json, quiet=quiet)
    conversion = prepare_reshard(
        source,
        _NOWHERE,
        mesh=mesh,
        tp=tp,
        pp=pp,
        dp=dp,
        ep=ep,
        vpp=vpp,
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
        to=to,
        zero_stage=zero_stage,
        rules=rules,
        default=None if default is None else default.value,
        dp_mode=dp_mode.value,
        replicas=replicas.value,
        dtype=dtype,
        include=include or (),
        exclude=exclude or (),
        rank_state=None if rank_state is None else rank_state.value,
        unequal=unequal,
        optim_style=None if optim_style is None else optim_style.value,
        memory_budget_bytes=parse_bytes(memory),
        n_workers=workers,
    )
    with conversion.checkpoint:
        if plan_json is not None:
            save_plan(sink, conversion, plan_json)
        show_plan(sink, conversion)
        sink.values([] if plan_json == "-" else [conversion.plan.fingerprint])
