"""Names of experts: ``...deepspeed_experts.<number>...``, counted over all ranks in file names, per rank in optimizers.

Those that AutoEP has placed are called ``...experts.w1.<number>``.
Expert-parallel rank ``e`` of a layer with ``n`` experts on each rank has those from ``e * n`` on (``moe/layer.py``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["expert_of", "global_names", "is_expert", "is_packed", "local_names"]

_EXPERT = re.compile(r"(?P<prefix>.*deepspeed_experts\.)(?P<number>[0-9]+)(?P<rest>\..*)")
_PACKED = re.compile(r"(?P<prefix>(?:.*\.)?experts\.w[123]\.)(?P<number>[0-9]+)(?P<rest>)")


def is_expert(name: str) -> bool:
    """Whether a parameter is one of an expert's."""
    return expert_of(name) is not None


def is_packed(name: str) -> bool:
    """Whether it is an expert's part of a tensor in which AutoEP has those of several."""
    return "experts.w" in name and _PACKED.fullmatch(name) is not None


def expert_of(name: str) -> tuple[str, int, str] | None:
    """What a name has before its expert's number, the number, and what it has behind; None when it has none.

    >>> expert_of("moe.deepspeed_moe.experts.deepspeed_experts.3.up.weight")
    ('moe.deepspeed_moe.experts.deepspeed_experts.', 3, '.up.weight')
    """
    if "experts." not in name:
        return None
    match = _EXPERT.fullmatch(name) or _PACKED.fullmatch(name)
    return None if match is None else (match["prefix"], int(match["number"]), match["rest"])


def global_names(names: Sequence[str], ep: int) -> tuple[str, ...]:
    """Names with local expert numbers, as rank 0 has them, turned into those of expert-parallel rank ``ep``."""
    parsed = [(name, expert_of(name)) for name in names]
    n_local: dict[str, int] = {}
    for _, found in parsed:
        if found is not None:
            n_local[found[0]] = max(n_local.get(found[0], 0), found[1] + 1)
    return tuple(
        name if found is None else f"{found[0]}{ep * n_local[found[0]] + found[1]}{found[2]}" for name, found in parsed
    )


def local_names(names: Sequence[str], ep_size: int) -> list[list[tuple[str, str]]]:
    """By expert-parallel rank: ``(name, name with the local number)`` of experts, in the order of their modules.

    ``names`` are those of all experts, each layer's parameters in their order; the number of experts of each layer is
    a multiple of ``ep_size``.

    >>> local_names(["m.deepspeed_experts.0.w", "m.deepspeed_experts.1.w"], 2)[1]
    [('m.deepspeed_experts.1.w', 'm.deepspeed_experts.0.w')]
    """
    members: dict[str, set[int]] = {}
    rests: dict[str, int] = {}
    parsed = [(name, *found) for name in names if (found := expert_of(name)) is not None]
    for _, prefix, number, rest in parsed:
        members.setdefault(prefix, set()).add(number)
        rests.setdefault(rest, len(rests))
    order = {prefix: place for place, prefix in enumerate(members)}
    parsed.sort(key=lambda entry: (order[entry[1]], entry[2], rests[entry[3]]))
    found_names: list[list[tuple[str, str]]] = [[] for _ in range(ep_size)]
    for name, prefix, number, rest in parsed:
        n_local = len(members[prefix]) // ep_size
        found_names[number // n_local].append((name, f"{prefix}{number % n_local}{rest}"))
    return found_names
