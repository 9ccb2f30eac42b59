"""Section D of the collected reports: Megatron, its descendants, and who converts to and from it.

Told by a test elsewhere, or here as seen from outside:

====  ============================================================================================
R50   reports/test_megatron_state.py (state of 0.12 in the weights' shape)
R51   reports/test_megatron_state.py (buckets decoded, or the missing fact), formats/megatron/test_layouts.py
R52   reports/test_megatron_state.py (tails of zeros)
R53   reports/test_megatron_state.py (a list of rank 0 in the common state)
R55   here, reports/test_hf_names.py (padded vocabularies), formats/megatron/test_writer.py (their moments)
R56   reports/test_megatron_state.py (each cut, and a weight that no rule knows)
R58   here, reports/test_hf_names.py (fewer groups than ranks)
R59   reports/test_hf_names.py (unequal parts)
R61   reports/test_hf_names.py (experts, counted)
R62   reports/test_megatron_state.py (stages and chunks), formats/megatron/test_parallel.py
R64   reports/test_megatron_state.py (Megatron-FSDP, both ways), api/test_megatron_fsdp.py
R65   here (nothing is imported), test_layers.py
R67   here (memory)
R68   reports/test_runs.py (trackers), formats/megatron/test_location.py
R70   here (shapes that a program wants)
R71   here (GPT-NeoX's pipeline files)
R73   here (random states)
R74   here (rules as data)
====  ============================================================================================
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file, save_file

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from tests.formats.megatron.places import CHECKPOINTS
from tests.reports.conftest import Ckpt

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


READ_ALL = """
import sys
for name in ("torch", "megatron", "transformer_engine", "apex", "safetensors", "deepspeed"):
    sys.modules[name] = None  # an import of it fails
from pathlib import Path
from ckpt_tool.api.checkpoint import open_checkpoint
n = 0
for folder in sorted(Path(sys.argv[1]).iterdir()):
    with open_checkpoint(folder / "ckpt") as checkpoint:
        checkpoint.load_blobs()
        n += sum(checkpoint[fqn].numpy().size > 0 for fqn in list(checkpoint)[::8])
print(n)
"""


def test_r65_readers_need_nothing_of_megatron() -> None:
    """R65: every form of every version reads where neither Megatron nor torch can be imported.

    `tests/layer_rules.py` keeps the same of the source text: who may import torch, and that nobody imports megatron.
    """
    command = [sys.executable, "-c", READ_ALL, str(CHECKPOINTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


CAPPED = """
import json, sys
from ckpt_tool.api.convert.reshard import reshard
import ckpt_tool.api.convert.megatron_source, ckpt_tool.formats.megatron.dist_writer
source, target, n_workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
def peak():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
before = peak()
result = reshard(source, target, to="megatron-dist", tp=4, pp=3, memory_budget_bytes=24 << 20, n_workers=n_workers,
                 arguments={"make_vocab_size_divisible_by": 8}, durable=False, digest=None)
print(json.dumps([result.nbytes >> 20, peak() - before >> 10]))
"""


def big_model(folder: Path, width: int, layers: int) -> int:
    """A Llama of ``7 * layers + 2`` tensors of ``2 * width**2`` bytes; a sparse file with marks. Number of tensors."""
    folder.mkdir()
    names = [f"model.layers.{n}.self_attn.{p}_proj" for n in range(layers) for p in "qkvo"]
    names += [f"model.layers.{n}.mlp.{p}_proj" for n in range(layers) for p in ("gate", "up", "down")]
    square = [*(f"{name}.weight" for name in names), "model.embed_tokens.weight", "lm_head.weight"]
    norms = [f"model.layers.{n}.{p}_layernorm.weight" for n in range(layers) for p in ("input", "post_attention")]
    shapes = dict.fromkeys(square, (width, width)) | dict.fromkeys([*norms, "model.norm.weight"], (width,))
    header, at, starts = {}, 0, []
    for name, shape in shapes.items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
        starts.append(at)
        at += nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        base = file.tell()
        file.truncate(base + at)
        for number, start in enumerate(starts):
            file.seek(base + start + 2 * (number % width))
            file.write(number.to_bytes(2, "little"))
    config = {
        "model_type": "llama", "vocab_size": width, "hidden_size": width, "intermediate_size": width,
        "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": width // 16,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return len(square)


def test_r67_memory_is_the_budget_whatever_the_model(tmp_path: Path) -> None:
    """R67: 65 tensors of 8 MB go to 12 ranks of Megatron by four workers, and not 64 MB more are ever in memory.

    One worker and four write the same bytes, and what was marked in each tensor is there.
    """
    assert big_model(tmp_path / "hf", 2048, 9) == 65
    [written_mib, grown_mib] = converted(tmp_path / "hf", tmp_path / "out", 4)
    with open_checkpoint(tmp_path / "hf") as source, open_checkpoint(tmp_path / "out") as target:
        down = target["model.decoder.layers.mlp.linear_fc2.weight"]
        for layer in (0, 8):
            expected = source[f"model.layers.{layer}.mlp.down_proj.weight"].numpy()
            assert expected.view(np.uint16).any()
            assert down[layer].tobytes() == expected.tobytes()
    shutil.rmtree(tmp_path / "out")
    assert written_mib > 500
    assert grown_mib < 64
    big_model(tmp_path / "small", 256, 9)
    found = []
    for n_workers in (1, 4):
        converted(tmp_path / "small", tmp_path / f"{n_workers}", n_workers)
        files = (path for path in (tmp_path / f"{n_workers}").rglob("*") if path.is_file())
        found.append({path.name: path.read_bytes() for path in files})
    assert found[0] == found[1]


def converted(source: Path, target: Path, n_workers: int) -> list[int]:
    """Mebibytes that were written, and by how many the process grew meanwhile."""
    command = [sys.executable, "-c", CAPPED, str(source), str(target), str(n_workers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    numbers: list[int] = json.loads(done.stdout)
    return numbers


def test_r70_a_position_embedding_of_another_length_is_one_row(ckpt: Ckpt, tmp_path: Path) -> None:
    """R70: 1,024 positions saved, 512 wanted: the name with both shapes, before any job is started."""
    shapes = {"embedding.position_embeddings.weight": 1024, "embedding.word_embeddings.weight": 16}
    for name, sizes in (("saved", shapes), ("wanted", {**shapes, "embedding.position_embeddings.weight": 512})):
        save_file(
            {key: np.ones((size, 4), np.float32) for key, size in sizes.items()}, tmp_path / f"{name}.safetensors"
        )
    template = ckpt("inspect", tmp_path / "wanted.safetensors", "--json").out
    (tmp_path / "wanted.json").write_text(template)
    done = ckpt("diff", tmp_path / "saved.safetensors", tmp_path / "wanted.json", "--json")
    assert done.status == 1
    [row] = done.json["tensors"]
    assert (row["fqn"], row["status"]) == ("embedding.position_embeddings.weight", "shape")
    assert (row["shape_a"], row["shape_b"]) == ([1024, 4], [512, 4])
    shown = ckpt("diff", tmp_path / "saved.safetensors", tmp_path / "wanted.json").text
    assert "embedding.position_embeddings.weight" in shown
    assert "[1024, 4]" in shown
    assert "[512, 4]" in shown


NEOX_RULES = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r".*layernorm\.(weight|bias)", r".*dense.*\.bias"],
    "parameter_with_row_parallelism_patterns": [r".*attention\.dense\.weight"],
}


def test_r71_pipeline_files_of_gpt_neox(ckpt: Ckpt, tmp_path: Path) -> None:
    """R71: ``layer_XX-model_YY-model_states.pt`` is known; parts are joined by a file that says how, not guessed."""
    rng = np.random.default_rng(0)
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (4,), "attention.query_key_value.weight": (12, 4), "attention.dense.weight": (4, 4),
        "attention.dense.bias": (4,),
    }  # fmt: skip
    layers: dict[int, dict[str, tuple[int, ...]]] = {
        0: {"word_embeddings.weight": (8, 4)},
        2: block,
        3: block,
        5: {"final_linear.weight": (8, 4)},
    }
    whole = {
        f"{number}.{name}": rng.normal(size=shape).astype(np.float32)
        for number, shapes in layers.items() for name, shape in shapes.items()
    }  # fmt: skip
    folder = tmp_path / "run/global_step7"
    folder.mkdir(parents=True)
    (tmp_path / "run/latest").write_text("global_step7")
    for rank in range(2):
        for number, shapes in layers.items():
            own = {}
            for name in shapes:
                dim = 1 if name == "attention.dense.weight" else 0
                is_cut = not name.endswith(("layernorm.weight", ".bias"))
                array = whole[f"{number}.{name}"]
                own[name] = torch.from_numpy((np.split(array, 2, dim)[rank] if is_cut else array).copy())
            torch.save(own, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        state = {"module": None, "dp_world_size": 1, "mp_world_size": 2, "global_steps": 7, "ds_version": "0.9.0"}
        torch.save(state, folder / f"mp_rank_{rank:02d}_model_states.pt")
    apart = ckpt("inspect", tmp_path / "run", "--json").json
    assert apart["format"] == "deepspeed"
    assert any("universal_checkpoint_info.json" in note for note in apart["notes"])
    (folder / "universal_checkpoint_info.json").write_text(json.dumps(NEOX_RULES))
    assert ckpt("export", tmp_path / "run", tmp_path / "out.safetensors", "--names", "source").status == 0
    found = {name.removeprefix("module."): array for name, array in load_file(tmp_path / "out.safetensors").items()}
    assert {name: array.tolist() for name, array in found.items()} == {n: a.tolist() for n, a in whole.items()}


@pytest.mark.parametrize("mesh", [("--tp", "4"), ("--pp", "4"), ("--tp", "4", "--rng", "drop")], ids="-".join)
def test_r73_random_states_of_another_grid_are_left_out(mesh: tuple[str, ...], ckpt: Ckpt, tmp_path: Path) -> None:
    """R73: states keyed by tensor-parallel and pipeline rank do not fit another grid: each is named, with why."""
    source = CHECKPOINTS / "td_full_t2p2d2/ckpt"
    done = ckpt("reshard", source, tmp_path / "out", "--to", "megatron", *mesh, "--json", "--no-fsync")
    reasons = {one["fqn"]: one["why"] for one in done.json["dropped"] if one["fqn"].startswith("rng_state")}
    assert len(reasons) == 4
    assert all("2 stages x 2 tensor-parallel ranks; the target has" in why for why in reasons.values())
    assert any("args.no_save_rng is set" in note for note in done.json["notes"])
    kept = ckpt("reshard", source, tmp_path / "kept", "--to", "megatron", *mesh[:2], "--rank-state", "keep")
    assert (kept.status, "Megatron then starts them afresh" in kept.text) == (2, True)


INTERLEAVED = """
[[rule]]
match = 'blocks\\.(?P<layer>\\d+)\\.in_proj\\.weight'
kind = "fused"
parts = [1, 1, 1]

[[rule]]
match = 'blocks\\.(?P<layer>\\d+)\\.out_proj\\.weight'
kind = "fused"
dim = 1
parts = [4, 2, 6]
"""


def test_r74_a_new_kind_of_sharding_is_a_rules_file(ckpt: Ckpt, tmp_path: Path) -> None:
    """R74: each rank has its part of every block (xtuner's InterleavedShard), of rows, and of unequal columns."""
    weights = {
        "blocks.0.in_proj.weight": np.arange(12 * 3, dtype=np.float32).reshape(12, 3),
        "blocks.0.out_proj.weight": np.arange(5 * 12, dtype=np.float32).reshape(5, 12),
    }
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "rules.toml").write_text(INTERLEAVED)
    arguments = ("--tp", "2", "--to", "torch-ranks")
    refused = ckpt("reshard", tmp_path / "model.safetensors", tmp_path / "out", *arguments)
    assert (refused.status, "--rules" in refused.text) == (3, True)
    done = ckpt(
        "reshard", tmp_path / "model.safetensors", tmp_path / "out", *arguments, "--rules", tmp_path / "rules.toml"
    )
    assert done.status == 0
    rows = [np.r_[0:2, 4:6, 8:10], np.r_[2:4, 6:8, 10:12]]
    columns = [np.r_[0:2, 4:5, 6:9], np.r_[2:4, 5:6, 9:12]]
    for rank, path in enumerate(sorted((tmp_path / "out").glob("*.pt"))):
        held = torch.load(path, weights_only=False)
        blocks, parts = (torch.cat(held[name], dim).numpy() for dim, name in enumerate(weights))
        assert blocks.tolist() == weights["blocks.0.in_proj.weight"][rows[rank]].tolist()
        assert parts.tolist() == weights["blocks.0.out_proj.weight"][:, columns[rank]].tolist()
