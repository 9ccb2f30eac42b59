"""Folders of NeMo 2 and Megatron-Bridge: weights as Megatron has them, settings of the run in a file of YAML."""

from __future__ import annotations

import pytest

from ckpt_tool.api.megatron_run import run_facts
from ckpt_tool.formats.megatron.dist_reader import READER
from ckpt_tool.storage.recording import MemoryStore
from tests.formats.conformance import all_rows, assemble, source_of
from tests.formats.megatron.build import DistWriter, add_buckets, add_weights
from tests.formats.megatron.run import Run

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
    assert facts["reshards"].startswith("tensors to any layout but Megatron's own, which need the run's args")


def test_settings_that_contradict_themselves_tell_nothing() -> None:
    """A name with two values is none that counts: buckets stay what they are, and the missing fact is named."""
    contents = files("weights", "context/model.yaml")
    contents["context/model.yaml"] += b"  tensor_model_parallel_size: 4\n"
    manifest = READER.read(source_of(MemoryStore(contents)))
    assert "tensor_model_parallel_size" not in manifest.info["args"]
    assert "tensor- and pipeline-parallel sizes of the run are not known" in str(manifest.info["optimizer_undecoded"])
