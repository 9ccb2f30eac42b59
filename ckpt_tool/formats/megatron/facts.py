"""Facts of a run, as its pickled ``args`` (an ``argparse.Namespace``) tell them; absent ones are None, never guessed.

Knows the names of Megatron-LM's arguments, nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ckpt_tool.formats._pickle.nodes import Stub
from ckpt_tool.manifest.model import MeshInfo
from ckpt_tool.records import dataclass

__all__ = ["Facts", "facts_of"]

_MAX_NUMBER = 1 << 48


@dataclass(frozen=True, slots=True)
class Facts:
    """Arguments of the run that saved; fields have the names of Megatron-LM's arguments."""

    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    expert_model_parallel_size: int | None = None
    expert_tensor_parallel_size: int | None = None
    context_parallel_size: int | None = None
    data_parallel_size: int | None = None
    world_size: int | None = None
    rank: int | None = None
    """The rank that pickled them."""
    num_layers: int | None = None
    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    group_query_attention: bool | None = None
    kv_channels: int | None = None
    num_experts: int | None = None
    mtp_num_layers: int | None = None
    """Layers for multi-token prediction, behind the others."""
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    make_vocab_size_divisible_by: int | None = None
    ddp_bucket_size: int | None = None
    swiglu: bool | None = None
    rotary_interleaved: bool | None = None
    apply_layernorm_1p: bool | None = None
    moe_grouped_gemm: bool | None = None
    untie_embeddings_and_output_weights: bool | None = None
    overlap_grad_reduce: bool | None = None
    use_distributed_optimizer: bool | None = None
    transformer_impl: str | None = None
    no_save_rng: bool | None = None
    """Whether random states were left out on purpose."""

    @property
    def tp(self) -> int | None:
        """Tensor-parallel size."""
        return self.tensor_model_parallel_size

    @property
    def pp(self) -> int | None:
        """Pipeline-parallel size."""
        return self.pipeline_model_parallel_size

    @property
    def vpp(self) -> int:
        """Model chunks per pipeline stage, 1 without virtual stages."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def ep(self) -> int:
        """Expert-parallel size, 1 where nothing says otherwise."""
        return self.expert_model_parallel_size or 1

    @property
    def etp(self) -> int | None:
        """Tensor-parallel size of experts; Megatron's own default is that of the rest."""
        return self.expert_tensor_parallel_size or self.tp

    @property
    def parts_experts(self) -> bool:
        """Whether experts have an optimizer of their own (mcore 0.19, ``tensor_parallel/layers.py``)."""
        return self.ep > 1 or self.etp != self.tp

    @property
    def n_expert_data_parallel(self) -> int | None:
        """Ranks that hold the same experts; None where the sizes do not tell."""
        n_ranks = (self.pp or 0) * (self.etp or 0) * self.ep
        return self.world_size // n_ranks if n_ranks and self.world_size else None

    def mesh(self, evidence: str = "args of the run") -> MeshInfo | None:
        """Pipeline, data, context and tensor parallelism, as Megatron orders ranks (tensor parallel ones adjoin)."""
        if self.tp is None or self.pp is None:
            return None
        sizes = {"pp": self.pp, "dp": self.data_parallel_size, "cp": self.context_parallel_size, "tp": self.tp}
        known = {axis: size for axis, size in sizes.items() if size is not None and (size > 1 or axis in ("pp", "tp"))}
        return MeshInfo(tuple(known), tuple(known.values()), evidence)

    def described(self) -> dict[str, Any]:
        """All known facts of the whole run, by their names; JSON-able."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None and name != "rank"}


def facts_of(args: object) -> Facts:
    """The facts in a pickled ``args``; all unknown when it is none, one unknown when its value is of another type."""
    found: Mapping[str, Any] = args.state if isinstance(args, Stub) and isinstance(args.state, dict) else {}
    taken: dict[str, Any] = {}
    for field in fields(Facts):
        value = found.get(field.name)
        is_sound = not isinstance(value, int) or abs(value) < _MAX_NUMBER
        if is_sound and type(value).__name__ == str(field.type).partition(" ")[0]:
            taken[field.name] = value
    return Facts(**taken)
