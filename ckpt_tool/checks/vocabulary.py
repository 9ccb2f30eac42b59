"""A vocabulary's rows are checked against what the files say of them: tied copies are equal, padding is zero.

Reads slabs of rows through a function that it is given, so that it knows no cut and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import CkptError
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import BoolArray
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Manifest, TensorMeta
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.manifest.vocabulary import embedding_and_head, padded_size, recorded_size, says_tied
from ckpt_tool.sizes import counted
from ckpt_tool.storage.fetch import fetch_all

__all__ = ["BoxReader", "padding_findings", "tied_findings"]

BoxReader = Callable[[str, Box], npt.NDArray[Any]]
"""Reads a box, in global coordinates, of the tensor of that name; is called from several threads."""

_SLAB_BYTES = 8 << 20
_COPIES = 8
"""Slabs that a worker may have in memory: two tensors' rows, each with the buffers that filled it."""
_BIAS = "output_layer.bias"


def tied_findings(
    manifest: Manifest, read: BoxReader, *, memory_budget_bytes: int, n_workers: int
) -> tuple[list[Finding], int]:
    """Whether an output head stored beside the embedding that it is tied to is its copy; and how many bytes were read.

    Nothing where types or shapes differ, or where bytes are missing: other checks see that without payload.

    Args:
        manifest: its chunks are resolved, and their bytes are there.
        read: reads the rows.
        memory_budget_bytes: bounds the slabs of all workers together.
        n_workers: threads.
    """
    says = says_tied(manifest.info)
    embedding, head = embedding_and_head(_model_names(manifest)) if says else (None, None)
    if embedding is None or head is None:
        return [], 0
    one, other = manifest.tensor(embedding), manifest.tensor(head)
    if (one.dtype, one.shape) != (other.dtype, other.shape) or not _has_whole_elements(one):
        return [], 0
    width = one.dtype.bits // 8
    slabs = _slabs(one, 0, memory_budget_bytes // (_COPIES * max(n_workers, 1)))

    def compare(slab: Box) -> tuple[int, tuple[int, ...]] | None:
        """How many elements of a slab differ, and the global index of the first."""
        differs = _elements(read(embedding, slab), width) != _elements(read(head, slab), width)
        return _counted(_any_along_last(differs), slab) if differs.any() else None

    try:
        found = [each for each in fetch_all(compare, slabs, concurrency=n_workers) if each is not None]
    except CkptError:  # what cannot be read is told by the pass over all bytes
        return [], 0
    said = f"{says}, but {embedding!r} and {head!r} are both stored"
    nbytes = 2 * one.dtype.nbytes(prod(one.shape))
    if not found:
        equal = f"{said}; all their {counted(nbytes // 2, 'byte', 'are')} equal"
        return [Finding("tied-stored-twice", Severity.INFO, equal, head)], nbytes
    said += (
        f" and differ in {sum(n for n, _ in found):,} of {counted(prod(one.shape), 'element')}, first at index "
        f"{list(found[0][1])}; loaders keep one of them"
    )
    return [Finding("tied-but-different", Severity.WARNING, said, head)], nbytes


def padding_findings(manifest: Manifest, read: BoxReader, *, memory_budget_bytes: int) -> tuple[list[Finding], int]:
    """Rows of embedding and head behind the last token that are not zero; and how many bytes were read.

    Only where the checkpoint says how many tokens there are, and nothing contradicts it. Values in padding are no
    damage where all rows up to the last such one have them: frameworks initialise padding like any row.

    Args:
        manifest: its chunks are resolved, and their bytes are there.
        read: reads the rows.
        memory_budget_bytes: bounds a slab.
    """
    findings, nbytes = [], 0
    for meta in _tables(manifest):
        start, said = _first_padding(manifest.info, meta.shape[0])
        if start is None or start >= meta.shape[0]:
            continue
        try:
            finding = _judge_padding(meta, start, said, read, memory_budget_bytes // _COPIES)
        except CkptError:  # what cannot be read is told by the pass over all bytes
            continue
        nbytes += meta.dtype.nbytes((meta.shape[0] - start) * prod(meta.shape[1:]))
        findings += [] if finding is None else [finding]
    return findings, nbytes


def _judge_padding(meta: TensorMeta, start: int, said: str, read: BoxReader, slab_bytes: int) -> Finding | None:
    found: list[tuple[int, tuple[int, ...]]] = []
    rows: list[BoolArray] = []
    for slab in _slabs(meta, start, slab_bytes):
        is_set = _any_along_last(_elements(read(meta.fqn, slab), meta.dtype.bits // 8))
        rows.append(_any_along_last(is_set.reshape(slab.sizes[0], -1)))
        in_slab = _counted(is_set, slab)
        found += [] if in_slab is None else [in_slab]
    if not found:
        return None
    is_used = np.concatenate(rows)
    last = int(np.flatnonzero(is_used)[-1])
    n_found, first = sum(n for n, _ in found), list(found[0][1])
    text = (
        f"rows {start:,} to {meta.shape[0] - 1:,} of {meta.fqn!r} are padding ({said}), but {n_found:,} of their "
        f"elements, in {counted(int(is_used.sum()), 'row')}, are not zero, the first at index {first}: "
    )
    if is_used[: last + 1].all():
        text += "no token uses them, and frameworks that initialise padding like other rows leave such values"
        return Finding("padding-not-zero", Severity.INFO, text, meta.fqn)
    text += (
        "rows of zeros lie between, which no initialisation leaves; more tokens are in use than the file says, or "
        "something wrote there by mistake"
    )
    return Finding("padding-not-zero", Severity.WARNING, text, meta.fqn)


def _first_padding(info: Mapping[str, Any], n_rows: int) -> tuple[int | None, str]:
    """The first of ``n_rows`` rows that no token has, and what says so; None where nothing does.

    Megatron's arguments leave one row open: some of its tokenizers add a token to ``args.vocab_size``. That the rest is
    padding is taken from ``args.padded_vocab_size`` or from Megatron's rule (``_vocab_size_with_padding``).
    """
    n_tokens, where = recorded_size(info)
    if n_tokens is None:
        return None, ""
    said = f"{where} is {n_tokens:,}"
    if not where.startswith("args"):
        return n_tokens, said
    args = info["args"]
    if args.get("padded_vocab_size") == n_rows:
        return n_tokens + 1, f"{said}, padded to {n_rows:,}"
    divisor, tp = args.get("make_vocab_size_divisible_by"), args.get("tensor_model_parallel_size")
    is_known = all(type(n) is int and n > 0 for n in (divisor, tp))
    if is_known and n_rows in (padded_size(n, divisor, tp) for n in (n_tokens, n_tokens + 1)):
        return n_tokens + 1, f"{said}, padded to a multiple of {divisor} times {tp} ranks"
    return None, ""


def _model_names(manifest: Manifest) -> list[str]:
    tensors = manifest.tensors
    return [fqn for fqn, section in zip(tensors.fqns, tensors.section, strict=True) if SECTIONS[section] == "model"]


def _tables(manifest: Manifest) -> list[TensorMeta]:
    """Embedding, head and the head's bias, as far as they are stored as numbers."""
    names = _model_names(manifest)
    found = [fqn for fqn in embedding_and_head(names) if fqn is not None]
    found += [fqn for fqn in names if fqn == _BIAS or fqn.endswith("." + _BIAS)]
    metas = [manifest.tensor(fqn) for fqn in found]
    return [meta for meta in metas if meta.shape and meta.dtype.kind == "float" and _has_whole_elements(meta)]


def _has_whole_elements(meta: TensorMeta) -> bool:
    return bool(meta.shape) and prod(meta.shape) > 0 and meta.dtype.bits % 8 == 0


def _slabs(meta: TensorMeta, start: int, slab_bytes: int) -> list[Box]:
    """Boxes of whole rows from ``start`` on, each of at most `_SLAB_BYTES` or one row."""
    rest = meta.shape[1:]
    step = max(1, min(slab_bytes, _SLAB_BYTES) // max(meta.dtype.nbytes(prod(rest)), 1))
    zeros = (0,) * len(rest)
    return [Box((at, *zeros), (min(step, meta.shape[0] - at), *rest)) for at in range(start, meta.shape[0], step)]


def _elements(values: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """The bits of each element, along a last dimension that has one unsigned integer for all but the widest types."""
    unit = next(n for n in (8, 4, 2, 1) if width % n == 0)
    bits: npt.NDArray[Any] = np.ascontiguousarray(values).reshape(-1).view(f"u{unit}")
    return bits.reshape(*values.shape, width // unit)


def _any_along_last(values: npt.NDArray[Any]) -> BoolArray:
    if values.shape[-1] == 1:  # nothing to reduce, which is slow along so short a dimension
        return np.asarray(values != 0).reshape(values.shape[:-1])
    found: BoolArray = np.asarray(values.any(axis=-1))
    return found


def _counted(is_found: BoolArray, slab: Box) -> tuple[int, tuple[int, ...]] | None:
    """How many elements of a slab were found, and the global index of the first; None for none."""
    n = int(np.count_nonzero(is_found))
    if not n:
        return None
    index = np.unravel_index(int(np.argmax(is_found)), slab.sizes)
    return n, tuple(int(i) + offset for i, offset in zip(index, slab.offsets, strict=True))
