"""Tensors that several ranks saved and nothing places are replicas by assumption: whoever reads them holds them to it.

Where the ranks' values differ, there is no such tensor, only what each rank has of it. A comparison or a digest of the
first rank's would say nothing of the others, and a load would fill every rank with it.
"""

from __future__ import annotations

from collections.abc import Collection

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.errors import IntegrityError
from ckpt_tool.manifest.concatenate import split_ranks
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.sizes import counted, shell_word, some_of

__all__ = ["ASSUMED", "KEPT_APART", "check_replicas", "unequal_tensors", "with_ranks_apart"]

ASSUMED = ("replicated_by_assumption", "copies_of_ranks")
"""Lists of tensors that count as replicas though no writer compared them; the second has those of DCP without
collectives, and the norms and biases of Megatron's and DeepSpeed's tensor-parallel ranks."""
KEPT_APART = "kept_apart"
"""The list of tensors of which each rank's has a name of its own, for their shapes or types differ."""


def unequal_tensors(checkpoint: Checkpoint, fqns: Collection[str], apart: Collection[str] = ()) -> dict[str, Finding]:
    """Tensors of ``fqns`` that are assumed to be replicas and are none, and those ``apart`` that should not be so.

    Costs the checksums that the files record, or the bytes where they record none; nothing where nothing is assumed.
    """
    manifest = checkpoint.manifest
    wanted = fqns if isinstance(fqns, (set, frozenset, dict)) else frozenset(fqns)
    assumed = {key: [fqn for fqn in manifest.info.get(key, ()) if fqn in wanted] for key in ASSUMED}
    if not any(assumed.values()) and not apart:
        return {}
    names = {*apart, *(fqn for listed in assumed.values() for fqn in listed)}
    rows = [row for row, fqn in enumerate(manifest.tensors.fqns) if fqn in names or fqn.partition("@rank")[0] in names]
    only = only_tensors(manifest, rows).replace(info={**assumed, KEPT_APART: list(apart)})
    return {
        str(finding.fqn): finding
        for finding in checkpoint.reader.check(checkpoint.source, only)
        if finding.kind in ("different-replicas", "different-shapes") and finding.severity is Severity.ERROR
    }


def check_replicas(checkpoint: Checkpoint, fqns: Collection[str]) -> None:
    """See that what is assumed to be replicas is.

    Raises:
        IntegrityError: ranks saved different values of one of ``fqns``, and nothing says how they join.
    """
    unequal = unequal_tensors(checkpoint, fqns)
    if unequal:
        first = next(iter(unequal.values()))
        raise IntegrityError(
            f"{counted(len(unequal), 'tensor', 'differ')} between ranks and nothing says how they join "
            f"({some_of(list(unequal))}); {first.message}",
            where=checkpoint.url,
            hint=f"put them together first, ckpt reshard {shell_word(checkpoint.url)} DST --unequal HOW; or take the "
            "first rank's, unequal='first'",
        )


def with_ranks_apart(checkpoint: Checkpoint, fqns: Collection[str] | None = None) -> Checkpoint:
    """The checkpoint with ``name@rank<r>`` for each rank's, in place of tensors of which ranks hold different values.

    Costs what `unequal_tensors` does. It need not be closed, and is itself where there are no such tensors among
    ``fqns`` (None: all).
    """
    manifest = checkpoint.manifest
    found = unequal_tensors(checkpoint, manifest.tensors.index if fqns is None else fqns)
    unequal = [fqn for fqn in found if _is_whole_everywhere(manifest, fqn)]
    if not unequal:
        return checkpoint
    split = split_ranks(checkpoint.manifest, unequal)
    info = {
        key: [fqn for fqn in value if fqn not in unequal] if key in ASSUMED else value
        for key, value in split.info.items()
    }
    return checkpoint.shown_as(split.replace(info=info))


def _is_whole_everywhere(manifest: Manifest, fqn: str) -> bool:
    """Whether each rank that has a chunk of a tensor has all of it in that one."""
    row = manifest.tensor_id(fqn)
    sizes = manifest.chunks.sizes[manifest.chunks.rows_of(row)]
    return bool(len(sizes)) and bool((sizes == manifest.tensors.shape[row, : sizes.shape[1]]).all())
