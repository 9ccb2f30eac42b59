"""Each file of a checkpoint that is not there, or has no byte, is one that ``verify --plan-fetch`` names."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tool.api.trust.fetch import plan_fetch
from tests.hostile.fuzz import checkpoint_in, contents, placed

NAMES = (
    "bytecheckpoint/ddp_2r", "ckpt/rank_files_v1", "deepspeed/ds_moe_ep2_z1", "megatron/legacy_t2p2", "torch/dcp_zstd",
    "torch/dcp_no_collectives", "torch/hf_dcp_consolidated", "torch/hf_sharded", "torch/verl_2d",
    "torch_checkpointing/fsdp2_4r_safetensors", "zoo/consolidated_llama2", "zoo/gguf_split", "zoo/torchsnapshot_files",
)  # fmt: skip
UNNAMED = {"latest", "params.json", "config.json", "model.safetensors.index.json"}
"""What a folder is read without, or what says only which of its folders to read."""


@pytest.mark.parametrize("how", ["gone", "empty"])
@pytest.mark.parametrize("name", NAMES)
def test_every_lost_file_is_named(name: str, how: str, tmp_path: Path) -> None:
    """What is told as whole holds what it held; else the lost file is among those to fetch."""
    target = checkpoint_in(placed(name, tmp_path))
    before = contents(target)
    paths = [path for path in sorted(target.rglob("*")) if path.is_file() and path.name not in UNNAMED]
    for path in paths[:: max(1, len(paths) // 20)]:
        raw = path.read_bytes()
        if how == "gone":
            path.unlink()
        elif raw:
            path.write_bytes(b"")
        plan = plan_fetch(target, level="full")
        if plan.is_ok:
            assert contents(target) == before, path
        else:
            assert str(path.relative_to(target)) in {each.path for each in plan.ranges}, path
        path.write_bytes(raw)
