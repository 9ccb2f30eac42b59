"""NeMo: a folder with ``weights/``, and a ``.nemo`` archive, around what Megatron-Core and torch wrote."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import CkptError, NotFound, Unsupported
from tests.formats.conformance import FIXTURES
from tests.formats.megatron.places import CHECKPOINTS
from tests.reports.made import as_bytes

ITERATION = CHECKPOINTS / "td_full_t2p2d2/ckpt/iter_0000010"
CONFIG = b"target: nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel\n"


def archive(folder: Path, target: Path, mode: str = "w") -> Path:
    """``target`` with all of ``folder``, as NeMo packs it: names begin with ``./``."""
    with tarfile.open(target, mode) as packed:  # type: ignore[call-overload]
        packed.add(folder, ".")
    return target


def test_a_folder_of_nemo_2(tmp_path: Path) -> None:
    """``weights/`` beside ``context/``."""
    shutil.copytree(ITERATION, tmp_path / "weights")
    (tmp_path / "context").mkdir()
    (tmp_path / "context/model.yaml").write_bytes(CONFIG)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "megatron-dist"
        assert all(path.startswith("weights/") for path in checkpoint.manifest.files.paths)
    assert as_bytes(tmp_path) == as_bytes(ITERATION)
    assert verify(tmp_path, level="full").is_ok


def test_an_archive_with_a_distributed_checkpoint(tmp_path: Path) -> None:
    """``model_weights/`` in a tar is read where it lies, and exported from there."""
    shutil.copytree(ITERATION, tmp_path / "in/model_weights")
    (tmp_path / "in/model_config.yaml").write_bytes(CONFIG)
    nemo = archive(tmp_path / "in", tmp_path / "model.nemo")
    with open_checkpoint(nemo) as checkpoint:
        assert checkpoint.format == "megatron-dist"
    assert as_bytes(nemo) == as_bytes(ITERATION)
    assert verify(nemo, level="full").is_ok
    export(nemo, tmp_path / "w.safetensors", names="source", durable=False)
    ours, truth = as_bytes(tmp_path / "w.safetensors"), as_bytes(ITERATION)
    assert ours
    assert ours.items() <= truth.items()


def test_an_archive_with_a_state_dict(tmp_path: Path) -> None:
    """``model_weights.ckpt`` beside its settings and a tokenizer."""
    (tmp_path / "in").mkdir()
    state = {"encoder.weight": torch.arange(12.0).reshape(3, 4), "decoder.bias": torch.ones(2, dtype=torch.bfloat16)}
    torch.save(state, tmp_path / "in/model_weights.ckpt")
    (tmp_path / "in/model_config.yaml").write_bytes(CONFIG)
    (tmp_path / "in/0a1b_tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    nemo = archive(tmp_path / "in", tmp_path / "asr.nemo")
    assert as_bytes(nemo) == {
        "encoder.weight": ("float32", (3, 4), state["encoder.weight"].numpy().tobytes()),
        "decoder.bias": ("bfloat16", (2,), b"\x80\x3f" * 2),
    }
    assert verify(nemo, level="full").is_ok


def test_any_checkpoint_in_a_tar(tmp_path: Path) -> None:
    """An archive is a folder for every format."""
    source = FIXTURES / "torch/dcp_fsdp2_tp_2x2/ckpt"
    assert as_bytes(archive(source, tmp_path / "run.tar")) == as_bytes(source)


def test_old_archives_are_compressed(tmp_path: Path) -> None:
    """Before 1.5 NeMo packed them with gzip: the error says what it is and what to do."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/model_config.yaml").write_bytes(CONFIG)
    nemo = archive(tmp_path / "in", tmp_path / "old.nemo", "w:gz")
    with pytest.raises(CkptError, match="is a gzip file") as caught:
        open_checkpoint(nemo)
    assert "unpack it" in (caught.value.hint or "")


SETTINGS = """
# what NeMo 1 writes, as far as it is looked at
micro_batch_size: 4
tensor_model_parallel_size: {tp}
pipeline_model_parallel_size: {pp}
num_layers: {layers} # of the whole model
activation: fast-swiglu
share_embeddings_and_output_weights: {shared}
tokenizer:
  num_layers: 99
"""


def nemo_1(name: str, folder: Path, **settings: object) -> Path:
    """The ranks of a legacy checkpoint of Megatron, as NeMo 1 packs them: weights alone, below ``model.``."""
    n_stages = 0
    for file in sorted((CHECKPOINTS / name / "ckpt").glob("iter_*/mp_rank_*/model_optim_rng.pt")):
        _, _, tensor, *stage = file.parent.name.split("_")
        alone = shutil.copy(file, folder.parent / "alone.pt")  # where it stands it is known as one of several
        with open_checkpoint(alone) as found:
            weights = {fqn: view.torch() for fqn, view in found.items() if fqn.startswith("model.")}
        n_stages = max(n_stages, *(int(one) + 1 for one in (*stage, "0")))
        place = folder / (f"tp_rank_{tensor}_pp_rank_{stage[0]}" if stage else f"mp_rank_{tensor}")
        place.mkdir(parents=True)
        torch.save(weights, place / "model_weights.ckpt")
    said = {"tp": 2, "pp": n_stages, "layers": "null", "shared": "null", **settings}
    (folder / "model_config.yaml").write_text(SETTINGS.format(**said), "utf-8")
    return folder


@pytest.mark.parametrize("name", ["legacy_t2p2", "legacy_nodist_t2"])
def test_ranks_of_nemo_1(name: str, tmp_path: Path) -> None:
    """Parts of tensor-parallel ranks and of stages are joined as Megatron's own; in an archive, and unpacked."""
    whole = as_bytes(CHECKPOINTS / name / "ckpt")
    with open_checkpoint(CHECKPOINTS / name / "ckpt") as checkpoint:
        args = checkpoint.manifest.info["args"]
        model = {meta.fqn for meta in checkpoint.manifest.tensors if meta.section == "model"}
        layers = sum(map(len, checkpoint.manifest.info["layer_stages"]))
    shared = str(not args["untie_embeddings_and_output_weights"]).lower()
    folder = nemo_1(name, tmp_path / "in", layers=layers, shared=shared)
    nemo = archive(folder, tmp_path / "model.nemo")
    for place in (folder, nemo):
        with open_checkpoint(place) as checkpoint:
            assert checkpoint.format == "megatron-legacy"
            assert checkpoint.manifest.info["args"]["num_layers"] == layers
        assert as_bytes(place) == {fqn: whole[fqn] for fqn in model}
        assert verify(place, level="full").is_ok


def test_a_rank_of_nemo_1_that_is_missing(tmp_path: Path) -> None:
    """By the numbers of folders, or by the settings."""
    folder = nemo_1("legacy_t2p2", tmp_path / "in")
    shutil.rmtree(folder / "tp_rank_01_pp_rank_000")
    with pytest.raises(NotFound, match=r"1 of 4 rank folders is missing"):
        open_checkpoint(folder)
    shutil.rmtree(folder / "tp_rank_01_pp_rank_001")
    with pytest.raises(NotFound, match=r"2 of 4 rank folders are missing, such as tensor-parallel rank 1"):
        open_checkpoint(folder)


def test_a_model_of_nemo_1_before_mcore(tmp_path: Path) -> None:
    """Its names nest under ``language_model``; it is refused as such, not read as something else."""
    for rank in range(2):
        (tmp_path / f"mp_rank_0{rank}").mkdir()
        state = {"model.language_model.embedding.word_embeddings.weight": torch.ones(4, 2)}
        torch.save(state, tmp_path / f"mp_rank_0{rank}/model_weights.ckpt")
    with pytest.raises(Unsupported, match="before mcore"):
        open_checkpoint(tmp_path)
