"""Models from before mcore: state dicts that are nested under ``language_model``, under names of their own.

Only names differ: since checkpoint version 2 the rows of queries, keys and values stand by group, as mcore has them.
Source: Megatron-LM 23.x, ``training/checkpointing.py``, ``fix_query_key_value_ordering``; ``model/gpt_model.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_tool.errors import Unsupported
from ckpt_tool.formats._pickle.nodes import Stub
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats.megatron.parallel import built_in_rules

__all__ = ["is_before_mcore", "with_todays_names"]

_MODEL = "language_model"
_BY_GROUP = 2.0
"""The first checkpoint version whose queries, keys and values stand by group."""
_STATE = "_extra_state"


def is_before_mcore(chunk: Mapping[str, Any]) -> bool:
    """Whether a model chunk's state dict is one of these."""
    return any(key == _MODEL or key.startswith(f"{_MODEL}.") for key in chunk)


def with_todays_names(chunk: Mapping[str, Any], root: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The chunk's tensors under the names that mcore's modules have, in their order.

    Args:
        chunk: a model chunk's state dict.
        root: the file that it is of, with the checkpoint's version and the run's arguments.
        where: names the file in messages.

    Raises:
        Unsupported: another order of rows, or a tensor that has no name today.
    """
    version = root.get("checkpoint_version")
    if not isinstance(version, int | float) or version < _BY_GROUP:
        raise Unsupported(
            f"a model from before mcore, checkpoint version {version!r}: queries, keys and values stand in another "
            "order of rows than since version 2",
            where=where,
            hint="load it with the Megatron-LM that wrote it, and save it again",
        )
    args = root.get("args")
    glu = args.attribute("glu_activation") if isinstance(args, Stub) else None
    if glu:
        raise Unsupported(
            f"a model of Megatron-LLM, args.glu_activation {glu!r}: its gate stands behind the up projection",
            where=where,
            hint="convert it with the tools of Megatron-LLM",
        )
    found: dict[str, Any] = {}
    for name, value in _flat(chunk, ""):
        matches = ((pattern.fullmatch(name), to) for pattern, to in built_in_rules().before_mcore)
        named = next((match.expand(to) for match, to in matches if match is not None), None)
        if named is not None:
            found.setdefault(named, value)
        elif isinstance(value, TensorRef) and not name.endswith(_STATE):
            raise Unsupported(
                f"a model from before mcore, whose {name!r} has no name in mcore's models",
                where=where,
                hint="load it with the Megatron-LM that wrote it, and save it with --use-mcore-models",
            )
    return found


def _flat(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested dicts."""
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner
