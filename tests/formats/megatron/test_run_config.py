"""Folders of NeMo 2 and Megatron-Bridge: weights as Megatron has them, settings of the run in a file of YAML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.megatron_run import run_facts
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats.megatron.dist_reader import READER
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import all_rows, assemble, source_of
from tests.formats.megatron.build import DistWriter, add_buckets, add_weights
from tests.formats.megatron.loading import assert_loads
from tests.formats.megatron.places import CHECKPOINTS, dense_shapes, padded_for, truth_from_seed
from tests.formats.megatron.run import Run
from tests.formats.megatron.test_optimizer_sources import assert_holds
from tests.formats.megatron.test_rank_writer import loaded

RUN = Run(tp=2, dp=2, n_experts=4)
SETTINGS = """
_target_: megatron.bridge.training.config.ConfigContainer
model:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  expert_model_parallel_size: 1
  num_layers: 2
  num_moe_experts: 4  # of each layer
  share_embeddings_and_output_weights: false
  seq_length: 64
dataset:
  seq_length: 128
"""


def files(folder: str, settings: str) -> dict[str, bytes]:
    """A checkpoint whose common state has no arguments."""
    writer = DistWriter(RUN)
    add_weights(writer)
    add_buckets(writer)
    writer.add_object("common_state/shard_0_1", {"checkpoint_version": 3.0})
    return {**{f"{folder}/{path}": data for path, data in writer.files().items()}, settings: SETTINGS.encode()}


@pytest.mark.parametrize(
    ("folder", "settings", "program"),
    [
        ("weights", "context/model.yaml", "NeMo 2"),
        ("iter_0000007", "iter_0000007/run_config.yaml", "Megatron-Bridge"),
    ],
)
def test_settings_beside_the_weights_stand_for_arguments(folder: str, settings: str, program: str) -> None:
    """Sizes are those of the settings, so that the optimizer's buckets become tensors; what is read is said."""
    store = MemoryStore(files(folder, settings))
    source = source_of(store)
    manifest = READER.read(source)
    chunks = READER.resolve(source, manifest, all_rows(manifest))
    found = {fqn: assemble(store, manifest, chunks, fqn) for fqn in manifest.tensors.fqns}
    assert found == RUN.truth()
    assert manifest.info["folder"] == folder
    assert manifest.info.get("step") == (7 if "iter" in folder else None)
    assert f"{settings} of {program} tells the sizes of the run" in manifest.notes
    facts = dict(run_facts(manifest))
    assert (facts["parallel"], facts["experts"]) == ("TP 2 PP 1 EP 1", "4; EP rank 0: 0-3")
    assert facts["reshards"] == (
        "weights and optimizer to any TP, PP, VPP, EP, ETP and DP (--to megatron-dist, megatron-legacy); no args were "
        "saved, so they need --arg num_attention_heads=N --arg swiglu=true/false"
    )
    assert manifest.mesh is not None
    assert manifest.mesh.evidence == f"{settings} of {program}"


def test_settings_that_contradict_themselves_tell_nothing() -> None:
    """A name with two values is none that counts: buckets stay what they are, and the missing fact is named."""
    contents = files("weights", "context/model.yaml")
    contents["context/model.yaml"] += b"  tensor_model_parallel_size: 4\n"
    manifest = READER.read(source_of(MemoryStore(contents)))
    assert "tensor_model_parallel_size" not in manifest.info["args"]
    assert "tensor- and pipeline-parallel sizes of the run are not known" in str(manifest.info["optimizer_undecoded"])


MODEL = """
model:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  num_layers: 4
  hidden_size: 32
  num_attention_heads: 4
  gated_linear_unit: true
  vocab_size: 100
  make_vocab_size_divisible_by: 8
"""


def nemo_root(folder: Path, settings: str = MODEL, without: Sequence[str] = ()) -> Path:
    """A run of real Megatron as NeMo 2 has it: settings in YAML, Lightning's entries in the common state, no args."""
    options: dict[str, Any] = {"tp": 2, "mcore_version": "0.16", "durable": False}
    reshard(CHECKPOINTS / "td_full_t2p2d2/ckpt", folder / "run", to="megatron-dist", **options)
    root = (folder / "run/iter_0000010").rename(folder / "nemo")
    weights = folder / "nemo/weights"
    weights.mkdir()
    for path in [path for path in root.iterdir() if path != weights]:
        path.rename(weights / path.name)
    common = loaded(weights / "common.pt")
    for name in ("args", "iteration", *without):
        del common[name]
    torch.save({**common, "global_step": 10, "epoch": 0, "pytorch-lightning_version": "2.4"}, weights / "common.pt")
    (root / "context").mkdir()
    (root / "context/model.yaml").write_text(settings)
    return root


@pytest.mark.parametrize("to", ["megatron-dist", "megatron-legacy"])
def test_arguments_are_made_of_settings(to: str, tmp_path: Path) -> None:
    """A run of NeMo 2 becomes one of Megatron's: its args say what is known, and Lightning's entries are listed."""
    result = reshard(nemo_root(tmp_path), tmp_path / "out", to=to, pp=2, durable=False)
    assert_holds(tmp_path / "out", padded_for(truth_from_seed(dense_shapes(4, 112))(), 1))
    with open_checkpoint(tmp_path / "out") as checkpoint:
        values = {blob.fqn: blob.value for blob in checkpoint.load_blobs()}
    expected = {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "swiglu": True, "padded_vocab_size": 104,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "no_save_rng": True,
    }  # fmt: skip
    assert {name: values["args"].attribute(name) for name in expected} == expected
    assert (values["iteration"], values["checkpoint_version"]) == (10, 3.0)
    reasons = {one.fqn: one.why for one in result.dropped}
    assert all(
        "nothing of this name" in reasons[name] for name in ("epoch", "global_step", "pytorch-lightning_version")
    )
    assert any("made of its tensors and context/model.yaml of NeMo 2" in note for note in result.notes)


def test_what_nobody_tells_is_asked_for(tmp_path: Path) -> None:
    """Heads and gates that neither settings nor tensors tell, and what they contradict, are named with the option."""
    root = nemo_root(tmp_path, MODEL[: MODEL.index("  num_layers")])
    options: dict[str, Any] = {"to": "megatron-dist", "durable": False}
    with pytest.raises(
        LayoutError, match=r"nor context/model\.yaml of NeMo 2 tell num_attention_heads, swiglu"
    ) as caught:
        reshard(root, tmp_path / "out", **options)
    assert "--arg num_attention_heads=N --arg swiglu=true/false" in str(caught.value.hint)
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"model_type": "llama", "intermediate_size": 48, "vocab_size": 100, "rms_norm_eps": 1e-5, "head_dim": 8}
    config.write_text(json.dumps({**sizes, **more, "max_position_embeddings": 64}))
    reshard(root, tmp_path / "by-config", config=config, **options)
    reshard(root, tmp_path / "by-word", arguments={"num_attention_heads": 4, "swiglu": True}, **options)
    (root / "context/model.yaml").write_text(MODEL.replace("num_layers: 4", "num_layers: 5"))
    with pytest.raises(LayoutError, match=r"num_layers is 4 by its tensors and 5 by context/model\.yaml") as caught:
        reshard(root, tmp_path / "out", **options)
    assert caught.value.hint == "choose with --arg num_layers=VALUE"
    assert not (tmp_path / "out").exists()


def test_state_without_step_or_groups_is_not_written(tmp_path: Path) -> None:
    """The iteration can be said; hyperparameters of an optimizer cannot, and weights alone are a release."""
    root = nemo_root(tmp_path, without=("optimizer",))
    common = torch.load(root / "weights/common.pt", weights_only=False)
    del common["global_step"]
    torch.save(common, root / "weights/common.pt")
    options: dict[str, Any] = {"to": "megatron-dist", "durable": False}
    with pytest.raises(LayoutError, match="the iteration is not known") as caught:
        reshard(root, tmp_path / "out", **options)
    assert caught.value.hint == "give it with --arg iteration=N"
    with pytest.raises(Unsupported, match="no param_groups"):
        reshard(root, tmp_path / "out", arguments={"iteration": 10}, **options)
    reshard(root, tmp_path / "out", include=["model.*"], **options)
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "release"


@pytest.mark.peer
def test_megatron_resumes_a_run_of_nemo(launcher: Path, tmp_path: Path) -> None:
    """``load_checkpoint`` fills model, masters, moments and step; ``CKPT_PEER_MEGATRON`` names its python."""
    reshard(nemo_root(tmp_path), tmp_path / "out", to="megatron-dist", durable=False)
    assert_loads(launcher, tmp_path / "out", {}, "")
