"""Registration is the order of a model chunk's parameters; gradient buffers of the optimizer are laid out by it.

The order is data (``registration.toml``); which one a run had is not recorded, so whoever uses one has to check it
against the sizes in the checkpoint.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

from ckpt_tool.errors import LayoutError
from ckpt_tool.records import dataclass

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Parameter", "layer_key", "order_names", "registered"]

_LAYER = re.compile(r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<rest>.+)")
_EXPERTS = "mlp.experts.experts."
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a model chunk."""

    key: str
    lead: tuple[int, ...]
    """Global layer, and expert, where the weight is stacked."""
    is_expert: bool = False


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    text = resources.files("ckpt_tool.formats.megatron").joinpath("registration.toml").read_text("utf-8")
    return tomllib.loads(text)


def order_names() -> tuple[str, ...]:
    """Names of the known orders."""
    return tuple(_table()["orders"])


def layer_key(key: str) -> tuple[int | None, str] | None:
    """Layer number (None for a stacked weight) and the rest of a layer's key; None for keys outside the layers.

    >>> layer_key("decoder.layers.mlp.router.weight"), layer_key("decoder.layers.3.mlp.router.weight")
    ((None, 'mlp.router.weight'), (3, 'mlp.router.weight'))
    """
    match = _LAYER.fullmatch(key)
    return None if match is None else (None if match["layer"] is None else int(match["layer"]), match["rest"])


def registered(
    keys: Iterable[str],
    layers: Sequence[int],
    experts: Sequence[int],
    *,
    order: str,
    is_grouped: bool,
    is_first: bool,
    is_last: bool,
    is_tied: bool = False,
) -> list[Parameter]:
    """Parameters of one model chunk, in order of registration.

    Args:
        keys: keys of all weights of the checkpoint.
        layers: global numbers of the chunk's layers.
        experts: global numbers of the rank's experts.
        order: one of `order_names`.
        is_grouped: whether all first layers of experts come before all second ones.
        is_first: whether the chunk has the embedding.
        is_last: whether it has the output layer.
        is_tied: whether the last stage holds a copy of the embedding in its place.

    Raises:
        LayoutError: a weight's place in the order is not known.
    """
    table = _table()
    rank = {rest: number for number, rest in enumerate(table["orders"][order])}
    stacked: dict[str, str] = {}
    single: dict[int, dict[str, str]] = {}
    outside: set[str] = set()
    for key in keys:
        found = layer_key(key)
        if found is None:
            outside.add(key)
        elif found[0] is None:
            stacked[found[1]] = key
        else:
            single.setdefault(found[0], {})[found[1]] = key
    unknown = sorted(
        {rest for rests in (stacked, *single.values()) for rest in rests if rest not in rank}
        | (outside - {*table["before"], *table["after"]})
    )
    if unknown:
        more = f" (nor that of {len(unknown) - 1:,} others)" if len(unknown) > 1 else ""
        raise LayoutError(f"the order in which {unknown[0]!r} is registered is not known{more}")
    chunk = [Parameter(key, ()) for key in table["before"] if key in outside and is_first]
    for layer in layers:
        of_layer = {**{rest: (key, True) for rest, key in stacked.items()}}
        of_layer.update({rest: (key, False) for rest, key in single.get(layer, {}).items()})
        first_expert = True
        for rest in sorted(of_layer, key=rank.__getitem__):
            key, is_stacked = of_layer[rest]
            lead = (layer,) if is_stacked else ()
            if not rest.startswith(_EXPERTS):
                chunk.append(Parameter(key, lead))
            elif first_expert or is_grouped:
                rests = [rest] if is_grouped else [r for r in sorted(of_layer, key=rank.__getitem__) if _EXPERTS in r]
                pairs = [(e, r) for e in experts for r in rests]
                chunk += [Parameter(of_layer[r][0], (*lead, e), is_expert=True) for e, r in pairs]
                first_expert = False
    chunk += [Parameter(key, ()) for key in table["after"] if key in outside and is_last]
    if is_last and is_tied:
        chunk.append(Parameter(_EMBEDDING, ()))
    return chunk
