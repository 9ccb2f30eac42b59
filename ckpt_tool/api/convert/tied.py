"""Tied tensors: one parameter under two names, stored as the same bytes or as equal copies."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.convert.conversion import Dropped
from ckpt_tool.api.convert.rank_state import without
from ckpt_tool.checks.sharing import partial_views
from ckpt_tool.geometry.columns import BoolArray, distinct
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable, IntArray
from ckpt_tool.manifest.vocabulary import embedding_and_head, stated_tied
from ckpt_tool.sizes import counted

__all__ = ["groups_of_shared_bytes", "without_tied"]

_GROUPS_SHOWN = 3
_NAMES_SHOWN = 3

_NOTHING = (
    "nothing is tied: no two tensors are the same bytes of a file, and no embedding and head hold equal copies; "
    "--exclude NAME leaves out another copy"
)


def without_tied(
    checkpoint: Checkpoint, manifest: Manifest, tied: str
) -> tuple[Manifest, tuple[Dropped, ...], tuple[str, ...]]:
    """The manifest without tensors that repeat an earlier one, as far as ``tied`` says so; and what to say about it.

    ``keep`` leaves all, ``drop`` takes repeats away, ``auto`` does so when the config says ``tie_word_embeddings``.
    Tensors that are the same bytes of the same files are tied whatever their names. Equal copies are tied only where
    both are a vocabulary, by the family's rules or by the names of an embedding and its head: a layer made of copies of
    another, as in an upcycled mixture of experts, is not. Copies are compared by digests, which reads them once.
    Of an embedding and its head the embedding stays, whichever was saved first: a head alone fills no model.
    """
    shared = groups_of_shared_bytes(manifest)
    if shared:
        embedding, _ = embedding_and_head(manifest.tensors.fqns)
        shared = [_led_by(embedding, group) for group in shared]
    says_tied, _ = stated_tied(manifest.info.get("config") or {})
    if tied == "keep" or (tied == "auto" and not says_tied):
        named = "; ".join(_equation(group) for group in shared[:_GROUPS_SHOWN])
        n_more = len(shared) - _GROUPS_SHOWN
        named += f" and {counted(n_more, 'more group')}" if n_more > 0 else ""
        groups = "1 group" if len(shared) == 1 else f"{counted(len(shared), 'group')}"
        said = f"{groups} of tensors share their bytes and are each written: {named}"
        return manifest, (), (*((said,) if shared else ()), *_views_note(manifest, shared))
    why = {fqn: f"shares its bytes with {group[0]}" for group in shared for fqn in group[1:]}
    copies, said_of_copies = _equal_vocabularies(
        checkpoint, manifest, [fqn for fqn in manifest.tensors.fqns if fqn not in why]
    )
    why |= copies
    if not why and not said_of_copies and tied == "drop":
        said_of_copies = (_NOTHING,)
    if why:
        left = without(manifest, (), why)
        return left.manifest, left.dropped, (*said_of_copies, *_views_note(left.manifest, ()))
    return manifest, (), (*said_of_copies, *_views_note(manifest, ()))


def _views_note(manifest: Manifest, tied: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """That tensors of one storage become tensors of their own, but for those of a group of ``tied``, told already."""
    group = {fqn: number for number, fqns in enumerate(tied) for fqn in fqns}
    found = [(fqn, of) for fqn, of in partial_views(manifest) if fqn not in group or group[fqn] != group.get(of)]
    if not found:
        return ()
    named = ", ".join(f"{fqn} (of {of})" for fqn, of in found[:3]) + (" ..." if len(found) > 3 else "")
    said = f"{counted(len(found), 'tensor', 'have')} bytes in common with others, as views of one storage"
    return (f"{said}, and are each written with all of theirs: {named}",)


def _equation(names: Sequence[str]) -> str:
    n_more = len(names) - _NAMES_SHOWN
    return " = ".join(names[:_NAMES_SHOWN]) + (f" = {n_more:,} more" if n_more > 0 else "")


def _equal_vocabularies(
    checkpoint: Checkpoint, manifest: Manifest, fqns: Sequence[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Why a vocabulary of ``fqns`` repeats another, by fqn; and a note about those that could but do not."""
    from ckpt_tool.api.rules import rules_for  # for models that say they are tied, or may be dropped as such
    from ckpt_tool.layout.resolve import rows_of_kind

    rules, _ = rules_for(fqns, None, is_optional=True)
    known = {fqns[row] for row in rows_of_kind(fqns, rules, "vocab")}
    known.update(fqn for fqn in embedding_and_head(fqns) if fqn is not None)
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for fqn in fqns:
        if fqn not in known:
            continue
        meta = manifest.tensor(fqn)
        alike[meta.dtype.name, meta.shape].append(meta.fqn)
    embedding, _ = embedding_and_head(fqns)
    candidates = [_led_by(embedding, group) for group in alike.values() if len(group) > 1]
    if not candidates:
        return {}, ()
    from ckpt_tool.api.digest import digests  # 5 ms of start-up that few exports need

    names = [f"re:^{re.escape(fqn)}$" for group in candidates for fqn in group]
    content = {row.fqn: row.digest for row in digests(checkpoint, include=names, wide=True).rows}
    why, differ = dict[str, str](), []
    for group in candidates:
        for number, fqn in enumerate(group[1:], start=1):
            same = next((first for first in group[:number] if content[first] == content[fqn]), None)
            if same is None:
                differ.append(f"{group[0]} and {fqn}")
            else:
                why[fqn] = f"equal to {same}"
    return why, ((f"not tied, their values differ: {'; '.join(differ)}",) if differ else ())


def _led_by(first: str | None, group: Sequence[str]) -> tuple[str, ...]:
    """``group`` with ``first`` in front, where it has it."""
    return tuple(sorted(group, key=lambda fqn: fqn != first))


def groups_of_shared_bytes(manifest: Manifest) -> list[tuple[str, ...]]:
    """Groups of tensors that are the same bytes of the same files, read the same way, in table order.

    Only what the files themselves share counts; equal copies do not, nor views of other strides, types or signs.
    """
    chunks = manifest.chunks
    order, starts = chunks.by_tensor
    live = chunks.length > 0
    strides = contiguous_strides_columns(chunks.sizes) if chunks.strides is None else chunks.strides
    strides = np.where(chunks.sizes > 1, strides, 0)
    flags = chunks.flags & ~np.uint8(ChunkFlag.UNRESOLVED)
    found: dict[tuple[int, str, bytes], list[int]] = {}
    for tensor in distinct(chunks.tensor[_stored_again(chunks) & live]).tolist():  # few, in most checkpoints none
        rows: IntArray = order[starts[tensor] : starts[tensor + 1]]
        rows = rows[live[rows]]
        place = np.column_stack(
            [
                chunks.file[rows], chunks.offset[rows], chunks.length[rows], chunks.offsets[rows], chunks.sizes[rows],
                strides[rows], flags[rows],
            ]
        )  # fmt: skip
        key = np.ascontiguousarray(place[np.lexsort(place.T)]).tobytes()
        meta = (int(manifest.tensors.ndim[tensor]), manifest.tensors.dtypes[tensor].name)
        found.setdefault((*meta, key), []).append(tensor)
    return [tuple(manifest.tensors.fqns[t] for t in group) for group in found.values() if len(group) > 1]


def _stored_again(chunks: ChunkTable) -> BoolArray:
    """bool[n_chunks]: another chunk has the same bytes of the same file."""
    order = np.lexsort((chunks.length, chunks.offset, chunks.file))
    is_same = np.ones(max(len(order) - 1, 0), dtype=np.bool_)
    for column in (chunks.file, chunks.offset, chunks.length):
        is_same &= np.diff(column[order]) == 0
    found: BoolArray = np.zeros(len(order), dtype=np.bool_)
    found[order[:-1][is_same]] = True
    found[order[1:][is_same]] = True
    return found
