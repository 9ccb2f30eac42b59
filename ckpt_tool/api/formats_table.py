"""The table of formats: what is read, what is written, and what proves it.

A proof is in the repository: a bundled checkpoint, written by the program that is named and read bit for bit, or a
test in which that program opens what was written here. What has no proof has none in this table either.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ckpt_tool.formats.registry import readers, writer_names

__all__ = ["FormatRow", "Proof", "format_rows"]


@dataclass(frozen=True, slots=True)
class Proof:
    """One program that a format was tried with."""

    direction: Literal["reads", "written for"]
    program: str
    """Name and version, and what it did."""
    evidence: str
    """Path in the repository: a fixture, or a test."""

    def __str__(self) -> str:
        """As it is listed."""
        return f"{self.direction} {self.program}"


@dataclass(frozen=True, slots=True)
class FormatRow:
    """One format."""

    name: str
    reads: bool
    writes: bool
    what: str
    """What people call it."""
    proofs: tuple[Proof, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


def _read(program: str, *fixtures: str) -> tuple[Proof, ...]:
    return tuple(Proof("reads", program, f"fixtures/{fixture}") for fixture in fixtures)


_FACTS: dict[str, tuple[str, tuple[Proof, ...]]] = {
    "dcp": (
        "torch.distributed.checkpoint",
        (
            *_read("torch 2.13.0: FSDP2", "torch/dcp_fsdp2_4r_fp32/ckpt"),
            *_read("torch 2.13.0: FSDP2 x TP", "torch/dcp_fsdp2_tp_2x2/ckpt"),
            *_read("torch 2.13.0: FSDP1", "torch/dcp_fsdp1_flat_2r/ckpt"),
            *_read("torch 2.13.0: DDP", "torch/dcp_ddp_dedup/ckpt"),
            *_read("torch 2.13.0: several files per rank", "torch/dcp_threads2/ckpt"),
            *_read("torch 2.13.0: no collectives", "torch/dcp_no_collectives/ckpt"),
            *_read("torch 2.13.0: safetensors items", "torch/dcp_safetensors/ckpt"),
            *_read("torch 2.1.2", "torch/dcp_old_t2.1.2/ckpt"),
            *_read("torchtitan: FSDP2 x TP", "deepspeed/torchtitan_dp2tp2/ckpt/checkpoint/step-3"),
        ),
    ),
    "dcp-hf": (
        "torch.distributed.checkpoint, Hugging Face writer",
        _read("torch 2.13.0: sharded", "torch/hf_dcp_sharded/ckpt"),
    ),
    "rank-files": ("one safetensors file per rank, with its place in the mesh", ()),
    "safetensors-index": (
        "safetensors in several files",
        (
            *_read("transformers 5.24.0: tied embeddings", "deepspeed/hf_st_tied/ckpt"),
            *_read("safetensors, with an index", "torch/hf_sharded/ckpt"),
            *_read("torch 2.13.0: consolidated", "torch/hf_dcp_consolidated/ckpt"),
        ),
    ),
    "safetensors": (
        "safetensors, one file",
        (
            *_read("safetensors", "torch/hf_single/ckpt"),
            *_read("peft 0.21.2: LoRA", "deepspeed/peft_lora/ckpt"),
            Proof("written for", "safetensors 0.8.0: safe_open", "tests/formats/safetensors/test_writer.py"),
        ),
    ),
    "hf-bin": (
        "pytorch_model.bin in several files",
        (
            *_read("transformers 4 layout", "deepspeed/hf_bin_untied/ckpt"),
            *_read("torch 2.13.0", "torch/hf_pytorch_bin/ckpt"),
        ),
    ),
    "torch-ranks": (
        "one torch.save file per rank",
        (
            *_read("torch 2.13.0: FSDP1 ShardedTensor", "torch/fsdp1_per_rank_pt_2r/ckpt"),
            *_read("torch 2.13.0: FSDP2 DTensor, verl's names", "torch/verl_4r_bf16/ckpt"),
            *_read("torch 2.13.0: DTensor, 2 x 2", "torch/verl_2d/ckpt"),
        ),
    ),
    "torch-save": (
        "one torch.save file",
        (
            *_read("torch 2.13.0: a training state", "torch/pt_files/ckpt/train_namespace.pt"),
            *_read("torch 2.13.0: the legacy stream", "torch/pt_files/ckpt/train_namespace_legacy.pt"),
            *_read("torch 2.13.0: a whole module", "torch/pt_files/ckpt/whole_module.pt"),
            *_read("torch 2.13.0: big-endian", "torch/pt_files/ckpt/bigendian.pt"),
        ),
    ),
    "accelerate": (
        "the folder that accelerate saves: a checkpoint each for model and optimizer",
        _read("accelerate, FSDP2", "deepspeed/accelerate_fsdp2/ckpt"),
    ),
}


def format_rows() -> tuple[FormatRow, ...]:
    """Formats of this package, then those of installed extensions, as they are registered."""
    read = [reader.name for reader in readers()]
    written = writer_names()
    return tuple(
        FormatRow(name, name in read, name in written, *_FACTS.get(name, ("from an extension", ())))
        for name in dict.fromkeys((*read, *written))
    )
