"""The table of formats: what is read, what is written, and what proves it.

A proof is in the repository: a bundled checkpoint, written by the program that is named and read bit for bit, or a
test in which that program opens what was written here. What has no proof has none in this table either.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ckpt_tool.api.formats.others import OTHERS
from ckpt_tool.api.formats.proofs import Proof, read, written
from ckpt_tool.api.formats.recognised import RECOGNISED
from ckpt_tool.formats.registry import readers, writer_names
from ckpt_tool.records import dataclass

__all__ = ["FormatRow", "Proof", "format_rows"]


@dataclass(frozen=True, slots=True)
class FormatRow:
    """One format."""

    name: str
    reads: bool
    writes: bool
    what: str
    """What people call it."""
    proofs: tuple[Proof, ...] = ()
    recognised: str = ""
    """What of a file or folder tells that it is this format; empty for what is only written."""

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


_TORCH = "torch 2.13.0"


def _megatron(program: str, **checkpoints: str) -> tuple[Proof, ...]:
    """Proofs of reading checkpoints of the archive that they share."""
    folders = {what: f"megatron/checkpoints.tar.xz!{name}/ckpt" for what, name in checkpoints.items()}
    return read(program, **folders)


_FACTS: dict[str, tuple[str, tuple[Proof, ...]]] = {
    "dcp": (
        "torch.distributed.checkpoint",
        (
            *read(
                _TORCH,
                FSDP2="torch/dcp_fsdp2_4r_fp32/ckpt",
                FSDP2_with_TP="torch/dcp_fsdp2_tp_2x2/ckpt",
                FSDP1="torch/dcp_fsdp1_flat_2r/ckpt",
                DDP="torch/dcp_ddp_dedup/ckpt",
                several_files_per_rank="torch/dcp_threads2/ckpt",
                no_collectives="torch/dcp_no_collectives/ckpt",
                not_flattened="torch/dcp_no_flatten/ckpt",
                safetensors_items="torch/dcp_safetensors/ckpt",
                zstd="torch/dcp_zstd/ckpt",
            ),
            *read("torch 2.1.2", _="torch/dcp_old_t2.1.2/ckpt"),
            *read(_TORCH, keys_and_folders_of_torchtitan="deepspeed/torchtitan_dp2tp2/ckpt/checkpoint/step-3"),
            written(_TORCH, "dcp.load", "dcp/test_writer.py"),
            written(_TORCH, "dcp.load on other meshes", "dcp/test_writer_distributed.py"),
        ),
    ),
    "dcp-hf": (
        "torch.distributed.checkpoint in safetensors files",
        read(_TORCH, HuggingFaceStorageWriter="torch/hf_dcp_sharded/ckpt"),
    ),
    "rank-files": ("one safetensors file per rank, with its place in the mesh", ()),
    "safetensors-ranks": ("safetensors files of ranks (vLLM, TensorRT-LLM), put together by rules", ()),
    "safetensors-index": (
        "safetensors in several files",
        (
            *read("transformers 5.24.0", tied_embeddings="deepspeed/hf_st_tied/ckpt"),
            *read("safetensors", with_an_index="torch/hf_sharded/ckpt"),
            *read(_TORCH, HuggingFaceStorageWriter_consolidated="torch/hf_dcp_consolidated/ckpt"),
        ),
    ),
    "safetensors": (
        "safetensors; read as one file, written as one or several",
        (
            *read("safetensors", _="torch/hf_single/ckpt"),
            *read("peft 0.21.2", LoRA="deepspeed/peft_lora/ckpt"),
            written("safetensors 0.8.0", "safe_open", "safetensors/test_writer.py"),
        ),
    ),
    "hf-bin": (
        "pytorch_model.bin in several files",
        (
            *read("the layout of transformers 4", _="deepspeed/hf_bin_untied/ckpt"),
            *read(_TORCH, _="torch/hf_pytorch_bin/ckpt"),
        ),
    ),
    "torch-ranks": (
        "one torch.save file per rank",
        (
            *read(
                _TORCH,
                FSDP1_ShardedTensor="torch/fsdp1_per_rank_pt_2r/ckpt",
                FSDP2_DTensor_with_names_of_verl="torch/verl_4r_bf16/ckpt",
                DTensor_on_2x2="torch/verl_2d/ckpt",
            ),
            *read("accelerate", FSDP2_with_files_of_each_rank="deepspeed/accelerate_ranks/ckpt"),
            Proof("reads", _TORCH, "FSDP1 vectors, with a table", "tests/api/test_flat_table.py"),
            Proof("reads", "FairScale 0.4.13", "FSDP vectors, as recorded", "tests/consumers/test_fairscale.py"),
            written(_TORCH, "torch.load of each rank", "rank_pt/test_writer.py"),
        ),
    ),
    "torch-save": (
        "one torch.save file",
        (
            *read(
                _TORCH,
                training_state="torch/pt_files/ckpt/train_namespace.pt",
                legacy_stream="torch/pt_files/ckpt/train_namespace_legacy.pt",
                whole_module="torch/pt_files/ckpt/whole_module.pt",
                big_endian="torch/pt_files/ckpt/bigendian.pt",
                deflated="torch/pt_files/ckpt/repacked_deflate.pt",
            ),
            written(_TORCH, "torch.load(weights_only=True)", "torch_save/test_writer.py"),
        ),
    ),
    "bytecheckpoint": (
        "ByteCheckpoint: a run with its tracker, or one step",
        (
            *read(
                "bytecheckpoint 0.0.2",
                FSDP_decomposed="bytecheckpoint/fsdp_dec_4r/ckpt",
                HSDP="bytecheckpoint/hsdp_4r/ckpt",
                DDP="bytecheckpoint/ddp_2r/ckpt",
            ),
            Proof(
                "writes for",
                "bytecheckpoint 0.0.2",
                "bytecheckpoint.load as FSDP, HSDP, FSDP2 and DDP",
                "tests/consumers/test_bytecheckpoint.py",
            ),
        ),
    ),
    "torch-checkpointing": (
        "torch-checkpointing (meta-pytorch)",
        (
            *read(
                "torch-checkpointing 0.1.1",
                FSDP2_with_TP="torch_checkpointing/fsdp2_tp_2x2/ckpt",
                uneven="torch_checkpointing/fsdp2_tp_4x2_uneven/ckpt",
                strided="torch_checkpointing/strided_unresolved/ckpt",
                safetensors_items="torch_checkpointing/fsdp2_4r_safetensors/ckpt",
                odd_tensors_and_objects="torch_checkpointing/plain_odd/ckpt",
                without_a_resharder="torch_checkpointing/plain_noreshard/ckpt",
            ),
            Proof(
                "writes for",
                "torch-checkpointing 0.1.1",
                "CheckpointManager.load on 1, 2 and 4 ranks",
                "tests/consumers/test_torch_checkpointing.py",
            ),
        ),
    ),
    "megatron-dist": (
        "Megatron-Core's torch_dist",
        (
            *_megatron(
                "megatron-core 0.19.2",
                fully_reshardable="td_full_t2p2d2",
                singleton_local_shards="td_full_t4p1",
                dp_reshardable="td_dpr_t2p2d2",
                dp_reshardable_with_virtual_stages="dpr_vpp_p2",
                dp_reshardable_with_uneven_stages="dpr_uneven_p2",
                dp_reshardable_with_experts="moe_dpr_e2",
                dp_reshardable_with_experts_cut_otherwise="dpr_etp1_t2e2",
                dp_zero_gather_scatter="td_dpzero_t2p2",
                no_distributed_optimizer="td_nodist_t2",
                experts="moe_seq_e2",
            ),
            *_megatron(
                "megatron-core 0.12.3",
                fully_sharded_model_space="old012_fsms_t2p1d2",
                slices_that_cut_tensors="old012_fsms_t1d3",
            ),
            written("megatron-core 0.19.2", "load_checkpoint on other grids", "megatron/test_writer.py"),
        ),
    ),
    "megatron-zarr": (
        "Megatron-Core's zarr",
        _megatron("megatron-core 0.12.3", _="old012_zarr_t2p1d1"),
    ),
    "megatron-legacy": (
        "Megatron's files of each rank (mp_rank_*)",
        (
            *_megatron(
                "megatron-core 0.19.2",
                TP_PP_and_DP="legacy_t2p2",
                virtual_stages="legacy_vpp_p2v2",
                uneven_stages="legacy_uneven_p2",
                experts="legacy_moe_e2",
                no_distributed_optimizer="legacy_nodist_t2",
                experts_cut_otherwise="legacy_etp1_t2e2",
                no_distributed_optimizer_with_experts="legacy_nodist_etp1_t2e2",
            ),
            written("megatron-core 0.19.2", "load_checkpoint on other grids", "megatron/test_writer.py"),
        ),
    ),
    "deepspeed": (
        "DeepSpeed: ZeRO 0 to 3, pipeline, experts, tensor parallel; written at ZeRO 1 to 3 on other grids",
        (
            *read(
                "DeepSpeed 0.19.8",
                ZeRO_0="deepspeed/ds_z0_fp32/ckpt",
                ZeRO_1="deepspeed/ds_z1_fp32/ckpt",
                BF16_Optimizer="deepspeed/ds_z1_bf16opt/ckpt",
                ZeRO_2="deepspeed/ds_z2_bf16/ckpt",
                round_robin="deepspeed/ds_z2_rr/ckpt",
                alignment="deepspeed/ds_z2_align/ckpt",
                elastic="deepspeed/ds_z2_elastic/ckpt",
                ZeRO_3="deepspeed/ds_z3_bf16/ckpt",
                sub_groups="deepspeed/ds_z3_sub/ckpt",
                experts="deepspeed/ds_moe_ep2_z1/ckpt",
                pipeline="deepspeed/ds_pp2_dp2_z1/ckpt",
                AutoTP="deepspeed/ds_autotp2_z3/ckpt",
            ),
            Proof("reads", "DeepSpeed 0.19.8", "AutoEP at ZeRO 1 and 2", "tests/consumers/test_deepspeed_autoep.py"),
            Proof(
                "writes for",
                "DeepSpeed 0.19.8",
                "load_checkpoint at ZeRO 1 to 3 on other ranks, in other stages, with experts shared otherwise",
                "tests/consumers/test_deepspeed.py",
            ),
            Proof(
                "writes for",
                "DeepSpeed 0.19.8",
                "load_checkpoint with fewer ranks of AutoTP",
                "tests/consumers/test_deepspeed_tp.py",
            ),
        ),
    ),
    "deepspeed-universal": (
        "universal checkpoints of DeepSpeed",
        (
            *read(
                "DeepSpeed 0.19.8",
                from_ZeRO_2="deepspeed/ds_z2_bf16/ckpt/global_step3_universal",
                from_ZeRO_3="deepspeed/ds_z3_bf16/ckpt/global_step3_universal",
            ),
            written(_TORCH, "torch.load", "deepspeed/test_universal_writer.py"),
            Proof(
                "writes for", "DeepSpeed 0.19.8", "load_universal at ZeRO 1 to 3", "tests/consumers/test_deepspeed.py"
            ),
        ),
    ),
    "lightning": (
        "Lightning's .ckpt, read as torch-save: weights under state_dict",
        (
            Proof(
                "writes for",
                "pytorch-lightning 2.6.6",
                "load_from_checkpoint, Trainer.test",
                "tests/consumers/test_lightning.py",
            ),
        ),
    ),
    "vescale": (
        "veScale: a DCP folder for the model, and one per pipeline stage (by its sources) for its optimizer",
        (
            *read(
                "veScale 0.0.1",
                DP_and_TP="vescale/checkpoints.tar.xz!dp2_tp2/ckpt",
                states_shared_by_ranks="vescale/checkpoints.tar.xz!dp3/ckpt",
            ),
            Proof(
                "writes for",
                "veScale 0.0.1",
                "vescale.checkpoint.load on other ranks, of one stage",
                "tests/consumers/test_vescale.py",
            ),
        ),
    ),
    "accelerate": (
        "a folder of accelerate: a checkpoint each for model and optimizer",
        read("accelerate", FSDP2="deepspeed/accelerate_fsdp2/ckpt"),
    ),
}


def format_rows() -> tuple[FormatRow, ...]:
    """Formats of this package, then those of installed extensions, as they are registered."""
    known = [reader.name for reader in readers()]
    writable = writer_names()
    facts = {**_FACTS, **OTHERS}
    return tuple(
        FormatRow(name, name in known, name in writable, *facts.get(name, ("", ())), RECOGNISED.get(name, ""))
        for name in dict.fromkeys((*known, *writable))
    )
