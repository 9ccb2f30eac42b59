"""A model's hyperparameters as two programs call them: ``config.json`` of transformers, arguments of Megatron-LM.

The table between the two is data, ``configs.toml``; what it does not know is said, never guessed. Knows no tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.rules import check_keys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Translated", "arguments_of", "known_types"]

_SCALED_ROPE = ("rope_scaling", "rope_parameters")
_PLAIN_ROPE = (None, "default")


@dataclass(frozen=True, slots=True)
class Translated:
    """What is said in the other program's words."""

    values: Mapping[str, Any]
    notes: tuple[str, ...]
    """What could not be said, and what to do about it."""


@dataclass(frozen=True, slots=True)
class _Same:
    """One number, in both."""

    argument: str
    config: tuple[str, ...]
    default: Any
    is_negated: bool
    models: tuple[str, ...]
    but: tuple[str, ...]

    def is_of(self, model_type: str) -> bool:
        return model_type not in self.but and (not self.models or model_type in self.models)


@dataclass(frozen=True, slots=True)
class _Model:
    """One type of models."""

    type: str
    architecture: str
    arguments: Mapping[str, Any]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Table:
    same: tuple[_Same, ...]
    models: Mapping[str, _Model]


@cache
def _table() -> _Table:
    """Reads the package's own file, once."""
    text = resources.files("ckpt_tool.layout").joinpath("configs.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    check_keys(document, {"same", "model"}, "configs.toml")
    models: dict[str, _Model] = {}
    for entry in document["model"]:
        check_keys(entry, {"type", "architecture", "like", "arguments", "config"}, "configs.toml")
        base = models[entry["like"]].arguments if "like" in entry else {}
        model = _Model(
            entry["type"], entry["architecture"], {**base, **entry.get("arguments", {})}, entry.get("config", {})
        )
        models[model.type] = model if model.config or "like" not in entry else replace(
            model, config=models[entry["like"]].config
        )  # fmt: skip
    return _Table(tuple(_same(entry) for entry in document["same"]), models)


def _same(entry: Mapping[str, Any]) -> _Same:
    check_keys(entry, {"argument", "config", "default", "negated", "models", "but"}, "configs.toml")
    return _Same(
        entry["argument"], tuple(entry["config"]), entry.get("default"), entry.get("negated", False),
        tuple(entry.get("models", ())), tuple(entry.get("but", ())),
    )  # fmt: skip


def known_types() -> tuple[str, ...]:
    """The model types of transformers that the table knows."""
    return tuple(_table().models)


def arguments_of(config: Mapping[str, Any], where: str) -> Translated:
    """Megatron-LM's arguments for the model of a ``config.json``.

    Args:
        config: its content.
        where: named in errors.

    Raises:
        LayoutError: the model type is not known, or the config has not what the table needs.
    """
    model_type = config.get("model_type")
    model = _table().models.get(str(model_type))
    if model is None:
        raise LayoutError(
            f"no arguments of Megatron are known for model_type {model_type!r}",
            where=where,
            hint=f"known are {', '.join(known_types())}",
        )
    values: dict[str, Any] = dict(model.arguments)
    for same in _table().same:
        if not same.is_of(model.type):
            continue
        found = next((value for key in same.config if (value := _lookup(config, key)) is not None), same.default)
        if found is None and same.argument not in ("num_query_groups", "kv_channels"):
            raise LayoutError(
                f"{same.config[0]} is not there", where=where, hint="it is needed for Megatron's arguments"
            )
        if found not in (None, ""):
            values[same.argument] = (not found) if same.is_negated else found
    heads = values["num_attention_heads"]
    groups = values.setdefault("num_query_groups", heads)
    values["group_query_attention"] = groups != heads
    values.setdefault("kv_channels", values["hidden_size"] // heads)
    notes = list(_differences(config, model, where))
    values |= _scaled_rope(config, notes)
    return Translated(values, tuple(notes))


def _lookup(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for word in key.split("."):
        value = value.get(word) if isinstance(value, Mapping) else None
    return value


def _differences(config: Mapping[str, Any], model: _Model, where: str) -> Iterator[str]:
    """Nothing, unless a key says that the model is not like others of its type.

    Raises:
        LayoutError: weights would not be what Megatron takes them for.
    """
    for key, expected in model.config.items():
        found = config.get(key, expected)
        if found is not None and found != expected:
            raise LayoutError(
                f"{key} is {found!r}, expected {expected!r}: Megatron's arguments for other models are not known",
                where=where,
            )
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        yield f"sliding_window {config['sliding_window']} is not among the arguments written: say --window-size"


def _scaled_rope(config: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Arguments of a rotary embedding that is stretched: Llama 3's way only; others are said."""
    scaling = next((table for key in _SCALED_ROPE if isinstance(table := config.get(key), Mapping)), {})
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in _PLAIN_ROPE:
        return {}
    if kind == "llama3":
        return {"use_rope_scaling": True, "rope_scaling_factor": scaling.get("factor", 8.0)}
    notes.append(f"rope scaling {kind!r} of the config is not among the arguments written: say it to Megatron")
    return {}
