"""A stretched rotary embedding as two programs call it: ``rope_scaling`` of transformers, arguments of Megatron-LM.

Which keys are which arguments is data, ``configs.toml``: the first ``[[rope]]`` that fits counts. What no argument says
is a note, and kept beside the arguments for the way back. Sources: core 0.19 ``rotary_pos_embedding.py``,
``yarn_rotary_pos_embedding.py`` and ``argument_utils.py``; transformers 5.24 ``modeling_rope_utils.py`` and the
attention of DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isclose, log
from typing import Any

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.rules import check_keys
from ckpt_tool.records import dataclass

__all__ = ["RopeKind", "rope_arguments", "rope_config", "rope_kinds"]

_KEYS = {"type", "also", "set", "fixed", "latent", "keys", "defaults", "assumed", "whole", "lacks"}
_TABLES = ("rope_scaling", "rope_parameters")
_PLAIN = (None, "default")
_ORIGINAL = "original_max_position_embeddings"
_FACTOR, _MSCALE, _ALL, _ATTENTION = "factor", "mscale", "mscale_all_dim", "attention_factor"
_KEPT = "hf_rope_scaling"
"""An argument that Megatron does not have: what a config says of stretching and its own arguments do not."""


@dataclass(frozen=True, slots=True)
class RopeKind:
    """One way to stretch."""

    type: str
    also: tuple[str, ...]
    """Older names of it."""
    set: Mapping[str, Any]
    """Arguments that say that it is this one."""
    fixed: Mapping[str, Any]
    """Keys of the config that Megatron has no argument for, and what it does."""
    latent: bool | None
    """Whether it is for multi-latent attention, or for others; None for both."""
    keys: Mapping[str, str]
    """Key of the config to argument."""
    defaults: Mapping[str, Any]
    """Values of keys that a config leaves out; None where a leaving out has a meaning of its own."""
    assumed: Mapping[str, Any]
    """Values of arguments that a run leaves out."""
    whole: tuple[str, ...]
    """Keys whose argument takes whole numbers only."""
    lacks: str
    """What Megatron has no argument for, where it cannot stretch in this way; empty where it can."""

    def fits_arguments(self, args: Mapping[str, Any]) -> bool:
        """Whether a run with these arguments stretches in this way."""
        if self.lacks:
            return False
        if self.latent is not None and self.latent != bool(args.get("multi_latent_attention")):
            return False
        if self.set:
            return all(args.get(name) == value for name, value in self.set.items())
        return all(args.get(name) is not None for name in self.keys.values())


def rope_kinds(entries: Iterable[Mapping[str, Any]], where: str) -> tuple[RopeKind, ...]:
    """Kinds of ``[[rope]]`` entries of a TOML file.

    Raises:
        LayoutError: an unknown key, or an entry without a type.
    """
    found = []
    for entry in entries:
        check_keys(entry, _KEYS, where)
        if not isinstance(entry.get("type"), str):
            raise LayoutError("a [[rope]] needs a type", where=where)
        also, whole = tuple(entry.get("also", ())), tuple(entry.get("whole", ()))
        kind = RopeKind(entry["type"], also, {}, {}, entry.get("latent"), {}, {}, {}, whole, entry.get("lacks", ""))
        tables = {name: entry[name] for name in ("set", "fixed", "keys", "defaults", "assumed") if name in entry}
        found.append(replace(kind, **tables))
    return tuple(found)


def rope_arguments(
    kinds: Iterable[RopeKind], config: Mapping[str, Any], *, latent: bool
) -> tuple[dict[str, Any], list[str]]:
    """Arguments for what a config says of stretching, and what they cannot say."""
    scaling = next((table for key in _TABLES if isinstance(table := config.get(key), Mapping)), {})
    word = scaling.get("rope_type", scaling.get("type"))
    if word in _PLAIN:
        by_layer = {name: table.get("rope_type") for name, table in scaling.items() if isinstance(table, Mapping)}
        return {}, [
            f"rope scaling {word!r} of layers with {name} is not among the arguments written, nor in a config.json "
            "made of them later: Megatron has no argument for kinds of layers"
            for name, word in by_layer.items()
            if word not in _PLAIN
        ]
    kind = next((k for k in kinds if word in (k.type, *k.also) and k.latent in (None, latent)), None)
    if kind is None:
        return _kept(scaling), [f"rope scaling {word!r} is not known: {_PLAIN_NOW}"]
    if kind.lacks:
        lacks = kind.lacks.format_map(_Named({**config, **scaling}))
        return _kept(scaling), [f"rope scaling {word}: {lacks}; {_PLAIN_NOW}"]
    known = {**kind.defaults, **{key: value for key, value in scaling.items() if value is not None}}
    if _ORIGINAL in kind.keys:
        known.setdefault(_ORIGINAL, config.get(_ORIGINAL, config.get("max_position_embeddings")))
        if known.get(_FACTOR) is None and known[_ORIGINAL]:
            known[_FACTOR] = config.get("max_position_embeddings", 0) / known[_ORIGINAL]
    notes = [
        f"rope scaling {word}: {key} is {known[key]!r}, Megatron has {value!r} and no argument for it"
        for key, value in kind.fixed.items()
        if known.get(key, value) != value
    ]
    if _MSCALE in kind.keys:
        notes += _with_mscales(known, latent=latent)
    values = dict(kind.set)
    for key, argument in kind.keys.items():
        value = known.get(key)
        if value is None:
            notes.append(f"rope scaling {word}: the config does not say {key}, so args.{argument} is left to Megatron")
        elif key in kind.whole and value != int(value):
            notes.append(f"rope scaling {word}: {key} is {value!r}, args.{argument} takes whole numbers only")
        else:
            values[argument] = int(value) if key in kind.whole else value
    if notes:
        values |= _kept(scaling)
        notes.append(f"rope scaling {word}: args.{_KEPT} keeps the config's settings for an export to Hugging Face")
    return values, notes


_PLAIN_NOW = (
    f"the run is written with plain rotary embeddings, and args.{_KEPT} keeps the config's settings for an export to "
    "Hugging Face"
)


class _Named(dict[str, Any]):
    """Values for a text, in which those that are missing are said to be."""

    def __missing__(self, key: str) -> str:
        return "not said"


def _kept(scaling: Mapping[str, Any]) -> dict[str, Any]:
    return {_KEPT: dict(scaling)}


def _with_mscales(known: dict[str, Any], *, latent: bool) -> list[str]:
    """Both magnitudes as Megatron has them, for the factor of cosines and sines that transformers computes.

    With both given it is their quotient; else that of ``mscale`` 1. An ``attention_factor`` goes before.
    """
    scale = known.get(_FACTOR) or 1.0
    own, of_all = known.get(_MSCALE) or 0.0, known.get(_ALL) or 0.0
    given = known.get(_ATTENTION)
    has_both = bool(own and of_all)
    wanted = given if given is not None else (
        _magnitude(scale, own) / _magnitude(scale, of_all) if has_both else _magnitude(scale, 1.0)
    )  # fmt: skip
    if not latent and not has_both:
        of_all = 0.0
    own = own if has_both and given is None else _mscale_of(wanted * _magnitude(scale, of_all), scale)
    known[_MSCALE], known[_ALL] = own, of_all
    found = _magnitude(scale, own) / _magnitude(scale, of_all)
    if isclose(found, wanted, rel_tol=1e-12):
        return []
    return [f"rope scaling: cosines and sines are multiplied by {wanted}, which Megatron's args.mscale cannot say"]


def _magnitude(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * log(scale) + 1.0


def _mscale_of(magnitude: float, scale: float) -> float:
    """The ``mscale`` of a magnitude."""
    if scale <= 1:
        return 1.0
    found = (magnitude - 1.0) / (0.1 * log(scale))
    return round(found) if isclose(found, round(found), abs_tol=1e-12) else found


def rope_config(kinds: Iterable[RopeKind], args: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """``rope_scaling`` for a run with these arguments, None without any; and names of arguments that are missing."""
    if isinstance(args.get(_KEPT), Mapping):
        return dict(args[_KEPT]), []
    kind = next((kind for kind in kinds if kind.fits_arguments(args)), None)
    if kind is None:
        return None, []
    values: dict[str, Any] = {"rope_type": kind.type, **kind.fixed}
    missing = []
    for key, argument in kind.keys.items():
        value = args.get(argument) if args.get(argument) is not None else kind.assumed.get(argument)
        if value is None:
            missing.append(argument)
        values[key] = float(value) if key == _FACTOR and value is not None else value
    if _MSCALE in values and not missing:
        own, of_all = values.pop(_MSCALE), values.pop(_ALL)
        if of_all or own != 1:
            scale = values[_FACTOR]
            if not (own and of_all):
                values[_ATTENTION] = _magnitude(scale, own) / _magnitude(scale, of_all)
            values |= {_MSCALE: own, _ALL: of_all}
    return values, missing
