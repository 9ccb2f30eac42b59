"""A model's hyperparameters as two programs call them: ``config.json`` of transformers, arguments of Megatron-LM.

The table between the two is data, ``configs.toml``; what it does not know is said, never guessed. Knows no tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.rope import RopeKind, rope_arguments, rope_config, rope_kinds
from ckpt_tool.layout.rules import check_keys
from ckpt_tool.records import dataclass

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Translated", "arguments_of", "config_of", "known_types"]

_KINDS = ("", "not", "dense first", "times moe", "window", "sliding")
_SLIDES, _FULL = "sliding_attention", "full_attention"
_SCALED_EMBEDDING = ("gemma", "gemma2", "gemma3_text")
_WITH_DEFAULT = ("num_query_groups", "kv_channels")


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
    also: tuple[str, ...]
    config: tuple[str, ...]
    default: Any
    kind: str
    models: tuple[str, ...]
    but: tuple[str, ...]

    def is_of(self, model_type: str) -> bool:
        return model_type not in self.but and (not self.models or model_type in self.models)

    def to_argument(self, value: Any, config: Mapping[str, Any]) -> Any:
        if self.kind == "not":
            return not value
        if self.kind == "dense first":
            return [0] * value + [1] * (config["num_hidden_layers"] - value)
        if self.kind == "window":
            return [value - 1, 0]
        if self.kind == "sliding":
            return [int(layer == _SLIDES) for layer in value]
        return value * config["moe_intermediate_size"] if self.kind == "times moe" else value

    def to_config(self, value: Any, args: Mapping[str, Any]) -> Any:
        """The config's value; None where the argument's is none that it could be made of."""
        if self.kind == "not":
            return not value
        if self.kind == "dense first":
            layers = value if isinstance(value, list) else [1] * args["num_layers"] if value == 1 else []
            dense = layers.index(1) if 1 in layers else 0
            return dense if layers and all(layers[dense:]) else None
        if self.kind in ("window", "sliding"):
            listed = list(value) if isinstance(value, list | tuple) else []
            types = [_SLIDES if layer else _FULL for layer in listed] or None
            return types if self.kind == "sliding" else listed[0] + 1 if listed else None
        if self.kind == "times moe":
            width = args.get("moe_ffn_hidden_size")
            return value // width if width and value % width == 0 else None
        return value


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
    rope: tuple[RopeKind, ...]
    none: tuple[str, ...]
    """Arguments that no model has unless an entry of ``same`` is about it."""


@cache
def _table() -> _Table:
    """Reads the package's own file, once."""
    text = Path(__file__).with_name("configs.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    check_keys(document, {"same", "model", "rope", "none"}, "configs.toml")
    models: dict[str, _Model] = {}
    for entry in document["model"]:
        check_keys(entry, {"type", "architecture", "like", "arguments", "config"}, "configs.toml")
        base = models[entry["like"]] if "like" in entry else _Model("", "", {}, {})
        arguments = {**base.arguments, **entry.get("arguments", {})}
        config = entry.get("config", base.config)
        models[entry["type"]] = _Model(entry["type"], entry["architecture"], arguments, config)
    same = tuple(_same(entry) for entry in document["same"])
    return _Table(same, models, rope_kinds(document["rope"], "configs.toml"), tuple(document["none"]))


def _same(entry: Mapping[str, Any]) -> _Same:
    check_keys(entry, {"argument", "also", "config", "default", "kind", "models", "but"}, "configs.toml")
    kind = entry.get("kind", "")
    if kind not in _KINDS:
        raise LayoutError(f"kind {kind!r}, expected one of {_KINDS}", where="configs.toml")
    return _Same(
        entry["argument"], tuple(entry.get("also", ())), tuple(entry["config"]), entry.get("default"), kind,
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
        if found is None and same.argument not in _WITH_DEFAULT:
            hint = "it is needed for Megatron's arguments"
            raise LayoutError(f"{same.config[0]} is not there", where=where, hint=hint)
        if found not in (None, ""):
            values[same.argument] = same.to_argument(found, config)
    heads = values["num_attention_heads"]
    groups = values.setdefault("num_query_groups", heads)
    values["group_query_attention"] = groups != heads
    values.setdefault("kv_channels", values["hidden_size"] // heads)
    values.setdefault("ffn_hidden_size", 4 * values["hidden_size"])
    notes = list(_differences(config, model, where))
    latent = bool(values.get("multi_latent_attention"))
    stretched, said = rope_arguments(_table().rope, config, latent=latent)
    values |= stretched
    notes += said
    return Translated(values, tuple(notes))


def _lookup(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for word in key.split("."):
        value = value.get(word) if isinstance(value, Mapping) else None
    return value


def _differences(config: Mapping[str, Any], model: _Model, where: str) -> Iterator[str]:
    """What Megatron has no argument for.

    Raises:
        LayoutError: weights would not be what Megatron takes them for.
    """
    for key, expected in model.config.items():
        found = config.get(key, expected)
        if found is None or found == expected:
            continue
        if key == "use_parallel_residual":
            yield "use_parallel_residual: Megatron's layers compute attention and MLP one after the other"
            continue
        raise LayoutError(
            f"{key} is {found!r}, expected {expected!r}: Megatron's arguments for other models are not known",
            where=where,
        )
    writes_window = any(same.kind == "window" and same.is_of(model.type) for same in _table().same)
    if config.get("sliding_window") and config.get("use_sliding_window", True) and not writes_window:
        yield f"sliding_window {config['sliding_window']} is not among the arguments written: use --window-size"
    if model.type in _SCALED_EMBEDDING:
        yield f"{model.type} scales its embedding and gates with GeLU: Megatron-LM has no arguments for either"


def config_of(args: Mapping[str, Any], model_types: Sequence[str], *, n_tokens: int | None) -> Translated:
    """``config.json`` for the model of a run with these arguments; without values where they do not suffice.

    Args:
        args: all arguments that are known.
        model_types: the types that the model's names allow.
        n_tokens: rows of the vocabulary that is written, None where there is no embedding.
    """
    fitting = [model for name in model_types if (model := _table().models.get(name)) and not _against(args, model)]
    if not fitting:
        against = [
            text for name in model_types if name in _table().models for text in _against(args, _table().models[name])
        ]
        return Translated({}, (f"no config.json is written: {'; '.join(against[:3]) or 'no model type is known'}",))
    model = fitting[0]
    values: dict[str, Any] = {"architectures": [model.architecture], "model_type": model.type, **model.config}
    missing: list[str] = []
    known = {**args, "num_query_groups": _n_groups(args)}
    for same in _table().same:
        if not same.is_of(model.type):
            continue
        found = next((known[name] for name in (same.argument, *same.also) if known.get(name) is not None), None)
        value = None if found is None else same.to_config(found, args)
        if value is None and same.default is None:
            missing.append(same.argument)
        elif value is not None:
            values[same.config[0]] = value
        elif same.default == "":
            values[same.config[0]] = None  # transformers has a number where the key is left out
    if n_tokens is not None:
        values["vocab_size"] = n_tokens
        missing = [name for name in missing if name != "vocab_size"]
    stretched, unsaid = rope_config(_table().rope, args)
    missing += unsaid
    if stretched is not None:
        values["rope_scaling"] = stretched
    if missing:
        return Translated(
            {}, (f"no config.json is written: the checkpoint does not tell args.{', args.'.join(missing)}",)
        )
    notes = [f"config.json is made of the run's arguments, for model_type {model.type}"]
    if len(fitting) > 1:
        notes[0] += f" ({' and '.join(one.type for one in fitting[1:])} would fit as well)"
    notes.append("tokens for begin, end and padding are the tokenizer's: config.json does not name them")
    return Translated(values, tuple(notes))


def _n_groups(args: Mapping[str, Any]) -> Any:
    """KV groups; Megatron ignores ``num_query_groups`` without ``group_query_attention``."""
    if args.get("group_query_attention") is False or args.get("num_query_groups") is None:
        return args.get("num_attention_heads")
    return args["num_query_groups"]


def _against(args: Mapping[str, Any], model: _Model) -> list[str]:
    """Arguments that models of this type do not have."""
    ignored = {"attention_dropout", "hidden_dropout", "add_position_embedding", "moe_router_load_balancing_type"}
    ignored |= {same.argument for same in _table().same if same.is_of(model.type)}
    ignored |= {name for kind in _table().rope if kind.fits_arguments(args) for name in kind.set}
    others = [
        f"args.{name} is {args[name]!r}, {model.type} has {value!r}"
        for name, value in model.arguments.items()
        if name not in ignored and args.get(name) is not None and args[name] != value
    ]
    return others + [
        f"args.{name} is {args[name]!r}, {model.type} has none"
        for name in _table().none
        if name not in ignored and args.get(name)
    ]
