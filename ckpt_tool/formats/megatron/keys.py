"""A key is what mcore calls a tensor or object in a distributed checkpoint; here it becomes a name and a path.

Knows the shapes of keys, not the tensors behind them.
"""

from __future__ import annotations

import re

from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.records import dataclass

__all__ = [
    "MASTER_SLOTS",
    "BucketKey",
    "bucket_key",
    "common_prefix",
    "named",
    "state_name",
    "weight_name",
]

MASTER_SLOTS = ("fp32_param", "master_param")
"""Other names of the slot ``param``: without the distributed optimizer and before 0.15, and precision-aware."""
_STATE = "optimizer.state."
_OTHER = ("optimizer.", "rng_state", "rerun_state_machine_state", "common_state", "opt_param_scheduler", "chained_")
_BUCKET = re.compile(
    r"(?:chained_(?P<chained>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<gbuf>\d+)"
    r"\.dtype_\((?P<param>[\w.]+), (?P<grad>[\w.]+)\)\.bucket_idx_(?P<bucket>\d+)\.(?P<slot>\w+)"
)
_CHAIN = re.compile(r"^chained_\d+\.(?=optimizer\.state\.)")
"""In front of the state of one of several optimizers, dense and experts', until 0.13; the weight tells whose it is."""
_CHAINED_INSIDE = re.compile(r"optimizer\.(?P<chained>chained_\d+)\.")
_WRAPPERS = ("module.", "model.")


@dataclass(frozen=True, slots=True)
class BucketKey:
    """A bucket of the distributed optimizer, one slot of it."""

    chained: int | None
    group: int
    """Which model-parallel rank it is of (``dp_group_idx``)."""
    gbuf: int
    """Which gradient buffer of that rank: by model chunk, then by dtypes."""
    dtype: str
    """Of the weights in it: ``bfloat16``."""
    bucket: int
    slot: str


def bucket_key(key: str) -> BucketKey | None:
    """What a key of a bucket says, None for other keys.

    >>> k = "optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_2.param"
    >>> bucket_key(k)
    BucketKey(chained=None, group=1, gbuf=0, dtype='bfloat16', bucket=2, slot='param')
    """
    inside = _CHAINED_INSIDE.match(key)
    if inside is not None:
        key = f"{inside['chained']}.optimizer.{key[inside.end() :]}"
    match = _BUCKET.fullmatch(key)
    if match is None:
        return None
    return BucketKey(
        chained=None if match["chained"] is None else int(match["chained"]),
        group=int(match["group"]),
        gbuf=int(match["gbuf"]),
        dtype=match["param"].rpartition(".")[2],
        bucket=int(match["bucket"]),
        slot=match["slot"],
    )


def weight_name(key: str) -> tuple[str, KeyPath]:
    """Name and path of the weight called ``key``."""
    return f"model.{key}", ("model", key)


def state_name(slot: str, key: str) -> tuple[str, KeyPath]:
    """Name and path of the optimizer state of the weight called ``key``."""
    slot = "param" if slot in MASTER_SLOTS else slot
    return f"{_STATE}{slot}.{key}", ("optimizer", "state", slot, key)


def named(key: str, prefix: str = "") -> tuple[str, KeyPath]:
    """Name and path of a key of a distributed checkpoint, whose weights have ``prefix`` in front.

    >>> named("optimizer.state.fp32_param.output_layer.weight")[0]
    'optimizer.state.param.output_layer.weight'
    >>> named("chained_1.optimizer.state.exp_avg.output_layer.weight")[0]
    'optimizer.state.exp_avg.output_layer.weight'
    >>> named("module.output_layer.weight", "module.")
    ('model.output_layer.weight', ('model', 'output_layer.weight'))
    """
    key = _CHAIN.sub("", key)
    if key.startswith(_STATE) and key.count(".") > 2:
        slot, _, parameter = key.removeprefix(_STATE).partition(".")
        return state_name(slot, parameter.removeprefix(prefix))
    if key.startswith(_OTHER):
        return key, (key,)
    return weight_name(key.removeprefix(prefix))


def common_prefix(keys: list[str]) -> str:
    """What wrappers put in front of every weight's key (``module.``), empty when not all have it."""
    weights = [key for key in keys if not key.startswith(_OTHER)]
    for prefix in _WRAPPERS:
        if weights and all(key.startswith(prefix) for key in weights):
            return prefix
    return ""
