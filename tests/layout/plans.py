"""What transformers' own plans for tensor parallelism say of a tensor, compared with what a family's rules say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.family import detect_family
from ckpt_tool.layout.names import spellings
from ckpt_tool.layout.placement import Shard
from ckpt_tool.layout.rules import RuleSet

Kinds = Mapping[str, tuple[int, str | None]]
"""Dimensions and style, by name with ``*`` for numbers."""

_SHAPES = ((), (96,), (96, 24), (4, 48, 48), (4, 4, 4, 4), (2, 2, 2, 2, 2))
_WITHOUT = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "local_params")


def disagreements(kinds: Kinds) -> Iterator[str]:
    """A sentence for each kind of names that the family's rules do not cover, or cut in another way than the plan."""
    names = [kind.replace("*", "0") for kind in kinds]
    try:
        family = detect_family(names).family
    except LayoutError as error:
        yield error.message
        return
    for kind, (ndim, style) in kinds.items():
        cut = _cut(kind.replace("*", "0"), _SHAPES[ndim], family)
        if cut is None:
            yield f"{kind} is not covered by {family.name}"
        elif style is not None and not _agrees(cut, kind, ndim, style):
            yield f"{kind} is cut {cut} by {family.name}, and {style} by the plan"


def _cut(name: str, shape: tuple[int, ...], family: RuleSet) -> tuple[int | None, bool] | None:
    """The dimension that is cut, if any, and whether in parts; None where no rule fits."""
    match = next((found for each in spellings(name, {}) if (found := family.match(each.parameter)) is not None), None)
    if match is None:
        return None
    layout = match.rule.layout(shape, match.layer, match.expert)
    return (layout.tp.dim if isinstance(layout.tp, Shard) else None), bool(layout.parts)


def _agrees(cut: tuple[int | None, bool], kind: str, ndim: int, style: str) -> bool:
    """Whether the plan cuts so too. What it gathers at once it need not cut by the parts that lie in it."""
    dim, is_packed = _expected(kind, ndim, style)
    return cut[0] == dim and (cut[1] == is_packed or style.endswith("gather_output"))


def _expected(kind: str, ndim: int, style: str) -> tuple[int | None, bool]:
    """The dimension and whether in parts by the plan.

    Its words are for ``[out, in]``, which stacked experts have behind their own dimension; where experts are stored as
    ``[in, out]``, it has them the other way round.
    """
    stacked = int(ndim == 3)
    is_packed = style.startswith("packed") or ".gate_up_proj" in kind
    if style in _WITHOUT or (style.startswith("rowwise") and ndim == 1):
        return None, False
    if style.startswith(("colwise", "packed_colwise", "embedding_rowwise")):
        return stacked, is_packed
    return stacked + 1, is_packed
