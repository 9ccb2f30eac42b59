"""What users of Megatron reported: vocabularies padded twice, groups of keys and values that get lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard

HEADS, GROUPS, HEAD_DIM, HIDDEN, WIDTH, VOCAB = 8, 2, 2, 2, 4, 10


def saved(folder: Path) -> dict[str, npt.NDArray[np.float32]]:
    """A Llama of one layer, as transformers saves it."""
    rng = np.random.default_rng(1)
    layer = {
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (GROUPS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (GROUPS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN), "mlp.down_proj": (HIDDEN, WIDTH),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    shapes["model.norm.weight"] = (HIDDEN,)
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDTH,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8,
    }  # fmt: skip
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return weights


def written(source: Path, target: Path, **options: Any) -> dict[str, npt.NDArray[Any]]:
    """Tensors of a checkpoint of Megatron's."""
    reshard(source, target, to="megatron-dist", durable=False, **options)
    with open_checkpoint(target) as checkpoint:
        return {fqn: view.numpy() for fqn, view in checkpoint.items()}


def test_a_vocabulary_is_padded_for_the_target_and_never_twice(tmp_path: Path) -> None:
    """Megatron-LLM 81 and 103, Megatron-Bridge 469, Megatron-LM 1754: 10 tokens are 16 rows at TP 2, 12 at TP 1."""
    weights = saved(tmp_path / "hf")
    multiple = {"make_vocab_size_divisible_by": 4}
    two = written(tmp_path / "hf", tmp_path / "two", tp=2, arguments=multiple)
    one = written(tmp_path / "two", tmp_path / "one", tp=1)
    again = written(tmp_path / "one", tmp_path / "again", tp=2)
    tables = ("model.embedding.word_embeddings.weight", "model.output_layer.weight")
    for table in tables:
        assert [len(found[table]) for found in (two, one, again)] == [16, 12, 16]
        assert not one[table][VOCAB:].any()
        assert again[table].tobytes() == two[table].tobytes()
    export(tmp_path / "again", tmp_path / "back", durable=False)
    back = load_file(tmp_path / "back/model.safetensors")
    assert {name: array.tobytes() for name, array in back.items()} == {n: a.tobytes() for n, a in weights.items()}


def test_ranks_without_a_group_of_keys_lose_nothing(tmp_path: Path) -> None:
    """Modelexpress 650: 8 heads in 2 groups on 4 ranks are 12 blocks of rows, [qqq] [qkv] [qqq] [qkv]."""
    weights = saved(tmp_path / "hf")
    found = written(tmp_path / "hf", tmp_path / "mg", tp=4)["model.decoder.layers.self_attention.linear_qkv.weight"][0]
    q, k, v = (weights[f"model.layers.0.self_attn.{name}_proj.weight"].reshape(-1, HEAD_DIM, HIDDEN) for name in "qkv")
    blocks = found.reshape(4, 3, HEAD_DIM, HIDDEN)
    expected = [[q[0], q[1], q[2]], [q[3], k[0], v[0]], [q[4], q[5], q[6]], [q[7], k[1], v[1]]]
    np.testing.assert_array_equal(blocks, np.array(expected))
    export(tmp_path / "mg", tmp_path / "back", durable=False)
    back = load_file(tmp_path / "back/model.safetensors")
    assert {name: array.tobytes() for name, array in back.items()} == {n: a.tobytes() for n, a in weights.items()}
