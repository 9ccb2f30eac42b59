"""Reshard: the same tensors, cut for another mesh, in any format that can be written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ckpt_tool.api.arguments import check_arguments, check_files
from ckpt_tool.api.checkpoint import Checkpoint, open_checkpoint
from ckpt_tool.api.convert.casts import cast_model, cast_notes, wanted_dtype
from ckpt_tool.api.convert.conversion import (
    Conversion,
    ConversionResult,
    build_conversion,
    whole_boxes,
)
from ckpt_tool.api.convert.mesh import data_size, mesh_of
from ckpt_tool.api.convert.names_options import NamesOptions, check_asked, names_options
from ckpt_tool.api.convert.rank_state import Carried, by_name, carry_rank_state, without
from ckpt_tool.api.convert.running import Running, execution_of
from ckpt_tool.api.convert.selection import no_tensors, select_tensors, unflattened
from ckpt_tool.api.convert.stored_boxes import Storing, boxes_by_rules
from ckpt_tool.api.convert.taken import Taken
from ckpt_tool.api.convert.target_options import check_target_options
from ckpt_tool.api.convert.values import as_values
from ckpt_tool.engine.base import Progress
from ckpt_tool.formats.base import (
    ArrangingWriter,
    CuttingWriter,
    PlacingWriter,
    StyledWriter,
    Writer,
    WriterOptions,
)
from ckpt_tool.formats.registry import writer as writer_named
from ckpt_tool.layout.mesh import Mesh
from ckpt_tool.layout.stages import StageOptions
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.storage.apart import check_apart

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["prepare_reshard", "reshard"]

_WEIGHTS_ALONE = frozenset({"consolidated", "nanotron"})


def prepare_reshard(  # noqa: PLR0913 - one argument per option of the command
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    mesh: str | None = None,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vpp: int = 1,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    to: str = "dcp",
    rules: str | os.PathLike[str] | None = None,
    default: Literal["shard0", "replicate"] | None = None,
    dp_mode: Literal["shard", "replicate"] = "shard",
    replicas: Literal["auto", "once", "all"] = "auto",
    dtype: str | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rank_state: Literal["keep", "drop", "emit"] | None = None,
    unequal: str | Sequence[str] | None = None,
    flat: str | os.PathLike[str] | None = None,
    optim_style: Literal["ids", "fqn", "fqn-flat"] | None = None,
    names: Literal["source", "hf", "megatron-fsdp"] = "source",
    family: str = "auto",
    naming: str | os.PathLike[str] | None = None,
    facts: Mapping[str, int] | None = None,
    true_vocab: int | None = None,
    config: str | os.PathLike[str] | None = None,
    arguments: Mapping[str, Any] | None = None,
    mcore_version: str | None = None,
    zero_stage: int | None = None,
    sidecar: bool | None = None,
    **running: Unpack[Running],
) -> Conversion:
    """Plan a reshard; nothing is written yet.

    Args:
        source: checkpoint of any readable format.
        target: folder to write.
        mesh: axes and sizes in rank order, slowest first (``pp=2,dp=4,tp=2``); instead of the four sizes.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        dp: data-parallel ranks.
        ep: expert-parallel ranks, a divisor of ``dp``; with ``etp``, ``ep`` times it is one of ``tp`` times ``dp``.
        etp: tensor-parallel ranks of experts, for a target of Megatron; None for as many as of the rest.
        vpp: model chunks per pipeline stage (virtual stages).
        first_stage_layers: layers of the first stage, None for an even spread.
        last_stage_layers: layers of the last stage, None for an even spread.
        to: name of the target format.
        rules: rules file that adds to or overrides the built-in families.
        default: what to do with tensors that no rule covers, None to stop with their list.
        dp_mode: ``shard`` cuts over data-parallel ranks (FSDP), ``replicate`` stores one copy.
        replicas: ``once`` stores each box once, spread by bytes over the ranks that hold it; ``all`` on each of them;
            ``auto`` is ``once`` where a format has global metadata, and else once per data-parallel group.
        dtype: cast the model's floating tensors; each cast is reported.
        include: globs or ``re:`` patterns of tensors to take.
        exclude: globs or ``re:`` patterns of tensors and objects to leave.
        rank_state: what to do with data-loader and random states of single ranks when the number of ranks changes;
            ``emit``, for a target of Megatron: random states as at the start of a run.
        unequal: rules for tensors that differ between ranks though no file says how they join (``first``, ``concat:0``,
            ``rules`` of the model's family, ``rules:FILE``, ``GLOB=concat:0``); None to stop.
        flat: path of a table of what FSDP1's flat parameters hold, see ``convert.flat``.
        optim_style: how optimizers name their state: by number (``ids``), by parameter (``fqn``), or by parameter in
            one flat table with every hyperparameter (``fqn-flat``); None as in the source.
        names: ``hf`` gives weights the names of a Hugging Face model, and AdamW's state those that torch has for them;
            ``megatron-fsdp`` gives a checkpoint of Megatron those of Megatron-FSDP (``fsdp_dtensor``); ``source`` keeps
            names.
        family: whose names, as for an export.
        naming: rules for names, as for an export.
        facts: numbers for such rules, as for an export.
        true_vocab: rows of the vocabulary that are no padding.
        config: a model's ``config.json``, for a target of Megatron and a source that has none beside it.
        arguments: arguments of the Megatron run that is to load the target, over those of the source.
        mcore_version: the version of megatron-core that is to load the target; None for the newest known.
        zero_stage: ``deepspeed``: what data-parallel ranks share out, 1 to 3; None as in the source.
        sidecar: to dcp, the metadata once more as Arrow columns; None where there are many chunks.
        **running: memory, threads, overwriting and the like, see ``Running``.

    Raises:
        LayoutError: names that no rule covers, or a mesh that does not fit.
        CkptError: see ``errors``.
    """
    execution = execution_of(target, running, "prepare_reshard")
    check_arguments(
        default=(default, (None, "shard0", "replicate")),
        dp_mode=(dp_mode, ("shard", "replicate")),
        replicas=(replicas, ("auto", "once", "all")),
        rank_state=(rank_state, (None, "keep", "drop", "emit")),
        names=(names, ("source", "hf", "megatron-fsdp")),
        tp=(tp, 1), pp=(pp, 1), dp=(dp, 1), ep=(ep, 1), etp=(etp, 1), vpp=(vpp, 1), true_vocab=(true_vocab, 1),
        first_stage_layers=(first_stage_layers, 0), last_stage_layers=(last_stage_layers, 0),
    )  # fmt: skip
    writer = writer_named(to)
    target_mesh, expert_grid = mesh_of(mesh, writer.name, tp=tp, pp=pp, dp=dp, ep=ep, etp=etp)
    check_target_options(
        to, writer, target_mesh, names=names, rank_state=rank_state,
        given={
            "zero_stage": zero_stage, "config": config, "arguments": arguments, "mcore_version": mcore_version,
            "sidecar": sidecar, "vpp": vpp if vpp > 1 else None, "first_stage_layers": first_stage_layers,
            "last_stage_layers": last_stage_layers,
        },
    )  # fmt: skip
    wanted_names = names_options(family, naming, facts, true_vocab)
    check_asked(wanted_names, is_asked=names == "hf")
    check_files(rules=rules, config=config, flat=flat)
    check_apart(source, target)
    checkpoint = open_checkpoint(source, memory_budget_bytes=execution.memory_budget_bytes)
    with ExitStack() as opened:
        opened.push(checkpoint)
        checkpoint = unflattened(checkpoint, flat)
        sections = ("model",) if to in _WEIGHTS_ALONE else None
        selection = select_tensors(checkpoint, include=include, exclude=exclude, sections=sections, unequal=unequal)
        manifest, blobs = selection.manifest, selection.load_objects(checkpoint)
        dropped, notes = selection.dropped, [*selection.notes]
        if to in _WEIGHTS_ALONE:
            dropped, blobs = (*dropped, *no_tensors(blobs, manifest)), ()
        options = WriterOptions(
            vpp=vpp,
            first_stage_layers=first_stage_layers,
            last_stage_layers=last_stage_layers,
            zero_stage=zero_stage,
            expert_grid=expert_grid,
            mcore_version=mcore_version,
            fresh_random_states=rank_state == "emit",
            model_dtype=wanted_dtype(dtype),
            sidecar=sidecar,
        )
        taken = _taken(
            checkpoint,
            Taken(manifest, blobs),
            writer,
            target_mesh,
            options,
            (arguments or {}, None if config is None else os.fspath(config)),
            wanted_names if names == "hf" else names,
            is_whole=not include and not exclude,
        )
        manifest, blobs = taken.manifest, taken.blobs
        dropped, notes = (*dropped, *taken.dropped), [*notes, *taken.notes]
        carried = _carried(writer, manifest, blobs, target_mesh, options, rank_state)
        if optim_style is not None:
            carried, restyled = _restyled(writer, carried, optim_style)
            notes += restyled
        manifest = carried.manifest
        tensors = _cast(manifest, options, taken)
        notes += cast_notes(manifest, options.model_dtype)
        if isinstance(writer, PlacingWriter):
            boxes = writer.place(tensors, carried.blobs, _sizes(target_mesh), manifest.info, options)
        elif target_mesh.world_size == 1:
            boxes = whole_boxes(tensors)
        else:
            boxes, placed_notes = boxes_by_rules(
                manifest,
                tensors,
                target_mesh,
                StageOptions(vpp, first_stage_layers, last_stage_layers),
                rules=rules,
                default=default,
                dp_mode=dp_mode,
                storing=Storing(
                    replicas if replicas != "auto" else ("groups" if writer.per_rank else "once"),
                    writer.may_cut(tensors) if isinstance(writer, CuttingWriter) else None,
                ),
            )
            notes += placed_notes
        conversion = build_conversion(
            checkpoint,
            manifest,
            target,
            writer=writer,
            tensors=tensors,
            boxes=boxes,
            mesh=target_mesh,
            blobs=carried.blobs if writer.per_rank or isinstance(writer, PlacingWriter) else by_name(carried.blobs),
            dropped=(*dropped, *carried.dropped),
            notes=notes,
            options=options,
            execution=execution,
        )
        opened.pop_all()  # it stays open for the run
        return conversion


def reshard(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | None = None,
    n_processes: int = 1,
    **options: Any,
) -> ConversionResult:
    """Write the same tensors cut for another mesh; ``ckpt_tool.plan_reshard`` alone shows it before.

    Args:
        source: checkpoint of any readable format, a path or URL.
        target: folder to write, a path or URL.
        progress: called now and then with the payload bytes that are written, and all there are.
        n_processes: of this machine, which share the work, threads and memory. Their start imports the caller's main
            module, which must not run again when imported.
        **options: all others of ``ckpt_tool.plan_reshard``, by the same names.

    Returns:
        What was written, dropped and noted; ``nbytes`` counts the target's files, headers included.

    Raises:
        LayoutError: names that no rule covers, or a mesh that does not fit.
        CkptError: see ``ckpt_tool.plan_reshard``.
        TargetExists: something is at the target, and neither ``overwrite`` nor ``resume`` was given.
        StorageError: no space, or the storage failed; ``resume=True`` goes on.
    """
    if n_processes > 1:
        from ckpt_tool.api.convert.processes import processes  # 5 ms of start-up that few runs need
        from ckpt_tool.api.convert.share import shared_options

        shared = shared_options({"source": source, "target": target, **options}, n_processes)
        with processes(prepare_reshard, shared, n_processes) as share:
            return _run(prepare_reshard(**shared, share=share), progress)
    return _run(prepare_reshard(source, target, **options), progress)


def _run(conversion: Conversion, progress: Callable[[Progress], None] | None) -> ConversionResult:
    with conversion.checkpoint:
        return conversion.run(progress)


def _taken(
    checkpoint: Checkpoint,
    selected: Taken,
    writer: Writer,
    mesh: Mesh,
    options: WriterOptions,
    of_megatron: tuple[Mapping[str, Any], str | None],
    names: NamesOptions | str,
    *,
    is_whole: bool,
) -> Taken:
    """The source under the names that the target's program has; what few runs need is imported here, 5 ms each."""
    manifest, blobs = selected.manifest, selected.blobs
    if isinstance(writer, PlacingWriter) and not isinstance(writer, ArrangingWriter):
        from ckpt_tool.api.convert.megatron_source import MegatronOptions, as_megatron

        said, tp = MegatronOptions(*of_megatron), _sizes(mesh).get("tp", 1)
        return as_megatron(checkpoint, manifest, blobs, said, tp=tp, is_live=writer.per_rank)
    if names == "source":
        taken = selected
    elif isinstance(names, str):
        from ckpt_tool.api.convert.megatron_fsdp import as_fsdp_dtensor

        taken = as_fsdp_dtensor(checkpoint, manifest, blobs, is_whole=is_whole)
    else:
        from ckpt_tool.api.convert.torch_training import as_torch_training

        taken = as_torch_training(checkpoint, manifest, blobs, names, is_whole=is_whole)
    if isinstance(writer, ArrangingWriter):
        manifest, blobs = taken.manifest, taken.blobs
        manifest, blobs = as_values(checkpoint, manifest, blobs, writer.values(manifest, blobs))
        manifest = writer.arranged(manifest, blobs, _sizes(mesh), options)
        taken = replace(taken, manifest=manifest, blobs=blobs)
    return taken


def _carried(
    writer: Writer,
    manifest: Manifest,
    blobs: tuple[Blob, ...],
    mesh: Mesh,
    options: WriterOptions,
    rank_state: Literal["keep", "drop", "emit"] | None,
) -> Carried:
    """What goes into the target: by the writer's own word, or by the policy for states of ranks."""
    if isinstance(writer, PlacingWriter):
        experts = {} if options.expert_grid is None else dict(zip(("ep", "etp"), options.expert_grid, strict=True))
        return without(manifest, blobs, writer.left_out(manifest, blobs, {**_sizes(mesh), **experts}, rank_state))
    policy = None if rank_state == "emit" else rank_state
    return carry_rank_state(manifest, blobs, dp_size=data_size(mesh), world_size=mesh.world_size, policy=policy)


def _restyled(
    writer: Writer, carried: Carried, style: Literal["ids", "fqn", "fqn-flat"]
) -> tuple[Carried, tuple[str, ...]]:
    """What is carried, its optimizers spelled in another way, and notes about it."""
    from ckpt_tool.manifest.optimizer_style import restyle_optimizers  # 5 ms of start-up that few runs need

    found = restyle_optimizers(carried.manifest, carried.blobs, style)
    manifest, blobs = found.manifest, found.blobs
    if isinstance(writer, StyledWriter):
        manifest, blobs = writer.restyled(manifest, blobs, style)
    return replace(carried, manifest=manifest, blobs=blobs), found.notes


def _cast(manifest: Manifest, options: WriterOptions, taken: Taken) -> TensorTable:
    """The tensors with the types that they have in the target."""
    tensors = cast_model(manifest.tensors, options.model_dtype, buffers=manifest.info.get("buffers", ()))
    if not taken.dtypes:
        return tensors
    kinds = zip(tensors.fqns, tensors.dtypes, strict=True)
    return replace(tensors, dtypes=tuple(taken.dtypes.get(fqn, kind) for fqn, kind in kinds))


def _sizes(mesh: Mesh) -> dict[str, int]:
    return dict(zip(mesh.axes, mesh.sizes, strict=True))
