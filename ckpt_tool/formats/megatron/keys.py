"""A key is what mcore calls a tensor or object in a distributed checkpoint; here it becomes a name and a path.

Knows the shapes of keys, not the tensors behind them.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.records import dataclass

__all__ = [
    "MASTER_SLOTS",
    "BucketKey",
    "bucket_key",
    "common_prefix",
    "extra_key",
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
_EXTRA, _WORLD = "extra_state", "world"
_OF_RANK = re.compile(r"(?P<name>.*)@rank(?P<rank>\d{1,9})", re.DOTALL)
_EXTRA_KEY = re.compile(r"extra_state(?:\.(?P<name>[^/]*))?/shard_(?P<rank>\d{1,9})_\d{1,9}", re.DOTALL)


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


def extra_key(path: KeyPath, world_size: int) -> str | None:
    """The key of an object that a rank saves for itself, or of the record of all of them; None for anything else.

    The keys are those of Megatron's ShardedObjects in one dimension, ranks, so that its own loader takes them as such.

    >>> extra_key(("extra_state", "rng@rank3"), 4)
    'extra_state.rng/shard_3_4'
    """
    if len(path) != 2 or path[0] != _EXTRA:
        return None
    if path[1] == _WORLD:
        return f"{_EXTRA}/shard_0_1"
    match = _OF_RANK.fullmatch(str(path[1]))
    if match is None:
        return None
    name = match["name"].replace("%", "%25").replace("/", "%2F")  # Megatron takes one stroke in a key
    return f"{_EXTRA}.{name}/shard_{match['rank']}_{world_size}"


def named(key: str, prefix: str = "") -> tuple[str, KeyPath]:
    """Name and path of a key of a distributed checkpoint, whose weights have ``prefix`` in front.

    >>> named("optimizer.state.fp32_param.output_layer.weight")[0]
    'optimizer.state.param.output_layer.weight'
    >>> named("chained_1.optimizer.state.exp_avg.output_layer.weight")[0]
    'optimizer.state.exp_avg.output_layer.weight'
    >>> named("module.output_layer.weight", "module.")
    ('model.output_layer.weight', ('model', 'output_layer.weight'))
    >>> named("extra_state.rng/shard_3_4")
    ('extra_state.rng/shard_3_4', ('extra_state', 'rng@rank3'))
    """
    key = _CHAIN.sub("", key)
    if key.startswith(_STATE) and key.count(".") > 2:
        slot, _, parameter = key.removeprefix(_STATE).partition(".")
        return state_name(slot, parameter.removeprefix(prefix))
    if key.startswith(_OTHER):
        return key, (key,)
    extra = _EXTRA_KEY.fullmatch(key)
    if extra is not None:
        name = extra["name"]
        return key, (_EXTRA, _WORLD if name is None else f"{unquote(name)}@rank{extra['rank']}")
    return weight_name(key.removeprefix(prefix))


def common_prefix(keys: list[str]) -> str:
    """What wrappers put in front of every weight's key (``module.``), empty when not all have it."""
    weights = [key for key in keys if not key.startswith(_OTHER)]
    for prefix in _WRAPPERS:
        if weights and all(key.startswith(prefix) for key in weights):
            return prefix
    return ""
