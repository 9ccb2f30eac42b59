"""A checkpoint of Megatron held against one with names of transformers, through the views that an export writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.digest import digests
from ckpt_tool.api.manifest_file import write_manifest
from ckpt_tool.api.trust.diff import diff
from ckpt_tool.compare.report import DiffReport
from ckpt_tool.errors import LayoutError, UsageError
from tests.formats.megatron.places import CHECKPOINTS

DENSE = CHECKPOINTS / "td_full_t2p2d2/ckpt"


def statuses(report: DiffReport) -> dict[str, int]:
    """Counts that are not zero."""
    return {status: n for status, n in report.counts.items() if n}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dense model as Hugging Face has it."""
    target = tmp_path_factory.mktemp("weights") / "hf"
    export(DENSE, target, durable=False)
    return target


@pytest.mark.parametrize(
    ("name", "family"),
    [("td_full_t2p2d2", "auto"), ("dpr_vpp_p2", "llama"), ("moe_dpr_e2", "mixtral"), ("legacy_moe_e2", "qwen_moe")],
)
def test_an_export_is_the_same_as_its_source(name: str, family: str, tmp_path: Path) -> None:
    """Every tensor of an export meets what it was made of, bit for bit, without memory for a whole tensor."""
    export(CHECKPOINTS / name / "ckpt", tmp_path / "hf", family=family, durable=False)
    source = CHECKPOINTS / name / "ckpt"
    report = diff(source, tmp_path / "hf", section="model", names="hf", family=family, memory_budget_bytes=1 << 16)
    n_tensors = len(load_file(tmp_path / "hf/model.safetensors"))
    assert (statuses(report), report.is_same) == ({"same": n_tensors}, True)
    assert any("names are megatron-" in note for note in report.notes)


def test_two_layouts_of_megatron_meet_with_their_optimizers() -> None:
    """A distributed checkpoint and rank files of one run are the same, weights, masters and moments."""
    report = diff(DENSE, CHECKPOINTS / "legacy_t2p2/ckpt", names="hf")
    assert (statuses(report), report.is_same) == ({"same": 4 * 39}, True)


def test_a_training_state_of_torch_has_the_same_moments(tmp_path: Path) -> None:
    """What a job of FSDP gets has the moments of the source, and its masters as weights, which the cast explains."""
    reshard(DENSE, tmp_path / "fsdp", names="hf", durable=False)
    report = diff(DENSE, tmp_path / "fsdp", names="hf")
    kinds = {(each.status, each.reason.kind if each.reason else None) for each in report.tensors}
    assert kinds == {("same", None), ("dtype", "cast"), ("only-a", None)}
    assert all(each.fqn.endswith(".param") for each in report.tensors if each.status == "only-a")
    assert statuses(report) == {"same": 2 * 39, "dtype": 39, "only-a": 39}


def test_one_element_is_found_where_the_model_has_it(weights: Path, tmp_path: Path) -> None:
    """A changed key, and gate and up swapped, are told by the names and indices that the model has, with the reason."""
    arrays = load_file(weights / "model.safetensors")
    arrays["model.layers.2.self_attn.k_proj.weight"][3, 5] = 7
    gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
    arrays[gate], arrays[up] = arrays[up], arrays[gate]
    save_file(arrays, tmp_path / "model.safetensors")
    report = diff(DENSE, tmp_path / "model.safetensors", section="model", names="hf")
    found = {each.fqn: each for each in report.tensors if each.status == "differs"}
    assert set(found) == {gate, up, "model.layers.2.self_attn.k_proj.weight"}
    measures = found["model.layers.2.self_attn.k_proj.weight"].measures
    assert measures is not None
    assert (measures.n_differing, measures.first_index, measures.first_b) == (1, (3, 5), "7")
    reason = found[gate].reason
    assert reason is not None
    assert (reason.kind, reason.text) == ("misplaced", f"B holds what A calls {up}")


def test_rows_of_the_vocabulary(weights: Path) -> None:
    """More rows are a difference with its reason; those that the user calls padding are left out, with a note."""
    report = diff(CHECKPOINTS / "td_full_t4p1/ckpt", weights, section="model", names="hf")
    reasons = {each.fqn: each.reason.text for each in report.tensors if each.status != "same" and each.reason}
    text = "A has 16 more rows, not zero; what both have is the same"
    assert reasons == {"lm_head.weight": text, "model.embed_tokens.weight": text}
    cut = diff(CHECKPOINTS / "td_full_t4p1/ckpt", DENSE, section="model", names="hf", true_vocab=100)
    assert (cut.is_same, cut.counts["same"]) == (True, 39)
    assert any(note.startswith("A: vocab is 100: --true-vocab 100") for note in cut.notes)


def test_numbers_of_the_other_side(weights: Path, tmp_path: Path) -> None:
    """Heads that a run does not record are taken from the config on the other side; without one they are asked for."""
    unrecorded = CHECKPOINTS / "old012_fsms_t2p1d2/ckpt"
    report = diff(unrecorded, weights, section="model", names="hf")
    assert (report.is_same, report.counts["same"]) == (True, 39)
    assert "A: heads is 4: config.num_attention_heads of B" in report.notes
    save_file(load_file(weights / "model.safetensors"), tmp_path / "bare.safetensors")
    with pytest.raises(LayoutError, match="needs heads, kv_heads"):
        diff(unrecorded, tmp_path / "bare.safetensors", section="model", names="hf")
    facts = {"heads": 4, "kv_heads": 2}
    assert diff(unrecorded, tmp_path / "bare.safetensors", section="model", names="hf", facts=facts).is_same


def test_a_tensor_without_a_name_keeps_its_own(tmp_path: Path) -> None:
    """What no rule covers is compared under its own name, and a note says which that is."""
    qkv, fc1 = np.arange(64, dtype=np.float32).reshape(16, 4), np.ones((6, 4), np.float32)
    words, odd = np.full((5, 4), 2, np.float32), "decoder.layers.0.odd.weight"
    fused = {
        "embedding.word_embeddings.weight": words,
        "decoder.layers.0.self_attention.linear_qkv.weight": qkv,
        "decoder.layers.0.mlp.linear_fc1.weight": fc1,
        odd: np.ones(3, np.float32),
    }
    save_file(fused, tmp_path / "a.safetensors")
    apart = {
        "model.embed_tokens.weight": words,
        **{f"model.layers.0.mlp.{part}_proj.weight": fc1[:3].copy() for part in ("gate", "up")},
        **{
            f"model.layers.0.self_attn.{part}_proj.weight": rows.copy()
            for part, rows in zip("qkv", np.split(qkv, [8, 12]), strict=True)
        },
    }
    save_file({**apart, odd: np.zeros(3, np.float32)}, tmp_path / "b.safetensors")
    facts = {"heads": 2, "kv_heads": 1}
    report = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", names="hf", facts=facts)
    assert {each.fqn: each.status for each in report.tensors} == {**dict.fromkeys(apart, "same"), odd: "differs"}
    assert f"A: 1 tensor stays as stored, without a name there: {odd}" in report.notes


def test_digests_of_an_export(weights: Path, tmp_path: Path) -> None:
    """A list of digests under the names of transformers proves the source equal, which is read once."""
    write_manifest(digests(weights), tmp_path / "hf.json")
    report = diff(DENSE, tmp_path / "hf.json", section="model", names="hf")
    assert (statuses(report), report.is_same) == ({"same": 39}, True)


def test_the_hint_says_what_to_type(weights: Path) -> None:
    """Names of a family that meet nothing are told for what they are, on either side, with the option."""
    said = "are megatron-llama's: --names hf pairs them"
    assert diff(DENSE, weights, section="model").hint == f"names of A {said}"
    assert diff(weights, DENSE, section="model").hint == f"names of B {said}"
    experts = diff(CHECKPOINTS / "moe_dpr_e2/ckpt", weights, section="model")
    equally = "A: the names fit megatron-mixtral and megatron-qwen_moe equally well"
    assert experts.hint == f"{equally}: --names hf --family NAME pairs them"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": "nope"}, "names has no 'nope'"),
        ({"facts": {"heads": 4}}, "--fact heads=4 is about other names, which are not asked for"),
        ({"family": "llama"}, "--family llama is about other names"),
        ({"naming": "/no/such/file", "names": "hf"}, "the naming file cannot be read"),
        ({"naming": "/no/such/file"}, "the naming file cannot be read"),
        ({"family": "nope", "names": "hf"}, "no naming is called 'nope'"),
        ({"family": "mixtral", "names": "hf"}, "no names of mixtral fit the tensors of A or B"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, str], message: str, weights: Path) -> None:
    """What is said of names and would be ignored is refused, and so are names that nobody has."""
    with pytest.raises(UsageError, match=message):
        diff(DENSE, weights, **options)  # type: ignore[arg-type]


def test_names_that_both_have_already(weights: Path) -> None:
    """Two models of transformers need no other names, and the message says so."""
    with pytest.raises(UsageError, match="no family's names are known for the tensors of A or B"):
        diff(weights, weights, names="hf")
