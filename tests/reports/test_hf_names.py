"""Reports on converters from Megatron to Hugging Face: padded vocabularies, few KV heads, odd fusions, lost experts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from tests.formats.megatron.build import DistWriter, add_weights, common_state, legacy_files
from tests.formats.megatron.places import CHECKPOINTS
from tests.formats.megatron.run import Run
from tests.reports.conftest import Ckpt
from tests.reports.made import put

Array = npt.NDArray[Any]
HEADS = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 2}  # of the models that `Run` makes
EVEN = (((0,),), ((1,),))


def arange(*shape: int, start: int = 1) -> Array:
    """Distinct values, none of them zero."""
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def megatron(folder: Path, tp: int, weights: dict[str, tuple[Array, int | None]], **args: Any) -> Path:
    """A ``torch_dist`` checkpoint of these weights, each cut by ``tp`` ranks along a dimension (None: whole), tied."""
    writer = DistWriter(Run(tp=tp))
    for key, (array, dim) in weights.items():
        cuts: Sequence[Array] = [array] if dim is None else np.split(array, tp, dim)
        for rank, cut in enumerate(cuts):
            offsets = [0] * array.ndim
            if dim is not None:
                offsets[dim] = rank * cut.shape[dim]
            writer.add(key, array.shape, tuple(offsets), np.ascontiguousarray(cut), rank)
    writer.add_object(
        "common_state/shard_0_1", common_state(writer.run, **{"untie_embeddings_and_output_weights": False, **args})
    )
    return put(folder, writer.files())


def run_files(run: Run, **args: Any) -> dict[str, bytes]:
    """A ``torch_dist`` checkpoint of a run's weights."""
    writer = DistWriter(run)
    add_weights(writer)
    writer.add_object("common_state/shard_0_1", common_state(run, **{**HEADS, **args}))
    return writer.files()


def layer(n: int, fused: Array, columns: int) -> dict[str, tuple[Array, int | None]]:
    """A model of ``n`` layers: its fused QKV, and what else there must be."""
    hidden = fused.shape[-1]
    name = "decoder.layers."
    return {
        "embedding.word_embeddings.weight": (arange(8, hidden), 0),
        f"{name}self_attention.linear_qkv.weight": (fused, 1),
        f"{name}self_attention.linear_proj.weight": (arange(n, hidden, columns), 2),
        f"{name}mlp.linear_fc1.weight": (arange(n, 16, hidden), None),
        f"{name}mlp.linear_fc2.weight": (arange(n, hidden, 8), 2),
    }


def test_r34_what_has_no_name_stops_the_export(ckpt: Ckpt, tmp_path: Path) -> None:
    """R34: what no rule covers (MTP layers) is listed and nothing is written; left out by name, all others are.

    Converters that skip what they do not know lose it, and what shares a file with it.
    """
    source = put(tmp_path / "source", run_files(Run(tp=2)))
    extra = megatron(
        tmp_path / "extra",
        2,
        {**layer(2, arange(2, 16, 8), 8), "mtp.layers.0.eh_proj.weight": (arange(4, 4), 0)},
        **HEADS,
    )
    done = ckpt("export", extra, tmp_path / "out")
    assert (done.status, (tmp_path / "out").exists()) == (3, False)
    assert "no name for 1 of 6 tensors, which would be lost: model.mtp.layers.0.eh_proj.weight" in done.text
    done = ckpt("export", extra, tmp_path / "out", "--exclude", "*mtp*", "--json")
    assert (done.status, done.json["n_tensors"]) == (0, 1 + 2 * 7)
    assert {"fqn": "model.mtp.layers.0.eh_proj.weight", "why": "not selected"} in done.json["dropped"]
    whole = ckpt("export", source, tmp_path / "whole", "--json").json
    assert whole["n_tensors"] == 3 + 2 * 9


def test_r34_layers_that_are_not_there(ckpt: Ckpt, tmp_path: Path) -> None:
    """R34: a model that has fewer layers than its args say, or lost its output layer, is no whole model."""
    short = put(tmp_path / "short", run_files(Run(), num_layers=3))
    refused = ckpt("export", short, tmp_path / "out")
    assert (refused.status, "1 layer is missing: 2 (args.num_layers of the checkpoint says 3)" in refused.text) == (
        3,
        True,
    )
    headless = put(tmp_path / "headless", run_files(Run(is_tied=True), untie_embeddings_and_output_weights=True))
    refused = ckpt("export", headless, tmp_path / "out")
    assert (refused.status, "the output layer is not there" in refused.text) == (3, True)


def test_names_that_are_kept_are_said_to_be(ckpt: Ckpt, tmp_path: Path) -> None:
    """A model of Megatron's that lost its embedding fits no family: that its names stay Megatron's is said."""
    source = CHECKPOINTS / "old012_zarr_t2p1d1/ckpt/iter_0000010"
    shutil.copytree(source, tmp_path / "in", ignore=shutil.ignore_patterns("*embedding.word_embeddings.weight"))
    done = ckpt("export", tmp_path / "in", tmp_path / "out")
    assert done.status == 0, done.err
    assert "names are kept as they are, as they fit no family (rules of megatron-llama cover 8 of 8" in done.text
    assert "names are kept" not in ckpt("export", source, tmp_path / "whole").text
    assert "names are kept" not in ckpt("export", source, tmp_path / "asked", "--family", "none").text


def test_r35_tied_embeddings(ckpt: Ckpt, tmp_path: Path) -> None:
    """R35: a tied model has no output layer, which is said; the embedding is the trained one."""
    run = Run(tp=2, layers=EVEN, is_tied=True)
    for name, files in (("dist", run_files(run)), ("ranks", legacy_files(run, with_optimizer=False))):
        source = put(tmp_path / name, files)
        facts = ("--fact", "heads=4", "--fact", "kv_heads=2")
        done = ckpt("export", source, tmp_path / f"{name}-out", *facts, "--json")
        assert "it is tied to the embedding" in " ".join(done.json["notes"])
        arrays = load_file(tmp_path / f"{name}-out/model.safetensors")
        assert "lm_head.weight" not in arrays
        expected = run.values("model", "embedding.word_embeddings.weight")
        assert np.array_equal(arrays["model.embed_tokens.weight"], expected)


def test_r55_padding_of_the_vocabulary(ckpt: Ckpt, tmp_path: Path) -> None:
    """R55: 10 true rows padded to 16 for TP 2: zero rows are dropped by themselves, others only when asked."""
    padded = arange(16, 2)
    padded[10:] = 0
    rest = layer(1, arange(1, 16, 2), 8)
    told = {**HEADS, "num_layers": 1, "vocab_size": 10}

    def source(name: str, table: Array, output: Array) -> Path:
        weights = {**rest, "embedding.word_embeddings.weight": (table, 0), "output_layer.weight": (output, 0)}
        return megatron(tmp_path / name, 2, weights, **told)

    def exported(name: str, *options: str) -> tuple[Any, dict[str, Array]]:
        done = ckpt("export", tmp_path / name, tmp_path / f"{name}-out", "--json", "--overwrite", *options)
        return done.json, load_file(tmp_path / f"{name}-out/model.safetensors")

    source("zero", padded, 2 * padded)
    said, arrays = exported("zero")
    assert np.array_equal(arrays["model.embed_tokens.weight"], padded[:10])
    assert np.array_equal(arrays["lm_head.weight"], 2 * padded[:10])
    dropped = {one["fqn"]: one["why"] for one in said["dropped"]}
    assert "rows from there on are zero" in dropped["model.embedding.word_embeddings.weight[10:16]"]

    source("filled", padded, arange(16, 2))
    said, arrays = exported("filled")
    assert arrays["model.embed_tokens.weight"].shape == arrays["lm_head.weight"].shape == (16, 2)
    assert "all 16 rows of the vocabulary are kept" in " ".join(said["notes"])
    _, arrays = exported("filled", "--true-vocab", "11")
    assert np.array_equal(arrays["lm_head.weight"], arange(16, 2)[:11])
    refused = ckpt("export", tmp_path / "filled", tmp_path / "new", "--true-vocab", "17")
    assert (refused.status, "--true-vocab 17 does not fit 16 rows" in refused.err) == (3, True)


def test_r58_fewer_kv_heads_than_ranks(ckpt: Ckpt, tmp_path: Path) -> None:
    """R58: 8 heads and 2 KV heads on TP 4, so that two ranks hold neither keys nor values: q, k, v come out exact."""
    n_layers, head_dim, hidden = 2, 3, 4
    fused = arange(n_layers, 12 * head_dim, hidden)
    source = megatron(
        tmp_path / "source", 4, layer(n_layers, fused, 8 * head_dim),
        num_attention_heads=8, num_query_groups=2, kv_channels=head_dim,
    )  # fmt: skip
    assert ckpt("export", source, tmp_path / "out").status == 0
    arrays = load_file(tmp_path / "out/model.safetensors")
    rows = np.arange(12).repeat(head_dim)
    for number in range(n_layers):
        for name, blocks in (("q", (0, 1, 2, 3, 6, 7, 8, 9)), ("k", (4, 10)), ("v", (5, 11))):
            expected = fused[number][np.isin(rows, blocks)]
            assert np.array_equal(arrays[f"model.layers.{number}.self_attn.{name}_proj.weight"], expected)


def test_r58_without_grouped_queries(ckpt: Ckpt, tmp_path: Path) -> None:
    """R58: without group_query_attention Megatron's num_query_groups is 1 and means nothing: each head has its own."""
    fused = arange(1, 4 * 3 * 2, 8)
    told = {"num_layers": 1, "num_attention_heads": 4, "num_query_groups": 1, "kv_channels": 2}
    source = megatron(tmp_path / "source", 2, layer(1, fused, 8), group_query_attention=False, **told)
    assert ckpt("export", source, tmp_path / "out").status == 0
    arrays = load_file(tmp_path / "out/model.safetensors")
    expected = fused[0].reshape(4, 3, 2, 8)[:, 1].reshape(8, 8)
    assert np.array_equal(arrays["model.layers.0.self_attn.k_proj.weight"], expected)
    misread = megatron(tmp_path / "misread", 2, layer(1, fused, 8), **told)
    refused = ckpt("export", misread, tmp_path / "new")
    assert (refused.status, "expected 2 (args.kv_channels of the checkpoint)" in refused.text) == (3, True)


FUSED_RULES = r"""
[[rule]]
match = '{layers}self_attention\.in_proj\.weight'
to = "model.layers.{layer}.linear_attn.{part}.weight"
groups = "GROUPS"
parts = [{ name = "a", weight = 4 }, { name = "b", weight = 2 }, { name = "c", weight = 6 }]
"""


@pytest.mark.parametrize("groups", ["1", "tp"], ids=["global", "by-rank"])
def test_r59_unequal_parts_by_a_rule_of_ones_own(ckpt: Ckpt, tmp_path: Path, groups: str) -> None:
    """R59: a fused projection of parts 4, 2 and 6 at TP 2, with a rules file; whole, or ranks' parts one after another.

    Cut as one piece it is right at TP 1 and wrong at TP 2.
    """
    parts = {"a": arange(2, 8, 4), "b": arange(2, 4, 4, start=500), "c": arange(2, 12, 4, start=900)}
    by_rank = [np.concatenate([np.split(part, 2, 1)[rank] for part in parts.values()], 1) for rank in range(2)]
    fused = np.concatenate(by_rank if groups == "tp" else list(parts.values()), 1)
    weights = {**layer(2, arange(2, 16, 8), 8), "decoder.layers.self_attention.in_proj.weight": (fused, 1)}
    source = megatron(tmp_path / "source", 2, weights, **HEADS)
    refused = ckpt("export", source, tmp_path / "out")
    assert (refused.status, "--naming FILE" in refused.err) == (3, True)
    (tmp_path / "rules.toml").write_text(FUSED_RULES.replace("GROUPS", groups))
    assert ckpt("export", source, tmp_path / "out", "--naming", tmp_path / "rules.toml").status == 0
    arrays = load_file(tmp_path / "out/model.safetensors")
    found = {
        name: np.stack([arrays[f"model.layers.{n}.linear_attn.{name}.weight"] for n in range(2)]) for name in parts
    }
    assert {name: array.tolist() for name, array in found.items()} == {n: part.tolist() for n, part in parts.items()}


def test_r61_every_expert_or_none(ckpt: Ckpt, tmp_path: Path) -> None:
    """R61: experts of 4 ranks (and 2 stages), on one process: as many as the args say, each its own; else an error."""
    run = Run(tp=2, dp=4, ep=4, n_experts=8, layers=EVEN)
    source = put(tmp_path / "source", run_files(run))
    done = ckpt("export", source, tmp_path / "out", "--family", "qwen_moe", "--json")
    arrays = load_file(tmp_path / "out/model.safetensors")
    down = run.values("model", "decoder.layers.mlp.experts.experts.linear_fc2.weight")
    pattern = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.down_proj\.weight")
    found = {m.groups(): array for fqn, array in arrays.items() if (m := pattern.fullmatch(fqn)) is not None}
    assert {key: array.tolist() for key, array in found.items()} == {
        (str(n), str(e)): down[n, e].tolist() for n in range(2) for e in range(8)
    }
    assert done.json["n_tensors"] == len(arrays) == 3 + 2 * (7 + 3 * 8)
    lost = put(tmp_path / "lost", run_files(run, num_experts=16))
    refused = ckpt("export", lost, tmp_path / "new", "--family", "qwen_moe")
    assert (refused.status, "8 experts are missing: 8, 9" in refused.text) == (3, True)


def test_r61_first_layer_without_experts(ckpt: Ckpt, tmp_path: Path) -> None:
    """R61: dense and expert layers of one model, under per-layer keys, distributed and per rank: the same export."""
    run = Run(tp=2, dp=2, ep=2, n_experts=4, n_dense=1, layers=(((0, 1, 2),), ((3, 4),)))
    outs = []
    for name, files in (("dist", run_files(run)), ("ranks", legacy_files(run, with_optimizer=False))):
        source, out = put(tmp_path / name, files), tmp_path / f"{name}-out"
        facts = ("--family", "qwen_moe", "--fact", "heads=4", "--fact", "kv_heads=2")
        assert ckpt("export", source, out, *facts).status == 0
        outs.append((out / "model.safetensors").read_bytes())
    arrays = load_file(tmp_path / "dist-out/model.safetensors")
    assert "model.layers.0.mlp.gate_proj.weight" in arrays
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in arrays
    assert outs[0] == outs[1]
