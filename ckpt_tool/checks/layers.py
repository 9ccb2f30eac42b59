"""Layers of one model are alike, or of few kinds: a layer that lacks what most others have was not saved whole.

Told by names alone: what stands behind a layer's number. A layer of another kind has other names too, and lacks more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ckpt_tool.checks.extents import some_names
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.sizes import counted

__all__ = ["layer_findings"]

_MAX_DIGITS = 7
_MIN_ALIKE = 3
"""Layers of a kind before another one counts as one of them with something missing."""


def layer_findings(manifest: Manifest) -> Iterator[Finding]:
    """A warning for each layer that has nothing besides, and all but a third at most of, what most layers have."""
    groups: dict[str, dict[int, set[str]]] = {}
    known: dict[str, str] = {}  # one string for each name, however many layers have it
    for fqn, section in zip(manifest.tensors.fqns, manifest.tensors.section.tolist(), strict=True):
        if SECTIONS[section] != "model":
            continue
        words = fqn.split(".")
        place = next(
            (place for place, word in enumerate(words[:-1]) if word.isdecimal() and len(word) < _MAX_DIGITS), 0
        )
        if place:
            name = ".".join(words[place + 1 :])
            layers = groups.setdefault(".".join(words[:place]), {})
            layers.setdefault(int(words[place]), set()).add(known.setdefault(name, name))
    for prefix, layers in groups.items():
        kinds = Counter(frozenset(names) for names in layers.values())
        usual, n_alike = kinds.most_common(1)[0]
        if n_alike < max(_MIN_ALIKE, 3 * len(layers) / 4):
            continue
        for number, names in sorted(layers.items()):
            lacking = sorted(usual - names)
            if names < usual and kinds[frozenset(names)] == 1 and 3 * len(lacking) <= len(usual):
                said = (
                    f"layer {number} of {prefix!r} lacks {some_names(lacking)}, which the other "
                    f"{counted(n_alike, 'layer')} of its kind have"
                )
                yield Finding("odd-layer", Severity.WARNING, said, f"{prefix}.{number}.{lacking[0]}")
