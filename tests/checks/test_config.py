"""What ``config.json`` says of the weights is held against them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tool.api.trust.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize(
    ("stated", "more", "said"),
    [
        ("float16", {}, None),
        ("torch.float16", {}, None),
        ("bfloat16", {}, "config.json says bfloat16, but 94% of the weights' bytes are float16 (1 tensor)"),
        ("bfloat16", {"quantization_config": {"bits": 4}}, None),
        (None, {}, None),
    ],
)
def test_dtype(tmp_path: Path, key: str, stated: str | None, more: dict[str, object], said: str | None) -> None:
    """The type that most bytes have counts: norms are kept in another one by design."""
    save_file({"w": np.ones((8, 8), np.float16), "norm": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({key: stated, **more}))
    found = [f.message for f in verify(tmp_path).findings if f.kind == "config-dtype"]
    assert [message.partition(": what")[0] for message in found] == ([said] if said else [])


@pytest.mark.parametrize("name", ["hf_st_tied", "hf_bin_untied"])
def test_real_models(name: str) -> None:
    """Models that transformers saved are as their config says."""
    assert verify(FIXTURES / "deepspeed" / name / "ckpt").counts["warning"] == 0
