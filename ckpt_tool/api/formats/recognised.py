"""How each format is recognised, as ``detect`` does it: the file that must be there, or what its first bytes are."""

from __future__ import annotations

__all__ = ["RECOGNISED"]

RECOGNISED = {
    "bytecheckpoint": "model/.metadata, or a tracker beside global_step_<N>",
    "megatron-dist": "metadata.json with sharded_backend torch_dist, here, in an iteration's folder or NeMo's weights/",
    "megatron-zarr": "metadata.json with sharded_backend zarr",
    "megatron-legacy": "mp_rank_*/model_optim_rng.pt, or NeMo 1's [mt]p_rank_*/model_weights.ckpt",
    "orbax": "manifest.ocdbt, or _CHECKPOINT_METADATA beside folders of zarr arrays",
    "nanotron": "checkpoint_metadata.json beside model/, here or in the folder that latest.txt names",
    "torchsnapshot": ".snapshot_metadata",
    "vescale": "folders model and optimizer/pp_<N> that are DCP checkpoints",
    "accelerate": "a folder pytorch_model_fsdp_<N> that is a DCP checkpoint",
    "torch-checkpointing": "metadata.pkl, or <item>_<rank>.pt of several items",
    "dcp": ".metadata (or __<rank>.metadata) beside .distcp files",
    "rank-files": "rank_<NNNNN>.safetensors",
    "dcp-hf": "shard-<N>-model-<N>-of-<N>.safetensors",
    "deepspeed": "*mp_rank_*_model_states.pt, here or in the folder that latest names",
    "deepspeed-universal": "zero/<parameter>/fp32.pt",
    "safetensors-ranks": ".safetensors files whose names differ in a rank number",
    "safetensors-index": "*.safetensors.index.json, or several .safetensors at the top",
    "safetensors": "one .safetensors, by name or by its header",
    "hf-bin": "*.bin.index.json",
    "consolidated": "consolidated.<NN>.pth",
    "gguf": "the first four bytes of a file: GGUF",
    "flax-msgpack": "one .msgpack (or numbered ones), or a file checkpoint_<N> that is a map of MessagePack",
    "hdf5": "the first eight bytes of a file: HDF5's; or a zip named .keras",
    "npz": "a zip named .npz, or one that holds .npy files only",
    "torch-ranks": "torch.save files whose names, or whose folders, differ in a rank number",
    "torch-save": "the first bytes of a file: torch.save's zip or stream",
}
