"""A vocabulary is padded so that tensor-parallel ranks get equal parts of it, by Megatron's rule.

``padded = ceil(vocab / (divisor * tp)) * divisor * tp`` (Megatron-LM, ``_vocab_size_with_padding``): another number of
ranks, another number of rows. Embedding, output layer and their optimizer state are all that has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.convert.conversion import Dropped
from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from ckpt_tool.layout.naming_sizes import Fact
from ckpt_tool.layout.views import Part, View, apply_views
from ckpt_tool.manifest.model import Manifest, TensorMeta
from ckpt_tool.manifest.vocabulary import padded_size, recorded_size
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Padded", "repadded", "true_vocabulary"]

_MAX_READ_NBYTES = 64 << 20
_KEYS = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True)
class Padded:
    """A manifest whose vocabulary is padded for another run."""

    manifest: Manifest
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]


def true_vocabulary(
    checkpoint: Checkpoint, fqns: Sequence[str], given: int | None
) -> tuple[Fact | None, tuple[str, ...]]:
    """How many rows of embedding and output layer are no padding, if that is proven; else a note.

    ``args.vocab_size`` alone proves nothing: some tokenizers of Megatron add a token for the end of a document to it.
    It does together with zeros from there on, or with the user's own word. Reads the rows that would go.

    Args:
        checkpoint: the source.
        fqns: embedding and output layer, as far as they are stored.
        given: what the user says, None for nothing.

    Raises:
        LayoutError: the user's number does not fit, or nothing says that the rows from there on are padding.
    """
    tables = [checkpoint.manifest.tensor(fqn) for fqn in fqns]
    if not tables:
        return None, ()
    n_rows = min(table.shape[0] for table in tables)
    said, where = recorded_size(checkpoint.manifest.info)
    if given is not None:
        if not 0 < given <= n_rows:
            raise LayoutError(f"--true-vocab {given:,} does not fit {counted(n_rows, 'row')}", where=tables[0].fqn)
        return Fact(given, f"--true-vocab {given}, and {_proof(checkpoint, tables, given, said, where)}"), ()
    if said is None or said >= n_rows:
        return None, ()
    hint = f"--true-vocab {said} drops them"
    if sum(table.dtype.nbytes((table.shape[0] - said) * table.shape[1]) for table in tables) > _MAX_READ_NBYTES:
        return None, (f"all {counted(n_rows, 'row')} of the vocabulary are kept, {where} is {said:,}; {hint}",)
    row = _row_with_values(checkpoint, tables, said)
    if row is not None:
        kept = f"all {counted(n_rows, 'row')} of the vocabulary are kept: {where} is {said:,}, but rows from there on"
        return None, (f"{kept} are not zero; {hint}",)
    evidence = f"{where} of the checkpoint, and rows from there on are zero in {' and '.join(fqns)}"
    return Fact(said, evidence), ()


def _proof(checkpoint: Checkpoint, tables: Sequence[TensorMeta], given: int, said: int | None, where: str) -> str:
    """Why rows from ``given`` on are padding.

    Raises:
        LayoutError: nothing says so.
    """
    if said is not None and said <= given:
        return f"{where} of the checkpoint is {said}"
    row = _row_with_values(checkpoint, tables, given)
    if row is None:
        return "rows from there on are zero"
    known = "nothing in the checkpoint says how many there are" if said is None else f"{where} is {said:,}"
    raise LayoutError(
        f"row {row:,} has values, so --true-vocab {given:,} would drop more than padding: {known}",
        where=tables[0].fqn,
        hint=f"if they are padding nevertheless, --fact vocab={given} drops them unproven",
    )


def _row_with_values(checkpoint: Checkpoint, tables: Sequence[TensorMeta], start: int) -> int | None:
    """The first row from ``start`` on that is not zero in all tables; None when there is none."""
    for table in tables:
        rest = table.shape[1:]
        step = max(1, _MAX_READ_NBYTES // max(table.dtype.nbytes(prod(rest)), 1))
        for row in range(start, table.shape[0], step):
            n = min(step, table.shape[0] - row)
            [rows] = checkpoint.read([(table.fqn, Box((row, *(0,) * len(rest)), (n, *rest)))])
            is_used = np.ascontiguousarray(rows).view(np.uint8).reshape(n, -1).any(axis=1)
            if is_used.any():
                return row + int(is_used.argmax())
    return None


def repadded(manifest: Manifest, args: Mapping[str, Any], *, tp: int) -> Padded:
    """The manifest with as many rows of the vocabulary as a run of ``tp`` ranks has.

    Rows that are added are zero; rows from ``args.vocab_size`` on are padding, of which the target takes what it has
    place for. Where the arguments do not explain the source's rows, all are kept, and a note says so: Megatron cuts or
    fills the difference when it loads a distributed checkpoint.

    Args:
        manifest: of Megatron's tensors.
        args: arguments of the run that saved.
        tp: the target's tensor-parallel size.
    """
    tables = [meta for meta in manifest.tensors if _is_table(meta)]
    rows = {meta.shape[0] for meta in tables}
    if len(rows) != 1:
        return Padded(manifest, (), ())
    before = rows.pop()
    target, why = _target(before, args, tp)
    if target is None or target == before:
        return Padded(manifest, (), (why,) if target is None else ())
    is_table = {meta.fqn for meta in tables}
    kept = [fqn for fqn in manifest.tensors.fqns if fqn not in is_table]
    result = apply_views(manifest, [_with_rows(meta, target) for meta in tables], keep=kept)
    args_now = {**manifest.info.get("args", {}), "padded_vocab_size": target}
    result = result.replace(info={**manifest.info, "args": args_now})
    change = (
        f"{counted(target - before, 'row')} of zeros"
        if target > before
        else f"{counted(before - target, 'row')} of padding less"
    )
    note = f"the vocabulary has {counted(target, 'row')} ({change} in {counted(len(tables), 'tensor')}): {why}"
    dropped = [Dropped(f"{meta.fqn}[{target}:{before}]", f"padding: {why}") for meta in tables if target < before]
    return Padded(result, tuple(dropped), (note,))


def _target(before: int, args: Mapping[str, Any], tp: int) -> tuple[int | None, str]:
    """Rows of the target, None where they cannot be told, and the reason."""
    divisor, n_tokens = args.get("make_vocab_size_divisible_by"), args.get("vocab_size")
    saved_tp = args.get("tensor_model_parallel_size")
    if type(divisor) is not int or divisor < 1 or type(saved_tp) is not int or saved_tp < 1:
        return None, (
            f"the vocabulary keeps its {counted(before, 'row')}: args do not say make_vocab_size_divisible_by and the "
            "source's tensor parallelism; Megatron cuts or fills a difference on loading"
        )
    step, new_step = divisor * saved_tp, divisor * tp
    # A tokenizer may add a token of its own to args.vocab_size.
    sizes = [n for n in (n_tokens, n_tokens + 1) if padded_size(n, divisor, saved_tp) == before] if (
        type(n_tokens) is int and n_tokens > 0
    ) else []  # fmt: skip
    if sizes:
        target = max(padded_size(n, divisor, tp) for n in sizes)
        return target, f"args.vocab_size {n_tokens:,} in multiples of {divisor} times {tp} tensor-parallel ranks"
    if before % step == 0 and new_step % step == 0:
        return padded_size(before, divisor, tp), f"{counted(before, 'row')} in multiples of {divisor} times {tp} ranks"
    return None, (
        f"the vocabulary keeps its {counted(before, 'row')}: args do not tell how many tokens are in them "
        f"(vocab_size is {n_tokens!r}); Megatron cuts or fills the difference on loading"
    )


def _is_table(meta: TensorMeta) -> bool:
    return bool(meta.shape) and str(meta.path[-1]) in _KEYS and meta.section in ("model", "optimizer")


def _with_rows(meta: TensorMeta, rows: int) -> View:
    """The tensor with that many rows: its first ones, then zeros."""
    kept = min(meta.shape[0], rows)
    rest = meta.shape[1:]
    zeros = (0,) * len(rest)
    part = Part(meta.fqn, Box((0, *zeros), (kept, *rest)), (0, *zeros), tuple(range(len(meta.shape))))
    padding = (Box((kept, *zeros), (rows - kept, *rest)),) if rows > kept else ()
    return View(meta.fqn, (rows, *rest), (part,), padding, meta.path)
