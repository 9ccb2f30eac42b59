"""Libraries that need an environment of their own: transformers, and the oldest torch that the README promises.

``CKPT_PEER_TRANSFORMERS`` and ``CKPT_PEER_TORCH24`` name the python of such an environment; run with ``-m peer``.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.api.convert.export import export
from tests.consumers.written import LAYOUTS, Written, case_named, expected_tensors

pytestmark = pytest.mark.peer

# What fixtures/deepspeed/make/fsdp_make.py made the model from.
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 131, "hidden_size": 48,
    "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
FROM_PRETRAINED = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True, dtype="auto")
raw = {k: v.contiguous().view(torch.uint8).numpy().tobytes().hex() for k, v in model.state_dict().items()}
print(json.dumps([{k: sorted(map(str, v)) for k, v in info.items()}, raw]))
"""
OLD_TORCH = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
def bits(value):
    return [str(value.dtype), list(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes().hex()]
def flat(value, path=()):
    if isinstance(value, torch.Tensor):
        return {".".join(map(str, path)): bits(value.contiguous())}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {k: v for key, inner in items for k, v in flat(inner, (*path, key)).items()}
root, scratch = sys.argv[1:]
dcp_to_torch_save(root, scratch)
restored = flat(torch.load(scratch, weights_only=False))
entries = dcp.FileSystemReader(root).read_metadata().state_dict_metadata
state = {k: torch.zeros(e.size, dtype=e.properties.dtype) for k, e in entries.items() if hasattr(e, "size")}
dcp.load(state, checkpoint_id=root)  # 2.4 has no no_dist: without a process group it loads alone
print(json.dumps([torch.__version__, restored, {k: bits(v) for k, v in state.items()}]))
"""


def said_by(python: str, script: str, *arguments: Path) -> Any:
    """The JSON on the last line that a script of another environment prints."""
    command = [os.environ[python], "-c", script, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("limit", [None, 30_000])
def test_transformers(limit: int | None, tmp_path: Path) -> None:
    """An FSDP2 checkpoint of accelerate, exported, loads by ``from_pretrained``, no key missing or unexpected."""
    case = case_named("deepspeed/accelerate_fsdp2")
    export(case.url, tmp_path / "model", max_shard_nbytes=limit)
    assert (tmp_path / "model/model.safetensors.index.json").exists() == (limit is not None)
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG), "utf-8")
    info, loaded = said_by("CKPT_PEER_TRANSFORMERS", FROM_PRETRAINED, tmp_path / "model")
    assert all(not found for found in info.values())
    expected = {
        fqn.removeprefix("model."): data.hex()
        for fqn, (_, _, data) in expected_tensors(case).items()
        if fqn.startswith("model.")
    }
    assert loaded == expected


@pytest.mark.parametrize("name", LAYOUTS)
def test_torch_2_4(dcp_checkpoints: dict[str, Written], name: str, tmp_path: Path) -> None:
    """Torch 2.4 loads the DCP checkpoints, flat with ``dcp.load`` and nested with its converter, bit for bit."""
    written = dcp_checkpoints[name]
    version, restored, loaded = said_by("CKPT_PEER_TORCH24", OLD_TORCH, written.root, tmp_path / "whole.pt")
    assert version.startswith("2.4.")
    expected = {
        fqn: [f"torch.{dtype}", list(shape), data.hex()] for fqn, (dtype, shape, data) in written.tensors.items()
    }
    assert {fqn: restored[fqn] for fqn in expected} == expected
    assert {fqn: loaded[fqn] for fqn in expected} == expected
