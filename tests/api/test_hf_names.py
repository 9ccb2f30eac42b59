"""Hugging Face's names for checkpoints of Megatron and torchtitan, against plain numpy on what they were made with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.api.convert.conversion import Conversion
from ckpt_tool.api.convert.export import prepare_export
from ckpt_tool.errors import LayoutError, UsageError
from tests.formats.conformance import FIXTURES, Truth
from tests.formats.megatron.places import CHECKPOINTS, dense_shapes, expert_shapes, truth_from_seed

Arrays = dict[str, npt.NDArray[Any]]
HEADS, GROUPS, HEAD_DIM, TRUE_VOCAB = 4, 2, 8, 100
DENSE = (
    "td_full_t2p2d2", "td_full_t4p1", "td_dpr_t2p2d2", "td_nodist_t2", "td_dpzero_t2p2", "dpr_vpp_p2", "dpr_uneven_p2",
    "neg_noextra", "legacy_t2p2", "legacy_vpp_p2v2", "legacy_uneven_p2", "legacy_nodist_t2",
)  # fmt: skip
UNRECORDED = ("old012_fsms_t2p1d2", "old012_fsms_t1d3", "old012_zarr_t2p1d1")
EXPERTS = ("moe_seq_e2", "moe_dpr_e2", "td_dpzero_moe_e2", "legacy_moe_e2")


def exported(source: Path, target: Path, **options: Any) -> tuple[Conversion, Arrays]:
    """The plan of an export, and what it wrote."""
    conversion = prepare_export(source, target / "out", **options)
    with conversion.checkpoint:
        conversion.run()
    return conversion, load_file(target / "out/model.safetensors")


def megatron_arrays(shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Weights that the fixtures were made with, by Megatron's keys."""
    truth: dict[str, Truth] = truth_from_seed(dict(shapes))()
    return {
        fqn.removeprefix("model."): np.frombuffer(one.data, ml_dtypes.bfloat16).reshape(one.shape)
        for fqn, one in truth.items()
        if fqn.startswith("model.")
    }


def llama_of(arrays: Arrays) -> Arrays:
    """The attention, norms and vocabulary of a Llama, by reshaping."""
    layer = "decoder.layers."
    found: Arrays = {
        "model.embed_tokens.weight": arrays["embedding.word_embeddings.weight"][:TRUE_VOCAB],
        "lm_head.weight": arrays["output_layer.weight"][:TRUE_VOCAB],
        "model.norm.weight": arrays["decoder.final_layernorm.weight"],
    }
    for number, fused in enumerate(arrays[f"{layer}self_attention.linear_qkv.weight"]):
        name = f"model.layers.{number}."
        hidden = fused.shape[-1]
        by_group = fused.reshape(GROUPS, HEADS // GROUPS + 2, HEAD_DIM, hidden)
        found[f"{name}self_attn.q_proj.weight"] = by_group[:, :-2].reshape(-1, hidden)
        found[f"{name}self_attn.k_proj.weight"] = by_group[:, -2].reshape(-1, hidden)
        found[f"{name}self_attn.v_proj.weight"] = by_group[:, -1].reshape(-1, hidden)
        for key, after in (
            ("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
            ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
            ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
        ):
            found[name + after] = arrays[layer + key][number]
    return found


def dense_of(arrays: Arrays) -> Arrays:
    """A Llama."""
    found = llama_of(arrays)
    fused, down = (arrays[f"decoder.layers.mlp.linear_fc{n}.weight"] for n in (1, 2))
    for number in range(len(fused)):
        gate, up = np.split(fused[number], 2)
        mlp = {"gate_proj": gate, "up_proj": up, "down_proj": down[number]}
        found |= {f"model.layers.{number}.mlp.{name}.weight": array for name, array in mlp.items()}
    return found


def experts_of(arrays: Arrays, router: str, expert: str, names: tuple[str, str, str]) -> Arrays:
    """A Llama with experts; names of gate, up and down."""
    found = llama_of(arrays)
    fused, down = (arrays[f"decoder.layers.mlp.experts.experts.linear_fc{n}.weight"] for n in (1, 2))
    for number in range(fused.shape[0]):
        name = f"model.layers.{number}."
        found[name + router] = arrays["decoder.layers.mlp.router.weight"][number]
        for which in range(fused.shape[1]):
            for part, array in zip(names, (*np.split(fused[number, which], 2), down[number, which]), strict=True):
                found[f"{name}{expert.format(which)}.{part}.weight"] = array
    return found


def assert_equal(actual: Arrays, expected: Arrays) -> None:
    """The same names, types, shapes and bits."""
    described = [
        {fqn: (str(a.dtype), a.shape, np.ascontiguousarray(a).tobytes()) for fqn, a in arrays.items()}
        for arrays in (actual, expected)
    ]
    assert sorted(described[0]) == sorted(described[1])
    assert [fqn for fqn in described[0] if described[0][fqn] != described[1][fqn]] == []


@pytest.mark.parametrize("name", DENSE)
def test_megatron_becomes_llama(name: str, tmp_path: Path) -> None:
    """Every layout of the dense model (TP, PP, VPP, stacked or by layer, distributed or per rank) is the same Llama."""
    conversion, arrays = exported(CHECKPOINTS / name / "ckpt", tmp_path, true_vocab=TRUE_VOCAB)
    assert_equal(arrays, dense_of(megatron_arrays(dense_shapes(4, 128))))
    n_rows = conversion.checkpoint.manifest.tensor("model.output_layer.weight").shape[0]
    dropped = {one.fqn: one.why for one in conversion.dropped}
    assert dropped[f"model.output_layer.weight[100:{n_rows}]"] == (
        "padding: --true-vocab 100, and args.vocab_size of the checkpoint is 100"
    )
    assert "kv_heads is 2: args.num_query_groups of the checkpoint" in conversion.notes


@pytest.mark.parametrize("name", UNRECORDED)
def test_facts_that_args_lack_are_asked_for(name: str, tmp_path: Path) -> None:
    """Without head counts in the checkpoint the error names the facts; with them the export is the same Llama."""
    source = CHECKPOINTS / name / "ckpt"
    with pytest.raises(LayoutError, match="needs heads, kv_heads, which the checkpoint does not tell") as caught:
        prepare_export(source, tmp_path / "out")
    assert caught.value.hint is not None
    assert "--fact heads=N --fact kv_heads=N" in caught.value.hint
    facts = {"heads": HEADS, "kv_heads": GROUPS}
    with pytest.raises(LayoutError, match="row 100 has values, so --true-vocab 100 would drop more than padding") as e:
        prepare_export(source, tmp_path / "out", facts=facts, true_vocab=TRUE_VOCAB)
    assert e.value.hint == "if they are padding nevertheless, --fact vocab=100 drops them unproven"
    _, arrays = exported(source, tmp_path, facts={**facts, "vocab": TRUE_VOCAB})
    assert_equal(arrays, dense_of(megatron_arrays(dense_shapes(4, 128))))


@pytest.mark.parametrize("name", EXPERTS)
def test_megatron_experts_become_qwen_moe(name: str, tmp_path: Path) -> None:
    """Stacked experts are tensors of their own, in every layout."""
    _, arrays = exported(CHECKPOINTS / name / "ckpt", tmp_path, family="qwen_moe", true_vocab=TRUE_VOCAB)
    names = ("gate_proj", "up_proj", "down_proj")
    truth = megatron_arrays(expert_shapes(2, 128, 4))
    assert_equal(arrays, experts_of(truth, "mlp.gate.weight", "mlp.experts.{}", names))


def test_megatron_experts_become_mixtral_or_are_asked_about(tmp_path: Path) -> None:
    """Two families fit a model with experts alone: both are named, and either can be had."""
    source = CHECKPOINTS / "moe_seq_e2/ckpt"
    with pytest.raises(LayoutError, match="fit megatron-mixtral and megatron-qwen_moe equally well") as caught:
        prepare_export(source, tmp_path / "out")
    assert "--family mixtral" in str(caught.value.hint)
    _, arrays = exported(source, tmp_path, family="mixtral", true_vocab=TRUE_VOCAB)
    names = ("w1", "w3", "w2")
    truth = megatron_arrays(expert_shapes(2, 128, 4))
    expected = experts_of(truth, "block_sparse_moe.gate.weight", "block_sparse_moe.experts.{}", names)
    assert_equal(arrays, expected)


def test_rows_that_are_not_proven_padding_are_kept(tmp_path: Path) -> None:
    """Without ``--true-vocab`` rows that hold values stay, and a note says what would drop them."""
    conversion, arrays = exported(CHECKPOINTS / "td_full_t2p2d2/ckpt", tmp_path)
    assert arrays["lm_head.weight"].shape == (112, 32)
    assert any("rows from there on are not zero; --true-vocab 100 drops them" in note for note in conversion.notes)


def test_a_part_of_the_model_has_the_same_names(tmp_path: Path) -> None:
    """What is picked is known as a part of its model: the layers and tensors that were left out are not missed."""
    source, whole = CHECKPOINTS / "td_full_t4p1/ckpt", dense_of(megatron_arrays(dense_shapes(4, 128)))
    _, arrays = exported(source, tmp_path, include=["model.*.2.self_attention.linear_qkv.weight"])
    names = [f"model.layers.2.self_attn.{part}_proj.weight" for part in "qkv"]
    assert_equal(arrays, {fqn: whole[fqn] for fqn in names})


def test_names_can_be_kept(tmp_path: Path) -> None:
    """``family="none"`` takes off prefixes only, and facts without a family that takes them are refused."""
    _, arrays = exported(CHECKPOINTS / "td_full_t2p2d2/ckpt", tmp_path, family="none")
    assert_equal(arrays, megatron_arrays(dense_shapes(4, 112)))
    with pytest.raises(UsageError, match="--true-vocab 100 is about the names of a family"):
        prepare_export(CHECKPOINTS / "td_full_t2p2d2/ckpt", tmp_path / "new", family="none", true_vocab=100)


def test_all_state_keeps_the_optimizer_under_its_names(tmp_path: Path) -> None:
    """With everything asked for, the model is renamed, the optimizer's tensors stay as they are, values too."""
    _, arrays = exported(CHECKPOINTS / "td_full_t2p2d2/ckpt", tmp_path, everything=True, true_vocab=TRUE_VOCAB)
    truth = truth_from_seed(dense_shapes(4, 112))()
    state = {fqn: one.data for fqn, one in truth.items() if fqn.startswith("optimizer.")}
    assert {fqn: arrays[fqn].tobytes() for fqn in state} == state
    model = {fqn: array for fqn, array in arrays.items() if fqn.startswith(("model.", "lm_head."))}
    assert_equal(model, dense_of(megatron_arrays(dense_shapes(4, 128))))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"heads": 8, "kv_heads": 4}, r"64 rows make head_dim 4 with heads = 8 .*, expected 8 \(args.kv_channels"),
        ({"heads": 4, "kv_heads": 4, "head_dim": 5}, "64 rows are not 4 groups of 3 equal pieces"),
        ({"heads": 5}, r"heads/kv_heads is no whole number above 0 with heads = 5 .*, kv_heads = 2 \(args"),
        ({"heads": 6, "kv_heads": 1, "head_dim": 8}, r"part 'q' has 48 rows .* says 32"),
    ],
)
def test_wrong_facts_contradict_the_shapes(facts: dict[str, int], message: str, tmp_path: Path) -> None:
    """Counts of heads that do not fit the tensors stop with what contradicts them."""
    with pytest.raises(LayoutError, match=message):
        prepare_export(CHECKPOINTS / "td_full_t2p2d2/ckpt", tmp_path / "out", facts=facts)


def halves(array: npt.NDArray[Any], n_heads: int) -> npt.NDArray[Any]:
    """Rotary pairs as halves, as transformers' own converter of Meta's files does it."""
    rows, *rest = array.shape
    return array.reshape(n_heads, rows // n_heads // 2, 2, *rest).swapaxes(1, 2).reshape(array.shape)


TITAN = {
    "tok_embeddings.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight", "norm.bias": "model.norm.bias",
}  # fmt: skip
TITAN_LAYER = {
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
}  # fmt: skip


def titan_expected(arrays: Arrays, heads: int, kv_heads: int) -> Arrays:
    """A torchtitan model under Llama's names."""
    found: Arrays = {}
    for fqn, array in arrays.items():
        if fqn in TITAN:
            found[TITAN[fqn]] = array
            continue
        _, number, rest = fqn.split(".", 2)
        module, _, leaf = rest.rpartition(".")
        n_heads = {"attention.wq": heads, "attention.wk": kv_heads}.get(module)
        found[f"model.layers.{number}.{TITAN_LAYER[module]}.{leaf}"] = halves(array, n_heads) if n_heads else array
    return found


def test_torchtitan_becomes_llama(tmp_path: Path) -> None:
    """A real checkpoint of torchtitan: its head count is asked for, queries change from pairs to halves."""
    folder = FIXTURES / "deepspeed/torchtitan_dp2tp2"
    source = folder / "ckpt/checkpoint/step-3"
    with pytest.raises(LayoutError, match="torchtitan-llama needs heads, which the checkpoint does not tell"):
        prepare_export(source, tmp_path / "out")
    truth = load_file(folder / "truth.safetensors")
    model = {fqn.removeprefix("param/"): array for fqn, array in truth.items() if fqn.startswith("param/")}
    _, arrays = exported(source, tmp_path, facts={"heads": 1})
    assert_equal(arrays, titan_expected(model, 1, 1))
    queries = model["layers.0.attention.wq.weight"]
    assert not np.array_equal(arrays["model.layers.0.self_attn.q_proj.weight"], queries)


def test_torchtitan_with_grouped_queries(tmp_path: Path) -> None:
    """Queries and keys by their own counts of heads, biases too; counts that disagree on the head's size stop."""
    rng = np.random.default_rng(0)
    shapes = {
        "tok_embeddings.weight": (11, 24), "norm.weight": (24,), "output.weight": (11, 24),
        "layers.10.attention.wq.weight": (24, 24), "layers.10.attention.wq.bias": (24,),
        "layers.10.attention.wk.weight": (12, 24), "layers.10.attention.wv.weight": (12, 24),
        "layers.10.attention.wo.weight": (24, 24), "layers.10.feed_forward.w1.weight": (20, 24),
        "layers.10.feed_forward.w2.weight": (24, 20), "layers.10.feed_forward.w3.weight": (20, 24),
        "layers.10.attention_norm.weight": (24,), "layers.10.ffn_norm.weight": (24,),
    }  # fmt: skip
    layers = [{fqn.replace("10", str(n)): shape for fqn, shape in shapes.items()} for n in range(11)]
    model = {fqn: rng.normal(size=shape).astype(np.float32) for shapes in layers for fqn, shape in shapes.items()}
    save_file({**model, "freqs_cis": np.zeros((4, 3), np.float32)}, tmp_path / "titan.safetensors")
    conversion, arrays = exported(tmp_path / "titan.safetensors", tmp_path, facts={"heads": 4, "kv_heads": 2})
    assert_equal(arrays, titan_expected(model, 4, 2))
    dropped = {one.fqn: one.why for one in conversion.dropped}
    assert dropped == {"freqs_cis": "rotary frequencies, computed from the config"}
    with pytest.raises(LayoutError, match=r"rows make head_dim 6 with heads = 4 .*, expected 12 \(rows of .*wk"):
        prepare_export(tmp_path / "titan.safetensors", tmp_path / "new", facts={"heads": 4, "kv_heads": 1})
    save_file({k: v for k, v in model.items() if ".7." not in k}, tmp_path / "gap.safetensors")
    with pytest.raises(LayoutError, match="1 layer is missing: 7"):
        prepare_export(tmp_path / "gap.safetensors", tmp_path / "new", facts={"heads": 4, "kv_heads": 2})
