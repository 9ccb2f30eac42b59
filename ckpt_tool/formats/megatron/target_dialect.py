"""A dialect is what a version of mcore expects of a distributed checkpoint; versions are of the run that is to load it.

Sources: megatron-core 0.8, 0.12.3, 0.16.1 and 0.19.2, ``dist_checkpointing`` and ``optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import re

from ckpt_tool.errors import UsageError
from ckpt_tool.records import dataclass

__all__ = ["Dialect", "dialect_of"]

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\w+)*")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one version writes what others write otherwise."""

    has_common_file: bool = False
    """``common.pt`` instead of an object (until 0.18)."""
    is_flattened: bool = False
    """Optimizer state as flattened ranges (until 0.14), read by versions until 0.15."""
    has_content: bool = True
    """``content_metadata`` says what there is (from 0.13 on)."""
    has_chained_keys: bool = False
    """Keys of several optimizers' state have the optimizer's number in front (until 0.13)."""

    @property
    def sharding_type(self) -> str:
        """What the distributed optimizer's state says of its form."""
        return "fully_sharded_model_space" if self.is_flattened else "fully_reshardable"

    @property
    def master_slot(self) -> str:
        """What weights in the optimizer's precision are called."""
        return "fp32_param" if self.is_flattened else "param"


def dialect_of(version: str | None) -> Dialect:
    """The dialect of a version; of the newest one for None.

    >>> dialect_of("0.12.3").sharding_type, dialect_of("0.16").has_common_file
    ('fully_sharded_model_space', True)

    Raises:
        UsageError: it is no version, or one from before distributed checkpoints.
    """
    if version is None:
        return Dialect()
    match = _VERSION.fullmatch(version)
    if match is None:
        raise UsageError(f"{version!r} is no version of megatron-core", hint="for example --mcore-version 0.12")
    number = (int(match[1]), int(match[2]))
    if number < (0, 8):
        raise UsageError(f"megatron-core {version} is older than what is known", hint="0.8 and later are")
    return Dialect(
        has_common_file=number < (0, 19),
        is_flattened=number < (0, 15),
        has_content=number >= (0, 13),
        has_chained_keys=number < (0, 14),
    )
