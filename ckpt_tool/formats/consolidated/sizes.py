"""The sizes of a model in ``params.json``, and along which dimension a weight of given parts must have been cut.

A weight is described by what its rows and columns are (heads, hidden size ...). Sizes that are known prove where the
cut is: the one dimension whose parts add up, while the others are whole. Names and sizes: Meta's ``llama/model.py``
(``ModelArgs``, ``FeedForward``) and Mistral's ``mistral_inference`` (``hidden_dim``, ``head_dim``). Reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckpt_tool.records import dataclass

__all__ = ["Cut", "Sizes", "cuts_of", "dims_of", "sizes_of"]

# What the dimensions of a weight are; names are compared from their end.
_WEIGHTS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(rf"(?:.*\.)?{pattern}"), dims)
    for pattern, dims in (
        (r"(?:tok_embeddings|output)\.weight", ("vocab", "dim")),
        (r"attention\.wq\.weight", ("heads", "dim")),
        (r"attention\.w[kv]\.weight", ("kv_heads", "dim")),
        (r"attention\.wo\.weight", ("dim", "heads")),
        (r"attention\.wq\.bias", ("heads",)),
        (r"attention\.w[kv]\.bias", ("kv_heads",)),
        (r"feed_forward\.(?:experts\.\d+\.)?w[13]\.weight", ("ffn", "dim")),
        (r"feed_forward\.(?:experts\.\d+\.)?w2\.weight", ("dim", "ffn")),
        (r"feed_forward\.gate\.weight", ("experts", "dim")),
        (r"(?:attention_norm|ffn_norm|norm)\.weight", ("dim",)),
        (r"rope\.freqs", ("rotary",)),
    )
)
_NEVER_CUT = frozenset({"rotary", "experts"})


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a whole model, each with where it is known from; sizes that nothing tells are absent."""

    known: Mapping[str, int]
    evidence: str


@dataclass(frozen=True, slots=True)
class Cut:
    """One way in which the parts of a weight can be put together."""

    dim: int | None
    """None when every file has all of it."""
    shape: tuple[int, ...]
    """Of the whole."""


def sizes_of(params: Mapping[str, Any], norm: int | None) -> Sizes:
    """What ``params.json`` says, and the length of the last norm.

    >>> sizes_of({"dim": 4096, "n_heads": 32, "multiple_of": 256}, None).known["ffn"]
    11008
    """
    known: dict[str, int] = {}
    dim, n_heads = _number(params, "dim"), _number(params, "n_heads")
    if dim is None:
        dim = norm
    if dim is not None:
        known["dim"] = dim
    head_dim = _number(params, "head_dim") or (dim // n_heads if dim and n_heads else None)
    if n_heads and head_dim:
        known["heads"] = n_heads * head_dim
        known["kv_heads"] = (_number(params, "n_kv_heads") or n_heads) * head_dim
    vocab = _number(params, "vocab_size")  # -1 in Meta's files: the tokenizer has it
    if vocab is not None:
        known["vocab"] = vocab
    ffn = _number(params, "hidden_dim") or _feed_forward(params, dim)
    if ffn is not None:
        known["ffn"] = ffn
    moe = params.get("moe")
    if isinstance(moe, Mapping) and (experts := _number(moe, "num_experts")):
        known["experts"] = experts
    said = ", ".join(f"{name} {size:,}" for name, size in known.items())
    return Sizes(known, f"{'params.json' if params else 'the length of norm.weight'}: {said}")


def _feed_forward(params: Mapping[str, Any], dim: int | None) -> int | None:
    """The inner size of Meta's feed-forward: two thirds of four times the hidden size, rounded up."""
    multiple_of = _number(params, "multiple_of")
    if dim is None or multiple_of is None:
        return None
    inner = int(2 * (4 * dim) / 3)
    factor = params.get("ffn_dim_multiplier")
    if isinstance(factor, (int, float)) and 0 < factor < 1 << 20:
        inner = int(factor * inner)
    return multiple_of * (-(-inner // multiple_of))


def _number(table: Mapping[str, Any], key: str) -> int | None:
    value = table.get(key)
    return value if type(value) is int and value > 0 else None


def dims_of(fqn: str) -> tuple[str, ...] | None:
    """What the dimensions of a weight are; None for a name that is not Meta's."""
    return next((dims for pattern, dims in _WEIGHTS if pattern.fullmatch(fqn)), None)


def cuts_of(dims: tuple[str, ...], part: tuple[int, ...], n_files: int, sizes: Sizes) -> list[Cut]:
    """Every way to put ``n_files`` parts of this shape together that no known size contradicts.

    >>> sizes = Sizes({"dim": 8, "heads": 8}, "")
    >>> cuts_of(("dim", "heads"), (8, 4), 2, sizes)
    [Cut(dim=1, shape=(8, 8))]
    """
    if len(dims) != len(part):
        return []
    found = []
    for cut in (None, *range(len(dims))):
        if cut is not None and dims[cut] in _NEVER_CUT:
            continue
        shape = tuple(n * n_files if at == cut else n for at, n in enumerate(part))
        if all(sizes.known.get(name, n) == n for name, n in zip(dims, shape, strict=True)):
            found.append(Cut(cut, shape))
    return found
