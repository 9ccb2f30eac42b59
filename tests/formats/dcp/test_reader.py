"""The DCP reader on real checkpoints of torch 2.1.2 and 2.13, accelerate and torchtitan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from ckpt_tool.formats.base import Source
from ckpt_tool.formats.dcp.reader import READER
from ckpt_tool.storage.open import open_store
from tests.formats.conformance import FIXTURES, Case, ReaderTests, all_rows, assemble, truth_of

TORCH = FIXTURES / "torch"
ACCELERATE = FIXTURES / "deepspeed/accelerate_fsdp2"
TITAN = FIXTURES / "deepspeed/torchtitan_dp2tp2"
PER_FILE_KINDS = ("exp_avg", "exp_avg_sq")


def torch_case(name: str, *, max_read_requests: int = 1, max_resolve_requests: int = 8) -> Case:
    """A checkpoint whose truth has the names of the checkpoint itself."""
    return Case(
        name,
        TORCH / name / "ckpt",
        truth_of(TORCH / name),
        max_read_requests=max_read_requests,
        max_resolve_requests=max_resolve_requests,
    )


def renamed(patterns: dict[str, str], fqn: str) -> str | None:
    """``param/w`` by the pattern of its kind: ``{"param": "model.{}"}`` gives ``model.w``."""
    kind, _, rest = fqn.partition("/")
    return patterns[kind].format(rest) if kind in patterns else None


OPTIMIZER = {kind: "optimizer.state.{}." + kind for kind in PER_FILE_KINDS}
CASES = (
    torch_case("dcp_fsdp2_4r_fp32"),
    torch_case("dcp_fsdp2_tp_2x2"),
    torch_case("dcp_fsdp1_flat_2r"),
    torch_case("dcp_ddp_dedup"),
    torch_case("dcp_threads2"),
    torch_case("dcp_no_flatten"),
    torch_case("dcp_no_collectives", max_read_requests=4),
    torch_case("dcp_safetensors"),
    torch_case("dcp_zstd", max_resolve_requests=20),
    torch_case("dcp_old_t2.1.2"),
    Case(
        "accelerate_model",
        ACCELERATE / "ckpt/pytorch_model_fsdp_0",
        truth_of(ACCELERATE, lambda fqn: renamed({"param": "model.{}"}, fqn)),
        max_read_requests=1,
        max_resolve_requests=4,
    ),
    Case(
        "accelerate_optimizer",
        ACCELERATE / "ckpt/optimizer_0",
        truth_of(ACCELERATE, lambda fqn: renamed(OPTIMIZER, fqn)),
        without_truth=("*.step",),
        max_read_requests=1,
        max_resolve_requests=4,
    ),
    Case(
        "torchtitan",
        TITAN / "ckpt/checkpoint/step-3",
        truth_of(TITAN, lambda fqn: renamed({"param": "{}", **OPTIMIZER}, fqn)),
        without_truth=("optimizer.*.step", "train_state.*"),
        max_read_requests=1,
        max_resolve_requests=4,
    ),
)


class TestDcp(ReaderTests):
    """The contract of readers."""

    reader = READER
    reader_import = "ckpt_tool.formats.dcp.reader:READER"
    cases = CASES


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_file_for_each_item(tmp_path: Path) -> None:
    """``single_file_per_rank=False`` gives every tensor and object a file of its own."""
    state = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3), "cfg": {"lr": 0.5}}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path, single_file_per_rank=False), no_dist=True)
    source = Source(*open_store(tmp_path))
    manifest = READER.read(source)
    assert len(manifest.files) == 3
    chunks = READER.resolve(source, manifest, all_rows(manifest))
    assert assemble(source.store, manifest, chunks, "w").data == state["w"].numpy().tobytes()
    assert [(b.path, b.value) for b in READER.load_blobs(source, manifest, [0])] == [(("cfg", "lr"), 0.5)]


def test_ranks_without_collectives_are_joined() -> None:
    """Replicated tensors of per-rank metadata are one box with a copy from each rank; objects keep theirs (R25)."""
    source = Source(*open_store(TORCH / "dcp_no_collectives/ckpt"))
    manifest = READER.read(source)
    rows = manifest.chunks.rows_of(manifest.tensor_id("model.buf_i64"))
    assert manifest.chunks.rank[rows].tolist() == [0, 1, 2, 3]
    assert manifest.chunks.offsets[rows].tolist() == [[0, 0]] * 4
    assert [(blob.fqn, blob.rank) for blob in manifest.blobs] == [("step", rank) for rank in range(4)]
    assert manifest.info["n_metadata_files"] == 4


def test_what_the_metadata_says_besides() -> None:
    """Version, save id, ranks and the place of the step are in ``info``; a path of the writer's machine is not."""
    manifest = READER.read(Source(*open_store(TORCH / "dcp_fsdp2_4r_fp32/ckpt")))
    assert manifest.info == {
        "version": "1.0.0",
        "save_id": "ad24fbda-625f-438e-a5ef-313e248b8f60",
        "world_size": 4,
        "is_flattened": True,
        "step_fqn": "step",
        "n_empty_chunks": 7,
    }
    assert manifest.tensor("optim.state.odd53.exp_avg").path == ("optim", "state", "odd53", "exp_avg")
    assert manifest.tensor("optim.state.odd53.exp_avg").section == "optimizer"
    assert manifest.tensor("rng.torch").section == "other"
