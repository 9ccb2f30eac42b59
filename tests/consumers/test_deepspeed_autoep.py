"""Checkpoints of real DeepSpeed whose experts AutoEP has placed are read bit for bit.

``CKPT_PEER_DEEPSPEED`` names the python of an environment with DeepSpeed 0.19.8, torch and transformers; run with
``-m peer``, or ``make test-deepspeed``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ckpt_tool.api.trust.verify import verify
from tests.formats.conformance import FIXTURES
from tests.reports.made import as_bytes

pytestmark = pytest.mark.peer

# A small Mixtral; masters and moments are drawn by name before they are saved, so that nothing need be trained.
JOB = """
import sys, zlib
make, folder, world, ep, stage = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
sys.path.insert(0, make)
import torch, deepspeed, torch.distributed as dist
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.utils import groups
from ds_ranks import forked
from safetensors.torch import save_file
from transformers import MixtralConfig, MixtralForCausalLM
AutoEP._retarget_transformers_output_recorders = lambda *a, **k: None  # what forward returns: another transformers'
for op in deepspeed.ops.__compatible_ops__:
    deepspeed.ops.__compatible_ops__[op] = False
def drawn(name, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
def save(case):
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = MixtralForCausalLM(MixtralConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=32))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "expert_parallel": {"enabled": True, "autoep_size": ep, "preset_model": "mixtral"}})
    o, truth = engine.optimizer, {}
    names = {id(p): n for n, p in engine.module.named_parameters()}
    first = groups._get_expert_parallel_rank(f"ep_size_{ep}") * (4 // ep)
    def named(name, tensor):
        if name[-3:] not in (".w1", ".w2", ".w3"):
            return {name: tensor}
        return {f"{name}.{first + i}": one for i, one in enumerate(tensor)}
    for g, params in enumerate(o.bit16_groups):
        part = o.single_partition_of_fp32_groups[g]
        group = o.real_dp_process_group[g]
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            whole = []
            for p in params:
                own = {n: drawn(f"{key}/{n}", t.shape) for n, t in named(names[id(p)], p).items()}
                truth.update({f"{key}/{n}": t for n, t in own.items()})
                whole += [t.flatten() for t in own.values()]
            flat = torch.zeros(part.numel() * dist.get_world_size(group))
            data = torch.cat(whole)
            flat[: data.numel()] = data
            mine = flat[dist.get_rank(group) * part.numel() :][: part.numel()].clone()
            if key == "fp32":
                part.data.copy_(mine)
            else:
                o.optimizer.state[part].update({key: mine, "step": torch.tensor(3.0)})
    engine.save_checkpoint(folder + "/ckpt", tag="global_step3")
    for name, p in engine.module.named_parameters():
        truth.update({f"param/{n}": t.detach().clone() for n, t in named(name, p).items()})
    every = [None] * world
    dist.all_gather_object(every, truth)
    if dist.get_rank() == 0:
        save_file({k: v.contiguous() for one in every for k, v in one.items()}, folder + "/truth.safetensors")
    dist.barrier()
sys.exit(int(any(forked({}, world, save))))
"""


@pytest.mark.parametrize(("world", "ep", "stage"), [(2, 2, 1), (4, 2, 2), (4, 4, 2)])
def test_every_expert_is_read(world: int, ep: int, stage: int, tmp_path: Path) -> None:
    """Weights, masters and moments of every expert and of all else, on ranks that share experts and that do not."""
    command = [os.environ["CKPT_PEER_DEEPSPEED"], "-c", JOB, str(FIXTURES / "deepspeed/make"), str(tmp_path)]
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = {**own, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command += [str(world), str(ep), str(stage)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    found = as_bytes(tmp_path / "ckpt")
    expected = {}
    with safe_open(tmp_path / "truth.safetensors", "pt") as truth:
        for key in truth.keys():  # noqa: SIM118 - it is no dict
            kind, name = key.split("/", 1)
            tensor = truth.get_tensor(key)
            fqn = f"module.{name}" if kind == "param" else f"optimizer.state.{name}.{kind}"
            dtype = str(tensor.dtype).removeprefix("torch.")
            data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            expected[fqn] = (dtype, tuple(tensor.shape), data)
    assert len(expected) == 4 * (17 + 2 * 3 * 4)
    others = (".step", ".mlp.gate.gate.weight")  # the latter is the router's second name
    assert {fqn: value for fqn, value in found.items() if not fqn.endswith(others)} == expected
    assert verify(tmp_path / "ckpt", level="full").is_ok
