"""Registration is the order of a model chunk's parameters; gradient buffers of the optimizer are laid out by it.

The order is data (``registration.toml``); which one a run had is not recorded, so whoever uses one has to check it
against the sizes in the checkpoint.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

from ckpt_tool.errors import LayoutError
from ckpt_tool.records import dataclass, field

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Parameter", "layer_key", "order_names", "registered"]

_LAYER = re.compile(r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<rest>.+)")
_PREDICTING = re.compile(r"mtp\.layers\.(\d+)\.(.+)")
_INNER = "transformer_layer."
_EXPERTS = "mlp.experts.experts."
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a model chunk."""

    key: str
    lead: tuple[int, ...]
    """Global layer, and expert, where the weight is stacked."""
    is_expert: bool = False
    live: str = ""
    """What its module is called, for a copy under another name."""


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
    is_tied: bool,
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
        is_tied: whether the last stage holds a copy of the embedding in its place; layers for multi-token prediction
            need another one, which comes first.

    Raises:
        LayoutError: a weight's place in the order is not known.
    """
    table = _table()
    model = _Model.of(keys, table, {rest: number for number, rest in enumerate(table["orders"][order])})
    chunk = [Parameter(key, ()) for key in table["before"] if key in model.outside and is_first]
    if is_last and model.predicting and not is_first:
        chunk.append(Parameter(_EMBEDDING, ()))
    for layer in layers:
        of_layer: dict[str, tuple[str, tuple[int, ...]]]
        of_layer = {rest: (key, (layer,)) for rest, key in model.stacked.items()}
        of_layer.update({rest: (key, ()) for rest, key in model.single.get(layer, {}).items()})
        chunk += model.of_layer(of_layer, experts, is_grouped=is_grouped)
    if not is_last:
        return chunk
    chunk += [Parameter(key, ()) for key in table["after"] if key in model.outside]
    for _, own in sorted(model.predicting.items()):
        inner = {rest.removeprefix(_INNER): (key, ()) for rest, key in own.items() if rest.startswith(_INNER)}
        chunk += [Parameter(own[rest], ()) for rest in table["predicting"]["before"] if rest in own]
        chunk += model.of_layer(inner, experts, is_grouped=is_grouped)
        chunk += [Parameter(own[rest], ()) for rest in table["predicting"]["after"] if rest in own]
    chunk += [Parameter(key, ()) for key in table["last"] if key in model.outside]
    if is_tied:
        chunk.append(Parameter(_EMBEDDING, (), live="output_layer.weight"))
    return chunk


@dataclass(frozen=True)
class _Model:
    """Keys by what they belong to; those of layers without what stands in front."""

    rank: Mapping[str, int]
    """Place of a layer's parameters in the order of registration."""
    stacked: dict[str, str] = field(default_factory=dict)
    single: dict[int, dict[str, str]] = field(default_factory=dict)
    predicting: dict[int, dict[str, str]] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, keys: Iterable[str], table: Mapping[str, Any], rank: Mapping[str, int]) -> _Model:
        """The keys of a model.

        Raises:
            LayoutError: a weight's place in the order is not known.
        """
        model = cls(rank)
        for key in keys:
            found, ahead = layer_key(key), _PREDICTING.fullmatch(key)
            if ahead is not None:
                model.predicting.setdefault(int(ahead[1]), {})[ahead[2]] = key
            elif found is None:
                model.outside.add(key)
            elif found[0] is None:
                model.stacked[found[1]] = key
            else:
                model.single.setdefault(found[0], {})[found[1]] = key
        ahead_of = {rest for own in model.predicting.values() for rest in own}
        rests = {rest for own in (model.stacked, *model.single.values()) for rest in own}
        inner = {rest for rest in ahead_of if rest.startswith(_INNER)}
        unknown = sorted(
            {rest for rest in rests | {rest.removeprefix(_INNER) for rest in inner} if rest not in rank}
            | (ahead_of - inner - {rest for own in table["predicting"].values() for rest in own})
            | (model.outside - {*table["before"], *table["after"], *table["last"]})
        )
        if unknown:
            more = f" (nor that of {len(unknown) - 1:,} others)" if len(unknown) > 1 else ""
            raise LayoutError(f"the order in which {unknown[0]!r} is registered is not known{more}")
        return model

    def of_layer(
        self, keys: Mapping[str, tuple[str, tuple[int, ...]]], experts: Sequence[int], *, is_grouped: bool
    ) -> Iterator[Parameter]:
        """A layer's parameters, of which ``keys`` has the keys and leading indices."""
        ordered = sorted(keys, key=self.rank.__getitem__)
        first_expert = True
        for rest in ordered:
            key, lead = keys[rest]
            if not rest.startswith(_EXPERTS):
                yield Parameter(key, lead)
            elif first_expert or is_grouped:
                rests = [rest] if is_grouped else [r for r in ordered if _EXPERTS in r]
                pairs = [(e, r) for e in experts for r in rests]
                yield from (Parameter(keys[r][0], (*lead, e), is_expert=True) for e, r in pairs)
                first_expert = False
