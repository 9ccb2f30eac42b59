"""A layer that lacks what most others have."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ckpt_tool.checks.layers import layer_findings
from tests.checks.synthetic import make, tensor

FULL = ("q.weight", "k.weight", "v.weight", "o.weight", "up.weight", "down.weight", "norm.weight", "norm.bias")


def found(layers: Mapping[int, tuple[str, ...]], prefix: str = "model.layers") -> list[str]:
    """What is said of a model with these layers, a vocabulary and a last norm."""
    names = [f"{prefix}.{number}.{name}" for number, own in layers.items() for name in own]
    manifest = make([tensor(name, (2,)) for name in ("model.embed.weight", *names, "model.norm.weight")], [])
    return [finding.message for finding in layer_findings(manifest)]


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_what_one_layer_lacks(layer: int, lost: int) -> None:
    """Which layer, and what, the first and the last one too."""
    layers = dict.fromkeys(range(4), FULL) | {layer: FULL[lost:]}
    names = ", ".join(repr(name) for name in sorted(FULL[:lost]))
    assert found(layers) == [
        f"layer {layer} of 'model.layers' lacks {names}, which the other 3 layers of its kind have"
    ]


@pytest.mark.parametrize(
    "layers",
    [
        dict.fromkeys(range(4), FULL),
        dict.fromkeys(range(3), FULL) | {3: FULL[1:]} | {4: FULL[1:]},  # two such layers are a kind
        dict.fromkeys(range(2), FULL) | {2: FULL[1:]},  # nothing is usual
        dict.fromkeys(range(4), FULL[1:]) | {0: FULL},  # the first one has more, as the bias of positions in T5
        dict.fromkeys(range(4), FULL) | {2: FULL[4:]},  # much less: another kind
        dict.fromkeys(range(4), FULL) | {2: (*FULL[1:], "other")},  # and so is one with names of its own
        dict.fromkeys(range(3), FULL) | {3: FULL[1:], 4: FULL[:4], 5: FULL[4:]},  # of many kinds
        dict.fromkeys((0, 3, 6), ("weight", "bias")) | {9: ("weight",)},  # a Sequential without a last bias
    ],
)
def test_layers_of_other_kinds(layers: Mapping[int, tuple[str, ...]]) -> None:
    """What models are like by design says nothing."""
    assert found(layers) == []
    assert found(layers, "h") == []
