"""The writer of universal checkpoints: read back it is the source, torch opens every file, and what it refuses."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._torch_file import written as torch_file
from ckpt_tool.formats.base import BoxTable, WriteRequest
from ckpt_tool.formats.deepspeed.reader import READER
from ckpt_tool.formats.deepspeed.universal import READER as UNIVERSAL
from ckpt_tool.formats.deepspeed.universal_writer import WRITER
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.manifest.model import Blob, Manifest, TensorMeta
from ckpt_tool.manifest.optimizer import optimizer_views
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import Store
from tests.formats.conformance import FIXTURES, Truth, all_rows, assemble, source_of, stored_bytes
from tests.formats.torch_save.laid_out import filled

DEEPSPEED = FIXTURES / "deepspeed"
FOLDER = "global_step3_universal/"


def tensors_of(reader: Any, store: Store) -> tuple[Manifest, dict[str, Truth]]:
    """A checkpoint read whole."""
    manifest = reader.read(source_of(store))
    chunks = reader.resolve(source_of(store), manifest, all_rows(manifest))
    return manifest, {fqn: assemble(store, manifest, chunks, fqn) for fqn in manifest.tensors.fqns}


def request_of(tensors: TensorTable, blobs: tuple[Blob, ...], info: Mapping[str, Any]) -> WriteRequest:
    """Whole boxes of all tensors that are not empty."""
    rows = np.flatnonzero(tensors.numel > 0)
    boxes = BoxTable(
        tensor=rows.astype(np.int32),
        offsets=np.zeros_like(tensors.shape[rows]),
        sizes=tensors.shape[rows],
        rank=np.zeros(len(rows), dtype=np.int32),
    )
    return WriteRequest(tensors=tensors, boxes=boxes, world_size=1, blobs=blobs, info=info)


def written(name: str, *, without: str = "") -> tuple[Manifest, dict[str, Truth], dict[str, bytes]]:
    """A fixture, what is in it, and the files written of it, ``without`` one object."""
    source, held = tensors_of(READER, MemoryStore(stored_bytes(DEEPSPEED / name / "ckpt")))
    blobs = tuple(blob for blob in source.blobs if blob.fqn != without)
    layout = WRITER.lay_out(request_of(source.tensors, blobs, source.info))
    assert layout.commit_path == "latest_universal"
    return source, held, filled(layout, {fqn: truth.data for fqn, truth in held.items()})


@pytest.mark.parametrize(
    "name", ["ds_z2_bf16", "ds_z2_rr", "ds_z2_align", "ds_z1_bf16opt", "ds_z3_sub", "ds_moe_ep2_z1", "ds_pp2_dp2_z1"]
)
def test_read_back_it_is_the_source(name: str) -> None:
    """Every weight, buffer, master, moment and step, and the groups with their members and hyperparameters."""
    source, held, files = written(name)
    found, tensors = tensors_of(UNIVERSAL, MemoryStore(files))
    assert tensors == held
    before, after = optimizer_views(source), optimizer_views(found)
    assert [view.named_groups() for view in after] == [view.named_groups() for view in before]
    kept = {"my_iteration", "global_steps", "lr_scheduler.last_epoch", "ds_config.train_micro_batch_size_per_gpu"}
    values = {blob.fqn: blob.value for blob in source.blobs if blob.fqn in kept}
    assert {blob.fqn: blob.value for blob in found.blobs if blob.fqn in kept} == values
    assert (found.info["step"], found.info["tag"]) == (3, FOLDER.rstrip("/"))


def test_weights_in_fp32_are_their_own_masters() -> None:
    """Stage 0 has neither masters nor names of states: weights go into the masters' files, names are matched."""
    source, held, files = written("ds_z0_fp32")
    (view,) = optimizer_views(source)
    _, tensors = tensors_of(UNIVERSAL, MemoryStore(files))
    for number, weight in view.names.items():
        name = weight.removeprefix("module.")
        assert tensors[f"optimizer.state.{name}.fp32"] == tensors[weight] == held[weight]
        for state in ("exp_avg", "exp_avg_sq", "step"):
            assert tensors[f"optimizer.state.{name}.{state}"] == held[f"optimizer.state.{number}.{state}"]


@pytest.mark.parametrize("name", ["ds_z2_bf16", "ds_z3_sub"])
def test_torch_opens_every_file(name: str) -> None:
    """As the loaders do: states as dicts with ``param``, groups and one step where each stage looks for them."""
    _, held, files = written(name, without="optimizer.loss_scaler")  # a class of DeepSpeed, which is not here
    loaded = {path: torch.load(io.BytesIO(data), weights_only=False) for path, data in files.items() if "/" in path}
    emb = loaded[f"{FOLDER}zero/emb.weight/exp_avg.pt"]
    assert emb["cat_dim"] == 0
    assert emb["param"].numpy().tobytes() == held["optimizer.state.emb.weight.exp_avg"].data
    assert loaded[f"{FOLDER}zero/emb.weight/step.pt"] == torch.tensor(3.0)
    optimizer = loaded[f"{FOLDER}zero/optimizer_state.pt"]
    assert optimizer["ds_version"] == "0.19.8"
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.1, 0.0]
    assert optimizer["optimizer_state_dict"]["state"][0]["step"] == torch.tensor(3.0)
    model = loaded[f"{FOLDER}mp_rank_00_model_states.pt"]
    assert model["param_shapes"][0]["emb.weight"] == torch.Size([37, 8])
    assert (model["shared_params"], model["global_steps"]) == ({"head.weight": "emb.weight"}, 3)
    assert model["module"]["pos"].shape == (9, 8)
    assert loaded[f"{FOLDER}zero_pp_rank_0_mp_rank_00_model_states.pt"]["dp_world_size"] == 1


def table(*entries: tuple[str, str]) -> TensorTable:
    """Tensors of shape (2,), by fqn and dtype."""
    from ckpt_tool.dtypes import dtype

    return TensorTable.from_records(
        TensorMeta(
            fqn,
            dtype(kind),
            (2,),
            "model" if fqn.startswith("module.") else "optimizer",
            ("optimizer", "state", *fqn.rsplit(".", 2)[-2:]) if "state" in fqn else tuple(fqn.split(".", 1)),
        )
        for fqn, kind in entries
    )


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ([("module.w", "float32")], "one optimizer's state, there are 0"),
        ([("module.w", "bfloat16"), ("optimizer.state.w.exp_avg", "float32")], "no fp32 master and no weight in fp32"),
        ([("optimizer.state.w.exp_avg", "float32")], "no fp32 master"),
        ([("module.w", "float32"), ("optimizer.state.0.exp_avg", "float32"), ("module.v", "float32")], "numbers its"),
        ([("optimizer.state.a/b.fp32", "float32")], "cannot be the name of a folder"),
    ],
)
def test_refusals(entries: list[tuple[str, str]], match: str) -> None:
    """What a universal checkpoint cannot hold is refused before a byte is written."""
    with pytest.raises(Unsupported, match=match):
        WRITER.lay_out(request_of(table(*entries), (), {}))


def test_cut_tensors_are_refused() -> None:
    """A universal checkpoint holds whole tensors."""
    request = request_of(table(("optimizer.state.w.fp32", "float32")), (), {})
    halves = replace(request.boxes, sizes=request.boxes.sizes // 2)
    with pytest.raises(LayoutError, match="expected one whole box of each tensor"):
        WRITER.lay_out(replace(request, boxes=halves))


@pytest.mark.parametrize("step", [5, 5.0])
def test_steps_that_are_numbers(step: float) -> None:
    """An optimizer that counts in integers gets one; a float stands for the tensor that torch's own count in."""
    blob = Blob("optimizer.state.w.step", "value", None, step, ("optimizer", "state", "w", "step"), is_loaded=True)
    layout = WRITER.lay_out(request_of(table(("optimizer.state.w.fp32", "float32")), (blob,), {"step": 9}))
    files = filled(layout, {"optimizer.state.w.fp32": bytes(8)})
    assert files["latest_universal"] == b"global_step9_universal"
    found = torch.load(io.BytesIO(files["global_step9_universal/zero/w/step.pt"]))
    assert (found == 5, isinstance(found, torch.Tensor)) == (True, isinstance(step, float))


@pytest.mark.parametrize("name", ["ds_z3_sub", "ds_z2_bf16"])
def test_bytes_of_two_names_are_stored_once(name: str, tmp_path: Path) -> None:
    """Stage 3's weights, which are the masters, and tied ones: read back they have both names again."""
    source = DEEPSPEED / name / "ckpt"
    reshard(source, tmp_path / "uc", to="deepspeed-universal", durable=False)
    with open_checkpoint(source) as before, open_checkpoint(tmp_path / "uc") as after:
        assert {fqn: view.numpy().tobytes() for fqn, view in after.items()} == {
            fqn: view.numpy().tobytes() for fqn, view in before.items()
        }
    weights = torch.load(tmp_path / "uc" / FOLDER / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert ("emb.weight" in weights) == (name == "ds_z2_bf16")
    if "emb.weight" in weights:
        assert weights["head.weight"].data_ptr() == weights["emb.weight"].data_ptr()


def test_files_of_one_kind_are_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle and a zip directory for each shape and dtype, not for each of the four files of every parameter."""
    made: list[object] = []

    def dumped(value: object) -> bytes:
        made.append(value)
        return dump_pickle(value)

    monkeypatch.setattr(torch_file, "dump_pickle", dumped)
    names = [f"w{number}" for number in range(50)]
    states = ("fp32", "exp_avg", "exp_avg_sq", "step")
    entries = table(*((f"optimizer.state.{name}.{state}", "float32") for name in names for state in states))
    layout = WRITER.lay_out(request_of(entries, (), {"step": 9}))
    assert sum(path.endswith(".pt") for path in layout.manifest.files.paths) == 4 * len(names) + 3
    assert len(made) <= 2 + 3
    tensors = {fqn: bytes([number]) * 8 for number, fqn in enumerate(entries.fqns)}
    files = filled(layout, tensors)
    for fqn, payload in tensors.items():
        name, state = fqn.removeprefix("optimizer.state.").split(".")
        found = torch.load(io.BytesIO(files[f"global_step9_universal/zero/{name}/{state}.pt"]))
        assert (found if state == "step" else found["param"]).numpy().tobytes() == payload


@pytest.mark.parametrize(
    ("gone", "kind"),
    [
        ("zero/blocks.0.ln1.bias/exp_avg.pt", "missing-file"),
        ("zero/blocks.0.ln1.bias/fp32.pt", "missing-file"),
        ("mp_rank_00_model_states.pt", "absent-weight"),
    ],
)
def test_a_file_that_is_lost_is_an_error(gone: str, kind: str) -> None:
    """A state of one parameter, its values, and the model states, beside which those for stage 3 name the buffers."""
    _, _, files = written("ds_z1_fp32")

    def errors() -> set[str]:
        source = source_of(MemoryStore(files))
        found = UNIVERSAL.check(source, UNIVERSAL.read(source))
        return {finding.kind for finding in found if finding.severity is Severity.ERROR}

    assert errors() == set()
    del files[FOLDER + gone]
    assert errors() == {kind}
