"""Choices of whoever wants a target written, for those writers that know them."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tool.dtypes import DType
from ckpt_tool.records import dataclass, field

__all__ = ["WriterOptions"]


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """Choices that only some writers look at."""

    max_shard_nbytes: int | None = None
    """safetensors: start a new file before this many payload bytes; None for one file."""
    file_name: str | None = None
    """Single-file formats: the name of the file, None for the format's usual one."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """safetensors: extra ``__metadata__``."""
    origins: Mapping[str, int] = field(default_factory=dict)
    """safetensors: by fqn, the byte of a source file at which a tensor begins whose bytes are one run there."""
    vpp: int = 1
    """Formats that record the mesh: model chunks per pipeline stage."""
    first_stage_layers: int | None = None
    """Likewise: layers of the first stage, None for an even spread."""
    last_stage_layers: int | None = None
    """Likewise: of the last stage."""
    expert_grid: tuple[int, int] | None = None
    """Megatron: expert-parallel ranks, and tensor-parallel ones of experts, where these are no axes of the mesh."""
    mcore_version: str | None = None
    """Megatron: the version of megatron-core that is to load it, None for the newest known."""
    fresh_random_states: bool = False
    """Megatron: write random states as at the start of a run."""
    zero_stage: int | None = None
    """DeepSpeed: how much ranks share out, 1 to 3; None as in the source."""
    model_dtype: DType | None = None
    """Formats that record it: the dtype that the model's weights shall have; None as in the source."""
    sidecar: bool | None = None
    """dcp: write the metadata once more as Arrow columns; None where there are many chunks."""
