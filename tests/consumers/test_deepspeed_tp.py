"""Real DeepSpeed resumes with fewer tensor-parallel ranks of AutoTP than saved.

``CKPT_PEER_DEEPSPEED`` names the python of an environment with DeepSpeed 0.19.8, torch and transformers; run with
``-m peer``, or ``make test-deepspeed``.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.api.convert.reshard import reshard
from tests.formats.conformance import FIXTURES
from tests.reports.made import as_bytes

pytestmark = pytest.mark.peer

# The masters are the model's weights, which each run has of the same seed and AutoTP cuts for it; moments follow from
# them, so that each rank knows what it is to load.
JOB = """import json, os, sys
make, action, folder, world, stage = *sys.argv[1:4], *map(int, sys.argv[4:])
sys.path.insert(0, make)
import torch, deepspeed, torch.distributed as dist
from ds_ranks import forked
from transformers import LlamaConfig, LlamaForCausalLM
for op in deepspeed.ops.__compatible_ops__:
    deepspeed.ops.__compatible_ops__[op] = False
def run(case):
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=16, use_cache=False)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, dist_init_required=False, config={
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "tensor_parallel": {"autotp_size": world}, "zero_optimization": {"stage": stage}})
    o = engine.optimizer
    names = {id(p): n for n, p in engine.module.named_parameters()}
    before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    part, = o.single_partition_of_fp32_groups
    state = o.optimizer.state[part]
    if action == "save":
        state.update(exp_avg=part.detach() * 2, exp_avg_sq=part.detach().square(), step=torch.tensor(3.0))
        engine.save_checkpoint(folder, tag="global_step3")
    else:
        for p in engine.module.parameters():
            p.data.zero_()
        part.data.zero_()
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        state = o.optimizer.state[part]
        flat = torch.cat([before[names[id(p)]].float().flatten() for p in o.bit16_groups[0]])
        n = flat.numel()
        wrong = [n for n, p in engine.module.named_parameters() if not torch.equal(p, before[n])]
        for key, want in (("fp32", flat), ("exp_avg", flat * 2), ("exp_avg_sq", flat.square())):
            got = part.detach() if key == "fp32" else state[key]
            if not torch.equal(got[:n], want):
                wrong.append(key)
        ids = torch.arange(8).reshape(1, 8)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        said = {"rank": dist.get_rank(), "wrong": wrong, "n": n, "step": float(state["step"])}
        os.write(1, (json.dumps(said) + "\\n").encode())  # at once: ranks would print into each other's lines
    dist.barrier()
sys.exit(int(any(forked({}, world, run))))
"""


def run(action: str, folder: Path, world: int, stage: int) -> list[dict[str, Any]]:
    """What the ranks of a run say."""
    command = [os.environ["CKPT_PEER_DEEPSPEED"], "-c", JOB, str(FIXTURES / "deepspeed/make"), action, str(folder)]
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = {**own, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command += [str(world), str(stage)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]


@pytest.mark.parametrize("stage", [1, 2])
def test_training_goes_on_with_fewer_ranks(stage: int, tmp_path: Path) -> None:
    """Of four ranks, on two: every weight, master and moment of their own shards; then a step."""
    run("save", tmp_path / "source", 4, stage)
    reshard(tmp_path / "source", tmp_path / "there", to="deepspeed", tp=2, durable=False)
    found = sorted(run("load", tmp_path / "there", 2, stage), key=lambda said: said["rank"])
    assert found == [{"rank": rank, "wrong": [], "n": 5856, "step": 4.0} for rank in (0, 1)]
    assert as_bytes(tmp_path / "there") == as_bytes(tmp_path / "source")
