"""``ckpt plan``: what a reshard would read and write, without a target; its options are those of reshard."""

from __future__ import annotations

from inspect import signature
from typing import Any

from ckpt_tool.cli.reshard import reshard

EXAMPLES = (
    "ckpt plan run/step-500 --tp 4 --pp 2",
    "ckpt plan run/step-500 --tp 4 --plan-json plan.jsonl",
)

_NOWHERE = "memory://plan"
_OF_WRITING = frozenset(
    {
        "target", "processes", "engine", "split", "sidecar", "overwrite", "resume", "no_fsync", "digest",
        "write_manifest", "dry_run",
    }
)  # fmt: skip


def plan(**options: Any) -> None:
    """Show what a reshard would read and write.

    Takes the options of ckpt reshard that say what the target is to be; no target is named, and nothing is written.

    With --json: schema "ckpt-tool/plan/1": source, source_format, target_format, mesh, fingerprint, read_nbytes,
    n_reads, written_nbytes, n_writes, peak_memory_bytes, casts, dropped, notes. Every byte range is in the file of
    --plan-json: schema "ckpt-tool/tiles/1": fingerprint, source, target, stats, casts, tiles [{fqn, offsets, sizes,
    unit, reads, writes}].
    """
    reshard(target=_NOWHERE, dry_run=True, **options)


_reshard = signature(reshard, eval_str=True)
_parameters = [parameter for name, parameter in _reshard.parameters.items() if name not in _OF_WRITING]
plan.__signature__ = _reshard.replace(parameters=_parameters)  # type: ignore[attr-defined]
plan.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters}
