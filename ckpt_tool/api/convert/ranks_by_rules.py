"""Parts of tensors that tensor-parallel ranks saved under one name, put together as the rules of their model say.

Nothing in the files says how they join. What the ranks hold tells how many of them are tensor-parallel ones, and which
are copies of others; the rules, which go by names, tell along which dimension each tensor is cut, and which parts of a
fused one are cut by themselves. Where the two do not agree, nothing is joined.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.convert.stored_boxes import numbered_parameters
from ckpt_tool.api.rules import rules_for
from ckpt_tool.checksum import crc32
from ckpt_tool.errors import IntegrityError, LayoutError
from ckpt_tool.formats.base import Checksum
from ckpt_tool.geometry.box import Box
from ckpt_tool.layout.mesh import Mesh
from ckpt_tool.layout.names import spellings
from ckpt_tool.layout.place import place
from ckpt_tool.layout.placement import Shard
from ckpt_tool.layout.resolve import Notes, resolve
from ckpt_tool.layout.rules import RuleSet
from ckpt_tool.layout.views import Part, View, apply_views
from ckpt_tool.manifest.concatenate import fqn_without_rank, names_of_ranks, path_without_rank, split_ranks
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, some_of

__all__ = ["JoinByRules", "groups_of_ranks", "join_by_rules"]


Shape: TypeAlias = tuple[int, ...]


Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Ranks that hold the same of a tensor, in order of the first of each group: one group for each part."""


def groups_of_ranks(checkpoint: Checkpoint, fqns: Sequence[str]) -> dict[str, Groups]:
    """Which ranks hold the same of tensors that differ between some of them; as many groups for each tensor.

    Ranks of another pipeline stage have other tensors, and what several stages have is in copies. Costs the checksums
    that the files record, or the bytes where there are none.

    Args:
        checkpoint: what ``fqns`` are of; a tensor that ranks have apart is named without its rank.
        fqns: tensors without a placement, not the same on all ranks.

    Raises:
        IntegrityError: tensors have other numbers of groups, or groups of one have different sizes.
    """
    found: dict[str, Groups] = {}
    for fqn, by_rank in _values(checkpoint, fqns).items():
        alike: dict[object, list[int]] = {}
        for rank, value in sorted(by_rank.items()):
            alike.setdefault(value, []).append(rank)
        found[fqn] = tuple(sorted(map(tuple, alike.values())))
        if len({len(group) for group in found[fqn]}) > 1:
            raise IntegrityError(
                f"{fqn!r}: ranks {some_of(found[fqn])} hold the same, which are no equal numbers of copies",
                where=checkpoint.url,
                hint=f"say how it joins by a rule of its own: --unequal '{fqn}=first' or '{fqn}=concat:DIM'",
            )
    most = max(found, key=lambda fqn: len(found[fqn]))
    others = [fqn for fqn, groups in found.items() if len(groups) < len(found[most])]
    if others:
        raise IntegrityError(
            f"ranks hold {counted(len(found[most]), 'part')} of {most!r}, and {len(found[others[0]])} of {others[0]!r}",
            where=checkpoint.url,
            hint=f"say how {some_of(others)} joins by a rule of its own: --unequal GLOB=first or GLOB=concat:DIM",
        )
    return found


def _said(groups: Collection[Groups]) -> str:
    """What tensors are put together of, as a note says it.

    >>> _said([((0, 2), (1, 3))])
    '2 tensor-parallel ranks (0, 1), 2 copies of each'
    """
    first, *others = dict.fromkeys(groups)
    said = counted(len(first), "tensor-parallel rank")
    if others:
        n_ranks = len({rank for group in groups for ranks in group for rank in ranks})
        return f"{said}, of {n_ranks:,} with other stages and copies"
    copies = f", {len(first[0])} copies of each" if len(first[0]) > 1 else ""
    return f"{said} ({some_of([group[0] for group in first], 8)}){copies}"


@dataclass(frozen=True, slots=True)
class JoinByRules:
    """Which tensors are joined, and by what."""

    groups: Mapping[str, Groups]
    """By name."""
    rules: RuleSet
    notes: tuple[str, ...]

    @property
    def ranks(self) -> str:
        """Which ranks hold the parts, as a note says it."""
        return _said(self.groups.values())

    def apply(self, manifest: Manifest) -> Manifest:
        """``manifest``, a part of the one that this was made for, with its tensors whole.

        Raises:
            LayoutError: parts are not as the rules cut them.
        """
        return _join(manifest, self.groups, self.rules)


def join_by_rules(
    checkpoint: Checkpoint, parted: Sequence[str], same: Sequence[str], path: str | os.PathLike[str] | None
) -> JoinByRules:
    """How rules put together what ranks hold.

    Args:
        checkpoint: what the names are of.
        parted: tensors that differ between ranks; one that ranks have apart is named without its rank.
        same: tensors that are equal on all ranks, which rules should not cut.
        path: file of the rules; None for those of the family that the names fit.

    Raises:
        LayoutError: no family fits, or names without a rule.
        IntegrityError: what ranks hold is not what the rules say.
    """
    manifest = checkpoint.manifest
    rules, evidence = rules_for([fqn_without_rank(fqn) for fqn in manifest.tensors.fqns], path, is_optional=False)
    cut = _cut(manifest, same, rules)
    if cut:
        raise IntegrityError(
            f"{counted(len(cut), 'tensor', 'are')} the same on all ranks, and the rules of {rules.name} say that ranks "
            f"hold parts ({some_of(cut)})",
            where=checkpoint.url,
            hint=f"say what they are behind the rules: --unequal '{cut[0]}=first', or =concat:DIM for equal parts",
        )
    groups = groups_of_ranks(checkpoint, parted)
    said = f"{counted(len(parted), 'tensor', 'are')} put together of {_said(groups.values())}, as rules say"
    return JoinByRules(groups, rules, (said, *evidence))


def _cut(manifest: Manifest, fqns: Sequence[str], rules: RuleSet) -> list[str]:
    """Those of ``fqns`` of which ranks hold parts, as rules say; names without a rule are not."""
    shapes = [manifest.tensor(fqn).shape for fqn in fqns]
    numbered = numbered_parameters(manifest)
    found = resolve(list(fqns), shapes, rules, default="replicate", numbered=numbered, notes=Notes())
    return [fqn for fqn, layout in zip(fqns, found.layouts, strict=True) if isinstance(layout.tp, Shard)]


def _join(manifest: Manifest, groups: Mapping[str, Groups], rules: RuleSet) -> Manifest:
    """``manifest`` with the tensors in ``groups`` whole, of the parts that the first rank of each group has.

    Raises:
        LayoutError: names without a rule, one that says the tensor is not cut, or parts that are not as it cuts.
    """
    fqns, n_parts = list(groups), len(next(iter(groups.values())))
    split = split_ranks(manifest, fqns)
    own = names_of_ranks(split.tensors.fqns)
    shapes = {fqn: [split.tensor(own[fqn][group[0]]).shape for group in groups[fqn]] for fqn in fqns}
    numbered = numbered_parameters(manifest)
    dims = [_dim_cut(fqn, shapes, rules, numbered, manifest.where) for fqn in fqns]
    whole = [_joined(shapes[fqn], dim) for fqn, dim in zip(fqns, dims, strict=True)]
    placed = place(fqns, whole, Mesh(("tp",), (n_parts,)), rules, numbered=numbered)
    views = []
    for row, fqn in enumerate(fqns):
        _check_reckoned(fqn, placed.layouts[row].parts, rules, manifest)
        boxes = [np.flatnonzero((placed.tensor == row) & (placed.rank == rank)) for rank in range(n_parts)]
        ndim = len(whole[row])
        held = [
            (own[fqn][group[0]], shape, placed.offsets[at, :ndim].tolist(), placed.sizes[at, :ndim].tolist())
            for group, shape, at in zip(groups[fqn], shapes[fqn], boxes, strict=True)
        ]
        try:
            parts = tuple(part for one in held for part in _parts(*one, dims[row]))
        except LayoutError as error:
            error.message = f"{fqn!r}: {error.message}, as the rules of {rules.name} cut {list(whole[row])}"
            error.where = manifest.where
            raise
        views.append(View(fqn, whole[row], parts, path=path_without_rank(split.tensor(held[0][0]).path)))
    parted = {name for fqn in fqns for name in own[fqn].values()}
    joined = apply_views(split, views, keep=[fqn for fqn in split.tensors.fqns if fqn not in parted])
    info = {
        key: [fqn for fqn in value if fqn not in shapes] if key in ("replicated_by_assumption", "kept_apart") else value
        for key, value in split.info.items()
    }
    order = dict.fromkeys(fqn_without_rank(fqn) if fqn in parted else fqn for fqn in split.tensors.fqns)
    return only_tensors(joined, [joined.tensor_id(fqn) for fqn in order]).replace(info=info)


def _check_reckoned(fqn: str, parts: tuple[int, ...], rules: RuleSet, manifest: Manifest) -> None:
    """Parts of a fused tensor that rules reckon from its shape are those of the config beside it.

    Whole tensors are looked at by such rules; what ranks have may hold a key and value head several times.

    Raises:
        LayoutError: they are others, or there is no config.
    """
    rule = next((found.rule for s in spellings(fqn, {}) if (found := rules.match(s.parameter))), None)
    if rule is None or all(isinstance(part, int) for part in rule.parts):
        return
    config = manifest.info.get("config", {})
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    width = config.get("head_dim") or (config.get("hidden_size") or 0) // (heads or 1)
    known = (heads * width, kv_heads * width, kv_heads * width) if heads and kv_heads and width else None
    if parts != known:
        said = "no config.json tells them" if known is None else f"config.json says {list(known)}"
        raise LayoutError(
            f"the rules of {rules.name} reckon parts of {list(parts)} in {fqn!r} from its shape, and {said}",
            where=manifest.where,
            hint='give rules with the sizes: --unequal rules:FILE, kind = "fused", parts = [...]',
        )


def _dim_cut(
    fqn: str, shapes: Mapping[str, Sequence[Shape]], rules: RuleSet, numbered: Mapping[int, str], where: str
) -> int:
    """The dimension along which rules cut a tensor of which ranks hold parts, which ``shapes`` gives by name.

    Rules look at whole shapes, so each dimension is tried: the one is right whose joined shape is cut along itself.

    Raises:
        LayoutError: no rule, none that cuts it, or parts that do not fit together.
    """
    parameter = next((s.parameter for s in spellings(fqn, numbered) if s.slot and s.parameter in shapes), fqn)
    names = list(dict.fromkeys((parameter, fqn)))
    for dim in range(len(shapes[fqn][0])):
        if any(dim >= len(shapes[name][0]) or not _fit_together(shapes[name], dim) for name in names):
            continue
        whole = [_joined(shapes[name], dim) for name in names]
        if resolve(names, whole, rules, default=None, numbered=numbered, notes=Notes()).layouts[-1].tp == Shard(dim):
            return dim
    raise LayoutError(
        f"{fqn!r} differs between ranks, which have {some_of(shapes[fqn])} of it, and the rules of {rules.name} do not "
        "cut it so",
        where=where,
        hint=f"say how it joins behind the rules: --unequal '{fqn}=first' or '{fqn}=concat:DIM'",
    )


def _fit_together(parts: Sequence[Shape], dim: int) -> bool:
    return len({(*part[:dim], *part[dim + 1 :]) for part in parts}) == 1


def _joined(parts: Sequence[Shape], dim: int) -> Shape:
    """The shape of ``parts`` one behind another along ``dim``."""
    return (*parts[0][:dim], sum(part[dim] for part in parts), *parts[0][dim + 1 :])


def _parts(
    name: str, shape: tuple[int, ...], offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], dim: int
) -> list[Part]:
    """Boxes of a whole tensor that lie one behind another along ``dim`` in a rank's own tensor ``name``.

    Raises:
        LayoutError: they are more or less than that.
    """
    parts, at = [], 0
    for offset, size in zip(offsets, sizes, strict=True):
        inside = (*(0,) * dim, at, *(0,) * (len(shape) - dim - 1))
        parts.append(Part(name, Box(inside, tuple(size)), tuple(offset), tuple(range(len(shape)))))
        at += size[dim]
    if at != shape[dim]:
        raise LayoutError(f"a rank has {shape[dim]:,} along dimension {dim}, not {at:,}")
    return parts


def _values(checkpoint: Checkpoint, fqns: Sequence[str]) -> dict[str, dict[int, object]]:
    """What tells the content of each tensor on each rank, equal for equal content."""
    apart = names_of_ranks(checkpoint.manifest.tensors.fqns)
    names = [name for fqn in fqns for name in apart.get(fqn, {0: fqn}).values()]
    manifest = checkpoint.resolve(names)
    part = only_tensors(manifest, [manifest.tensor_id(name) for name in names])
    recorded = {
        found.where: found.crc32
        for found in checkpoint.reader.checksums(checkpoint.source, part)
        if isinstance(found, Checksum) and found.crc32
    }
    values: dict[str, dict[int, object]] = {fqn: {} for fqn in fqns}
    for row in range(len(part.chunks)):
        chunk = part.chunks.record(row, part.tensors, part.files)
        crc = recorded.get(chunk.where)
        if crc is None:
            crc = crc32(checkpoint.store.read(chunk.where.path, chunk.where.offset, chunk.where.length))
        rank = -1 if chunk.rank is None else chunk.rank
        values[chunk.fqn if chunk.fqn in values else fqn_without_rank(chunk.fqn)][rank] = (
            crc, chunk.box.sizes, chunk.strides,
        )  # fmt: skip
    return values
