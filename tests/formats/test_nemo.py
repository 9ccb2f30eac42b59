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
from ckpt_tool.errors import CkptError
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
