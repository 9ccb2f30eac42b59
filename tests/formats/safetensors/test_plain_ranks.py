"""safetensors files of ranks without a word about the mesh, as vLLM and TensorRT-LLM write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tool
from ckpt_tool.errors import FormatError, IntegrityError, LayoutError

HIDDEN, INNER, ROWS, HEADS, KV_HEADS = 8, 12, 20, 4, 2
KV_ROWS = HIDDEN // HEADS * KV_HEADS
CONFIG = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "model_type": "llama"}


def whole() -> dict[str, torch.Tensor]:
    """A layer of Llama as vLLM has it: queries, keys and values in one, gate and up in one."""
    made = torch.Generator().manual_seed(3)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made)

    layer = "model.layers.0"
    return {
        "model.embed_tokens.weight": tensor(ROWS, HIDDEN),
        f"{layer}.input_layernorm.weight": tensor(HIDDEN),
        f"{layer}.self_attn.qkv_proj.weight": tensor(HIDDEN + 2 * KV_ROWS, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": tensor(HIDDEN, HIDDEN),
        f"{layer}.mlp.gate_up_proj.weight": tensor(2 * INNER, HIDDEN),
        f"{layer}.mlp.down_proj.weight": tensor(HIDDEN, INNER),
        "model.norm.weight": tensor(HIDDEN),
        "lm_head.weight": tensor(ROWS, HIDDEN),
    }


def part(fqn: str, value: torch.Tensor, rank: int, n_ranks: int) -> torch.Tensor:
    """What a rank holds."""
    if "norm" in fqn:
        return value
    if "qkv" in fqn or "gate_up" in fqn:
        sizes = [HIDDEN, KV_ROWS, KV_ROWS] if "qkv" in fqn else [INNER, INNER]
        return torch.cat([fused.chunk(n_ranks)[rank] for fused in value.split(sizes)])
    return value.chunk(n_ranks, dim=int("o_proj" in fqn or "down_proj" in fqn))[rank].contiguous()


def write(folder: Path, n_ranks: int, name: Callable[[int, int], str], *, n_files: int = 1) -> Path:
    """Files of ranks, each rank's tensors spread over some."""
    folder.mkdir()
    for rank in range(n_ranks):
        own = [(fqn, part(fqn, value, rank, n_ranks)) for fqn, value in whole().items()]
        for number in range(n_files):
            save_file(dict(own[number::n_files]), folder / name(rank, number))
    return folder


def vllm(rank: int, number: int) -> str:
    """As ``save_sharded_state`` calls them."""
    return f"model-rank-{rank}-part-{number}.safetensors"


@pytest.mark.parametrize("n_ranks", [2])
@pytest.mark.parametrize("n_files", [1, 3])
def test_parts_of_vllm(tmp_path: Path, n_ranks: int, n_files: int) -> None:
    """Read as what they are, and put together by the rules of models with fused layers."""
    source = write(tmp_path / "a", n_ranks, vllm, n_files=n_files)
    (source / "config.json").write_text(json.dumps(CONFIG))
    with ckpt_tool.open(source) as checkpoint:
        assert (checkpoint.format, checkpoint.manifest.info["world_size"]) == ("safetensors-ranks", n_ranks)
        assert {*checkpoint} == {*whole()}
    with pytest.raises(IntegrityError, match="differ between ranks and nothing says how they join"):
        ckpt_tool.export(source, tmp_path / "b")
    ckpt_tool.export(source, tmp_path / "b", unequal="rules")
    with ckpt_tool.open(tmp_path / "b") as checkpoint:
        for fqn, value in whole().items():
            assert torch.equal(checkpoint[fqn].torch(), value), fqn


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "no config.json tells them"),
        ({**CONFIG, "head_dim": 4}, r"config.json says \[16, 8, 8\]"),
        ({**CONFIG, "num_key_value_heads": 1}, r"config.json says \[8, 2, 2\]"),
    ],
)
def test_parts_are_not_guessed(tmp_path: Path, config: dict[str, object] | None, said: str) -> None:
    """What rules reckon from a shape must be what the config says: heads of another width, or held more than once."""
    source = write(tmp_path / "a", 2, vllm)
    if config is not None:
        (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(LayoutError, match=said):
        ckpt_tool.export(source, tmp_path / "b", unequal="rules")


def test_ranks_that_are_not_here(tmp_path: Path) -> None:
    """TensorRT-LLM's config says how many there are; a number that is left out is missing as well."""
    source = write(tmp_path / "a", 4, lambda rank, _: f"rank{rank}.safetensors")
    (source / "config.json").write_text(json.dumps({"architecture": "LlamaForCausalLM", "mapping": {"world_size": 4}}))
    (source / "rank3.safetensors").unlink()
    (source / "rank1.safetensors").unlink()
    report = ckpt_tool.verify(source)
    missing = {finding.where.path for finding in report.findings if finding.kind == "missing-file" and finding.where}
    assert missing == {"rank1.safetensors", "rank3.safetensors"}


def test_what_ranks_do_not_share_is_found(tmp_path: Path) -> None:
    """Copies that differ, and shapes that do."""
    folder = tmp_path / "a"
    folder.mkdir()
    for rank in range(2):
        own = {"same": torch.ones(3), "other": torch.full((3,), float(rank)), "apart": torch.ones(2 + rank)}
        save_file(own, folder / f"rank{rank}.safetensors")
    found = {(finding.fqn, finding.kind) for finding in ckpt_tool.verify(folder).findings if finding.severity > 0}
    assert found == {("other", "different-replicas"), ("apart", "different-shapes")}
    with ckpt_tool.open(folder) as checkpoint:
        assert {*checkpoint} == {"same", "other", "apart@rank0", "apart@rank1"}


def test_two_files_of_one_rank_with_the_same_tensor(tmp_path: Path) -> None:
    """Nothing says which of them counts."""
    (tmp_path / "a").mkdir()
    for name in ("model-rank-0-part-0", "model-rank-0-part-1", "model-rank-1-part-0"):
        save_file({"w": torch.ones(2)}, tmp_path / "a" / f"{name}.safetensors")
    with pytest.raises(FormatError, match=r"'w' is in model-rank-0-part-0.safetensors too, of the same rank"):
        ckpt_tool.open(tmp_path / "a")


def test_others_are_left_to_their_readers(tmp_path: Path) -> None:
    """One file, or one more whose name tells no rank, is no set of ranks."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / name / "rank0.safetensors")
    save_file({"v": torch.ones(2)}, tmp_path / "two" / "model.safetensors")
    for name in ("one", "two"):
        with ckpt_tool.open(tmp_path / name) as checkpoint:
            assert checkpoint.format.startswith("safetensors")
            assert checkpoint.format != "safetensors-ranks"
