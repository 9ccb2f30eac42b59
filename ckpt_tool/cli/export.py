"""``ckpt export``: whole tensors in a format that other programs load."""

from __future__ import annotations

from typing import Annotated, Any

from ckpt_tool.cli.name_options import Facts, Family, NamesAs, NamingFile, TrueVocab
from ckpt_tool.cli.options import (
    DEFAULT_MEMORY,
    NAMES,
    WRITTEN,
    Digest,
    DigestFile,
    DryRun,
    Dtype,
    Engine,
    EngineName,
    Exclude,
    FlatTable,
    Include,
    Json,
    Masters,
    Memory,
    NoFsync,
    Overwrite,
    PlanJson,
    Processes,
    Quiet,
    Resume,
    Source,
    Split,
    Target,
    Tied,
    UnequalAs,
    Workers,
    option,
)
from ckpt_tool.cli.output import output
from ckpt_tool.sizes import parse_bytes

EXAMPLES = (
    "ckpt export run/step-500 weights --dtype bf16 --max-shard-size 5GB",
    "ckpt export run/step-500 weights.safetensors",
)


def export(
    source: Source,
    target: Target,
    *,
    to: Annotated[
        str | None,
        option(
            "--to",
            WRITTEN,
            "safetensors, torch, npz, dcp, orbax, gguf, lightning, consolidated (Meta's names) or vescale; by default "
            "what DST's name says (.npz, .pt, .gguf), else safetensors.",
            "FORMAT",
        ),
    ] = None,
    everything: Annotated[
        bool, option("--all", WRITTEN, "All state, not only the model's tensors; objects if FORMAT can hold them.")
    ] = False,
    names: Annotated[
        NamesAs,
        option("--names", NAMES, "Names as the published model has them (hf), or as the checkpoint has them (source)."),
    ] = NamesAs.hf,
    family: Family = "auto",
    naming: NamingFile = None,
    fact: Facts = None,
    true_vocab: TrueVocab = None,
    include: Include = None,
    exclude: Exclude = None,
    dtype: Dtype = None,
    masters: Masters = False,
    tied: Annotated[
        Tied,
        option(
            "--tied", WRITTEN, "Tensors that share bytes: keep each, drop all but the first, or do as the config says."
        ),
    ] = Tied.auto,
    unequal: UnequalAs = None,
    flat: FlatTable = None,
    max_shard_size: Annotated[
        str | None, option("--max-shard-size", WRITTEN, "Start a new file before this many bytes (5GB).", "SIZE")
    ] = None,
    share_blocks: Annotated[
        bool,
        option(
            "--share-blocks",
            WRITTEN,
            "safetensors: pad headers so that on XFS and Btrfs the files can share blocks with those of SRC.",
        ),
    ] = False,
    memory: Memory = DEFAULT_MEMORY,
    workers: Workers = None,
    processes: Processes = 1,
    engine: EngineName = Engine.local,
    split: Split = None,
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
    """Write whole tensors in a format that other programs load.

    Everything that is dropped or changed is listed; what would be lost silently is refused.

    A manifest of digests is written beside DST: it proves any other copy equal, whatever its format and layout.

    With --json: schema "ckpt-tool/conversion/1": target_url, format, n_tensors, n_files, nbytes, report, dropped,
    notes, manifest_url. With --dry-run too: schema "ckpt-tool/plan/1": the plan's bytes, requests, memory, casts,
    dropped, notes.
    """
    from ckpt_tool.api.arguments import parse_facts
    from ckpt_tool.api.convert.export import prepare_export
    from ckpt_tool.cli.conversion import digest_place, run_conversion
    from ckpt_tool.cli.sharing import prepared, process_count

    sink = output(json=json, quiet=quiet)
    options: dict[str, Any] = {
        "source": source,
        "target": target,
        "to": to,
        "everything": everything,
        "names": names.value,
        "family": family,
        "naming": naming,
        "facts": parse_facts(fact or ()),
        "true_vocab": true_vocab,
        "include": include or (),
        "exclude": exclude or (),
        "dtype": dtype,
        "masters": masters,
        "tied": tied.value,
        "unequal": unequal,
        "flat": flat,
        "max_shard_nbytes": None if max_shard_size is None else parse_bytes(max_shard_size, of="--max-shard-size"),
        "share_blocks": share_blocks,
        "memory_budget_bytes": parse_bytes(memory, of="--memory"),
        "n_workers": workers,
        "overwrite": overwrite,
        "resume": resume,
        "durable": not no_fsync,
        "digest": digest_place(digest, write_manifest),
    }
    n_processes = process_count(processes, engine.value, dry_run=dry_run)
    with prepared(
        sink, prepare_export, options, split=split, n_processes=n_processes, engine=engine.value
    ) as conversion:
        run_conversion(sink, conversion, dry_run=dry_run, plan_json=plan_json)
