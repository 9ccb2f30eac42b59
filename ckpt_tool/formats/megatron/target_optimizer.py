"""The optimizer's part of a common state that is being written: hyperparameters by group, for the target's optimizers.

Megatron has one optimizer, or with more than one expert-parallel rank two, the second one of the experts; what a group
is for stands in the group, so groups move between them. Source: mcore 0.19 ``optimizer/optimizer.py``,
``param_group_identifier_keys``, and ``optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpt_tool.formats.megatron.parameter_groups import EXPERTS, own_groups
from ckpt_tool.manifest.model import Blob

__all__ = ["BUCKET_FACTS", "SHARDED_PART", "combined", "groups_of", "parts_of"]

SHARDED_PART = re.compile(
    r"(?:chained_(?P<outer>\d+)\.)?optimizer\.(?:chained_(?P<inner>\d+)\.)?distributed\.dp_group_idx_(?P<group>\d+)"
    r"\.(?P<name>\w+)/shard_0_1"
)
"""Objects of the forms that belong to one grid: a part of the optimizer's entry for each model-parallel rank."""
BUCKET_FACTS = frozenset({"per_bucket_numel", "per_bucket_numel_unpadded", "param_state"})
"""Such parts that describe buckets, or are them."""
_IDENTIFIERS = (
    "max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "pre_wd_mult", "optimizer", "lr_mult", "pre_lr_mult",
    "is_decoupled_lr", "default_config",
)  # fmt: skip


def parts_of(entry: Any, blobs: Iterable[Blob]) -> list[dict[str, Any]]:
    """The entries of a source's optimizers, whatever holds them.

    Args:
        entry: ``optimizer`` of its common state: one entry, or several in a list or by number; None without.
        blobs: its objects, of which those are taken that hold parts of such entries; groups that only some ranks have
            are united.
    """
    if isinstance(entry, Mapping) and all(type(key) is int for key in entry):
        entry = [entry[key] for key in sorted(entry)]
    found: dict[int, dict[str, Any]] = {}
    for number, part in enumerate(entry if isinstance(entry, list) else [] if entry is None else [entry]):
        if isinstance(part, Mapping):
            found[number] = dict(part)
    for blob in blobs:
        match = SHARDED_PART.fullmatch(blob.fqn)
        if match is None or match["name"] in BUCKET_FACTS:
            continue
        part = found.setdefault(int(match["outer"] or match["inner"] or 0), {})
        known = part.setdefault(match["name"], blob.value)
        if known is not blob.value and match["name"] == "optimizer":
            part["optimizer"] = {**known, "param_groups": _united([*own_groups(known), *own_groups(blob.value)])}
    return [found[number] for number in sorted(found)]


def groups_of(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups of all optimizers, from `parts_of`."""
    return [dict(group) for part in parts for group in own_groups(part)]


def combined(parts: Sequence[Mapping[str, Any]], *, is_distributed: bool, has_expert_optimizer: bool) -> Any:
    """The entry of the target, one dict or two by number.

    Args:
        parts: from `parts_of`, at least one.
        is_distributed: whether it is the distributed optimizer's.
        has_expert_optimizer: whether experts have an optimizer of their own.
    """
    groups = groups_of(parts)
    if not has_expert_optimizer:
        return _part(parts[0], _united([{**group, EXPERTS: False} for group in groups]), is_distributed)
    dense = [group for group in groups if not group.get(EXPERTS)]
    experts = [group for group in groups if group.get(EXPERTS)]
    # One optimizer for all has no groups of experts: they are in those of the rest.
    experts = experts or [{**group, EXPERTS: True} for group in dense]
    return {0: _part(parts[0], dense, is_distributed), 1: _part(parts[-1], experts, is_distributed)}


def _part(part: Mapping[str, Any], groups: list[dict[str, Any]], is_distributed: bool) -> dict[str, Any]:  # noqa: FBT001
    kept = {key: value for key, value in part.items() if key not in ("param_state", "param_state_sharding_type")}
    numberless = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    if isinstance(kept.get("optimizer"), Mapping):
        kept["optimizer"] = {**kept["optimizer"], "param_groups": numberless}
    else:
        kept["param_groups"] = numberless
    if is_distributed:
        kept["param_state_sharding_type"] = "fully_reshardable"
    return kept


def _united(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The first of each group that Megatron would tell apart."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        found.setdefault(tuple(repr(group.get(name)) for name in (*_IDENTIFIERS, EXPERTS)), dict(group))
    return list(found.values())
