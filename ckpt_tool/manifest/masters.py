"""A master is the fp32 copy of a weight that an optimizer updates; the weight itself may be a rounding of it."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from ckpt_tool.manifest.alias import with_aliases
from ckpt_tool.manifest.model import Blob, Manifest, TensorMeta
from ckpt_tool.manifest.optimizer import optimizer_views
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.manifest.tables import SECTIONS, TensorTable

__all__ = ["MASTER_STATES", "module_names", "with_masters"]

MASTER_STATES = frozenset({"fp32", "fp32_param", "master_param", "master", "param", "shard_casted_float16_groups"})
"""What a master is called: by DeepSpeed, Megatron (with and without the distributed optimizer), others, and veScale."""

_MODULE_KEYS = ("module", "model", "state_dict")


def module_names(tensors: TensorTable, parameters: AbstractSet[str]) -> dict[str, str]:
    """By fqn of each weight: its name in the module, as the optimizer, which has ``parameters``, calls it.

    A first key that stands for the module is no part of it; of names without keys, where the optimizer lacks it too.
    """
    found: dict[str, str] = {}
    is_long = any(meta.fqn in parameters for meta in tensors if meta.section == "model" and len(meta.path) == 1)
    for meta in tensors:
        if meta.section == "model":
            first, _, rest = meta.fqn.partition(".")
            is_keyed = first in _MODULE_KEYS and bool(rest) and (len(meta.path) > 1 or not is_long)
            found[meta.fqn] = rest if is_keyed else meta.fqn
    return found


def with_masters(manifest: Manifest, blobs: Sequence[Blob]) -> tuple[Manifest, int]:
    """The model's tensors, with the bytes of masters where the optimizer has them; and how many have none.

    Names, paths and order stay those of the weights. Second names of shared parameters follow the first, as far as the
    source records them.
    """
    tensors, model = manifest.tensors, SECTIONS.index("model")
    masters = _masters(manifest, blobs)
    weights = [row for row in range(len(tensors)) if tensors.section[row] == model]
    aliases = []
    for row in weights:
        own, source = tensors.record(row), tensors.record(masters.get(row, row))
        aliases.append((masters.get(row, row), TensorMeta(f"@{own.fqn}", source.dtype, own.shape, "model", own.path)))
    every = with_aliases(manifest, aliases)
    found = only_tensors(every, range(len(tensors), len(every.tensors)))
    named = tensors.take(weights)
    return found.replace(tensors=replace(found.tensors, fqns=named.fqns, paths=named.paths)), len(weights) - len(
        masters
    )


def _masters(manifest: Manifest, blobs: Sequence[Blob]) -> dict[int, int]:
    """Rows of masters by row of the weight."""
    tensors = manifest.tensors
    states = [state for view in optimizer_views(manifest.replace(blobs=tuple(blobs))) for state in view.named().items()]
    by_fqn = module_names(tensors, {key for key, _ in states if isinstance(key, str)})
    rows = {name: tensors.index[fqn] for fqn, name in by_fqn.items()}
    found: dict[int, int] = {}
    for key, own in states:
        weight = rows.get(by_fqn.get(str(key), str(key)))
        fqn = next((fqn for state, fqn in own.items() if state in MASTER_STATES), "")
        master = tensors.index.get(fqn)
        if weight is not None and master is not None and tensors.shape_of(master) == tensors.shape_of(weight):
            found[weight] = master
    for second, first in manifest.info.get("shared", {}).items():
        if second in rows and first in rows and rows[first] in found:
            found[rows[second]] = found[rows[first]]
    return found
