"""Per-rank files of hybrid models: a layer of Mamba, whose fused weights have parts of unequal rows, and attention.

Cut by hand as mcore's ``ssm/mamba_mixer.py`` does it; distributed checkpoints have each part under a key of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.verify import verify
from tests.formats.megatron.build import GROUP, common_state, saved
from tests.formats.megatron.run import Run

MIXER = {
    "mixer.in_proj.layer_norm_weight": ((8,), None), "mixer.A_log": ((4,), [4]), "mixer.D": ((4,), [4]),
    "mixer.dt_bias": ((4,), [4]), "mixer.conv1d.weight": ((24, 1, 4), [16, 4, 4]),
    "mixer.conv1d.bias": ((24,), [16, 4, 4]), "mixer.in_proj.weight": ((44, 8), [16, 16, 4, 4, 4]),
    "mixer.norm.weight": ((16,), [16]), "mixer.out_proj.weight": ((8, 16), "row"),
}  # fmt: skip
PART_KEYS = {"mixer.conv1d.weight": "x B C", "mixer.conv1d.bias": "x B C", "mixer.in_proj.weight": "z x B C dt"}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layers_of_mamba(tmp_path: Path, tp: int) -> None:
    """A hybrid model's files: parts of unequal rows have the keys of distributed checkpoints, state too."""
    generator = torch.Generator().manual_seed(tp)
    whole = {f"decoder.layers.0.{name}": torch.rand(shape, generator=generator) for name, (shape, _) in MIXER.items()}
    dense = {"input_layernorm.weight": (8,), "self_attention.linear_proj.weight": (8, 8)}
    whole |= {f"decoder.layers.1.{name}": torch.rand(shape, generator=generator) for name, shape in dense.items()}
    whole |= {"decoder.final_norm.weight": torch.rand(8, generator=generator)}
    rows = {"decoder.layers.1.self_attention.linear_proj.weight"}

    def of(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        sizes = MIXER.get(name.removeprefix("decoder.layers.0."), ((), None))[1]
        if sizes == "row" or name in rows:
            return tensor.chunk(tp, 1)[rank]
        return torch.cat([p.chunk(tp)[rank] for p in tensor.split(sizes)]) if isinstance(sizes, list) else tensor

    slots = {"param": 1.0, "exp_avg": 2.0, "exp_avg_sq": 3.0}
    run, files = Run(tp=tp, layers=(((0, 1),),)), {}
    for rank in range(tp):
        model = {name: of(name, tensor, rank).clone() for name, tensor in whole.items()}
        flat: dict[str, list[torch.Tensor]] = {slot: [] for slot in slots}
        ends = 0
        for tensor in reversed(model.values()):
            gap = -ends % 64
            for slot, factor in slots.items():
                flat[slot] += [torch.zeros(gap), tensor.flatten() * factor]
            ends += gap + tensor.numel()
        state = {GROUP: {**{slot: torch.cat(flat[slot]) for slot in slots}, "numel_unpadded": ends}}
        groups = {"optimizer": {"param_groups": [{"step": 7, "lr": 0.1, "params": list(range(len(model)))}]}}
        root = {
            **common_state(run, rank=rank, transformer_impl="transformer_engine"),
            "model": model,
            "optimizer": groups,
        }
        files[f"mp_rank_{rank:02d}/model_optim_rng.pt"] = saved(root)
        files[f"mp_rank_{rank:02d}/distrib_optim.pt"] = saved({"buckets_coalesced": True, 0: state})
    for path, data in files.items():
        (tmp_path / "in" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / path).write_bytes(data)
    assert verify(tmp_path / "in", level="full").is_ok
    reshard(tmp_path / "in", tmp_path / "out", to="megatron-dist", durable=False)
    for place in (tmp_path / "in", tmp_path / "out"):
        with open_checkpoint(place) as found:
            for key, tensor in whole.items():
                name = key.removeprefix("decoder.layers.0.")
                parts = {f".{part}": None for part in PART_KEYS.get(name, "").split()} or {"": None}
                cut = tensor.split(MIXER[name][1]) if name in PART_KEYS else [tensor]
                for part, values in zip(parts, cut, strict=True):
                    assert torch.equal(found[f"model.{key}{part}"].torch(), values), key
                    for slot, factor in slots.items():
                        assert torch.equal(found[f"optimizer.state.{slot}.{key}{part}"].torch(), values * factor), key
