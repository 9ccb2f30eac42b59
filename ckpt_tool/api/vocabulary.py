"""A vocabulary is padded so that tensor-parallel ranks get equal parts of it, by Megatron's rule.

``padded = ceil(vocab / (divisor * tp)) * divisor * tp`` (Megatron-LM, ``_vocab_size_with_padding``): another number of
ranks, another number of rows. Embedding, output layer and their optimizer state are all that has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tool.api.conversion import Dropped
from ckpt_tool.geometry.box import Box
from ckpt_tool.layout.views import Part, View, apply_views
from ckpt_tool.manifest.model import Manifest, TensorMeta

__all__ = ["Padded", "padded_size", "repadded"]

_KEYS = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True)
class Padded:
    """A manifest whose vocabulary is padded for another run."""

    manifest: Manifest
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]


def padded_size(n_tokens: int, divisor: int, tp: int) -> int:
    """Rows of a vocabulary of ``n_tokens`` in a run of ``tp`` tensor-parallel ranks.

    >>> padded_size(100, 8, 2)
    112
    """
    step = divisor * tp
    return -(-n_tokens // step) * step


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
    change = f"{target - before:,} rows of zeros" if target > before else f"{before - target:,} rows of padding less"
    note = f"the vocabulary has {target:,} rows ({change} in {len(tables):,} tensors): {why}"
    dropped = [Dropped(f"{meta.fqn}[{target}:{before}]", f"padding: {why}") for meta in tables if target < before]
    return Padded(result, tuple(dropped), (note,))


def _target(before: int, args: Mapping[str, Any], tp: int) -> tuple[int | None, str]:
    """Rows of the target, None where they cannot be told, and the reason."""
    divisor, n_tokens = args.get("make_vocab_size_divisible_by"), args.get("vocab_size")
    saved_tp = args.get("tensor_model_parallel_size")
    if type(divisor) is not int or divisor < 1 or type(saved_tp) is not int or saved_tp < 1:
        return None, (
            f"the vocabulary keeps its {before:,} rows: args do not say make_vocab_size_divisible_by and the source's "
            "tensor parallelism; Megatron cuts or fills a difference on loading"
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
        return padded_size(before, divisor, tp), f"{before:,} rows in multiples of {divisor} times {tp} ranks"
    return None, (
        f"the vocabulary keeps its {before:,} rows: args do not tell how many tokens are in them "
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
