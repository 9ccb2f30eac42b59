"""Which stages of a target's pipeline have which parameters, by the layers that their names begin with.

A module of DeepSpeed's pipeline numbers its layers, functions included, and a file holds each; stages take runs of them
(``runtime/pipe/module.py``). A tied parameter is on every stage that uses it, and stored with the first of its layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Stages"]

_TO_UNIVERSAL = "write --to deepspeed-universal, which a run cuts for itself"


@dataclass(frozen=True)
class Stages:
    """The layers of each stage."""

    ends: tuple[int, ...]
    """Number of the first layer behind each stage."""
    tied: Mapping[str, tuple[int, tuple[int, ...]]]
    """By tied parameter: the layer whose file holds it, and the stages that use it."""
    is_spread: bool
    """Whether layers were spread evenly here, as the source has another number of stages."""
    has_model_axis: bool
    """Whether file names of layers have the tensor-parallel rank."""

    @classmethod
    def of(
        cls, info: Mapping[str, Any], n_stages: int, *, first: int | None = None, last: int | None = None
    ) -> Stages | None:
        """The stages of a target, None when the source is no pipeline.

        Args:
            info: what the source says beyond tensors.
            n_stages: number of stages of the target.
            first: layers of the first stage, None for an even share.
            last: layers of the last stage.

        Raises:
            Unsupported: stages are asked for, and the source is no pipeline.
            LayoutError: the stages of a tied parameter are not known, or there are not enough layers.
        """
        found = info.get("pipeline")
        if not isinstance(found, Mapping):
            if n_stages > 1:
                raise Unsupported(
                    f"{counted(n_stages, 'pipeline stage')} of a source that is no pipeline: nothing numbers its "
                    "layers",
                    hint="leave out --pp, or " + _TO_UNIVERSAL,
                )
            return None
        by_stage: Sequence[Sequence[int]] = found["stages"]
        filed = [layer for layers in by_stage for layer in layers]
        tied = {
            name: (int(own["layer"]), [int(stage) for stage in own["stages"]]) for name, own in found["tied"].items()
        }
        uses = {name: _later_uses(by_stage, *own) for name, own in tied.items()}
        n_layers = max([*filed, *(layer for layers in uses.values() for own in layers for layer in own)]) + 1
        is_as_before = n_stages == len(by_stage) and first is None and last is None
        if is_as_before:
            ends = _ends(by_stage, n_layers)
        else:
            ends = tuple(accumulate(_shares(n_layers, n_stages, first, last)))
        stages = {}
        for name, (layer, held) in tied.items():
            own = {_stage_at(ends, layer)}
            for candidates in uses[name]:
                on = {_stage_at(ends, candidate) for candidate in candidates}
                if len(on) > 1:
                    raise LayoutError(
                        f"which of the layers {candidates} uses it again is not told, and they are on different stages",
                        where=name,
                        hint=_TO_UNIVERSAL,
                    )
                own |= on
            stages[name] = (layer, tuple(held) if is_as_before else tuple(sorted(own)))
        is_spread = not is_as_before and n_stages > 1
        return cls(ends, stages, is_spread, bool(found["has_model_axis"]))

    def of_parameter(self, name: str) -> tuple[int, ...]:
        """The stages that have a parameter.

        Raises:
            LayoutError: it is no layer's.
        """
        if name in self.tied:
            return self.tied[name][1]
        return (_stage_at(self.ends, self.layer_of(name)),)

    def layer_of(self, name: str) -> int:
        """The layer whose file has a parameter or buffer.

        Raises:
            LayoutError: it is no layer's.
        """
        if name in self.tied:
            return self.tied[name][0]
        number = name.partition(".")[0]
        if not number.isdecimal():
            raise LayoutError("expected a layer's number before its name, as in a pipeline", where=name)
        return int(number)

    def key_of(self, name: str) -> str:
        """The key that a parameter has in its layer's file.

        >>> Stages((2, 3), {"tied_modules.embed.weight": (0, (0, 1))}, False, False).key_of("tied_modules.embed.weight")
        'weight'
        """
        return name.split(".", 2)[2] if name in self.tied else name.partition(".")[2]

    def note(self) -> str:
        """Which layers are on which stage."""
        starts = (0, *self.ends[:-1])
        spelled = ", ".join(f"{a} to {b - 1}" for a, b in zip(starts, self.ends, strict=True))
        return (
            f"stages have the layers {spelled}: an even share as partition_method 'uniform' gives it; a run that parts "
            "them otherwise needs --first-stage-layers and --last-stage-layers"
        )


def _stage_at(ends: Sequence[int], layer: int) -> int:
    return next((stage for stage, end in enumerate(ends) if layer < end), len(ends) - 1)


def _ends(by_stage: Sequence[Sequence[int]], n_layers: int) -> tuple[int, ...]:
    ends = [0]
    for layers in by_stage[:-1]:
        ends.append(max(ends[-1], *(layer + 1 for layer in layers)) if layers else ends[-1])
    return (*ends[1:], n_layers)


def _later_uses(by_stage: Sequence[Sequence[int]], layer: int, stages: Sequence[int]) -> list[list[int]]:
    """For each later use of a tied parameter: layers without a file, of which one it is.

    Uses are on other stages where there are any. One behind the last file of all is taken for the next layer.
    """
    found = []
    for stage in stages:
        if layer in by_stage[stage] and len(stages) > 1:
            continue
        before = max((own for layers in by_stage[:stage] for own in layers), default=-1)
        after = min((own for layers in by_stage[stage + 1 :] for own in layers), default=None)
        filed = {own for layers in by_stage for own in layers}
        end = max(filed) + 2 if after is None else after
        found.append([number for number in range(before + 1, end) if number not in filed])
    return found


def _shares(n_layers: int, n_stages: int, first: int | None, last: int | None) -> list[int]:
    """Layers of each stage: those before get one more where they do not divide (``utils.partition_uniform``)."""
    given = {0: first, n_stages - 1: last}
    fixed = {stage: count for stage, count in given.items() if count is not None}
    rest = n_layers - sum(fixed.values())
    free = [stage for stage in range(n_stages) if stage not in fixed]
    if rest < len(free) or (not free and rest) or n_layers < n_stages:
        raise LayoutError(f"{counted(n_layers, 'layer')} cannot be shared by {counted(n_stages, 'stage')} that way")
    shares = dict(fixed)
    for number, stage in enumerate(free):
        shares[stage] = rest // len(free) + (number < rest % len(free))
    return [shares[stage] for stage in range(n_stages)]
