"""The writer of per-rank files: every form that is read comes out as the files of one grid, bit for bit.

With ``-m peer`` real Megatron resumes from what was written, see ``test_writer``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.errors import LayoutError, Unsupported, UsageError
from ckpt_tool.formats.base import PlacingWriter
from ckpt_tool.formats.megatron.rank_reader import READER
from ckpt_tool.formats.megatron.rank_writer import WRITER
from ckpt_tool.formats.megatron.target_grid import TargetGrid
from ckpt_tool.formats.megatron.target_stages import target_layers
from ckpt_tool.storage.open import open_store
from tests.formats.conformance import Truth, all_rows, assemble, source_of
from tests.formats.megatron.places import (
    CHECKPOINTS,
    dense_shapes,
    expert_shapes,
    padded_for,
    truth_from_seed,
)

DENSE = truth_from_seed(dense_shapes(4, 112))
DENSE_TP1 = truth_from_seed(dense_shapes(4, 104))
WHOLE = truth_from_seed(dense_shapes(4, 128))
EXPERTS = truth_from_seed(expert_shapes(2, 104, 4))
EXPERTS_TP2 = truth_from_seed(expert_shapes(2, 112, 4))
Mesh = dict[str, int]
TruthOf = Callable[[], Mapping[str, Truth]]


ROUND_TRIPS: tuple[tuple[str, TruthOf, Mesh], ...] = (
    ("td_full_t2p2d2", DENSE, {"tp": 4}),
    ("td_full_t4p1", WHOLE, {"tp": 2, "pp": 2}),
    ("td_dpr_t2p2d2", DENSE, {"tp": 2, "pp": 2, "dp": 2}),
    ("td_nodist_t2", DENSE, {"pp": 4}),
    ("dpr_uneven_p2", DENSE_TP1, {"pp": 2, "vpp": 2}),
    ("td_dpzero_t2p2", DENSE, {"pp": 2, "first_stage_layers": 3}),
    ("moe_seq_e2", EXPERTS, {}),
    ("moe_dpr_e2", EXPERTS, {"dp": 4, "ep": 4, "pp": 2}),
    ("legacy_t2p2", DENSE, {}),
    ("legacy_vpp_p2v2", DENSE_TP1, {"tp": 2, "pp": 2}),
    ("legacy_moe_e2", EXPERTS, {"tp": 2, "ep": 2, "dp": 2}),
    ("old012_fsms_t2p1d2", DENSE, {"tp": 2}),
    ("legacy_nodist_t2", DENSE, {"tp": 4, "pp": 2}),
    ("legacy_etp1_t2e2", EXPERTS_TP2, {"tp": 2, "dp": 2, "ep": 4, "etp": 1}),
    ("moe_seq_e2", EXPERTS, {"tp": 4, "ep": 2, "etp": 2}),
    ("legacy_nodist_etp1_t2e2", EXPERTS_TP2, {"pp": 2}),
    ("dpr_etp1_t2e2", EXPERTS_TP2, {"tp": 2, "ep": 2, "etp": 1}),
)


def written(name: str, target: Path, **options: Any) -> Any:
    """A bundled checkpoint, written for a mesh."""
    return reshard(CHECKPOINTS / name / "ckpt", target, to="megatron-legacy", durable=False, **options)


@pytest.mark.parametrize(("name", "truth", "mesh"), ROUND_TRIPS)
def test_every_form_comes_out_bit_for_bit(name: str, truth: TruthOf, mesh: Mesh, tmp_path: Path) -> None:
    """Weights, fp32 masters and both moments, read back from the ranks' files; copies that ranks have are equal."""
    written(name, tmp_path / "out", **mesh)
    store, _ = open_store(tmp_path / "out")
    source = source_of(store)
    manifest = READER.read(source)
    chunks = READER.resolve(source, manifest, all_rows(manifest))
    expected = dict(truth()) if "fsms" in name else padded_for(dict(truth()), mesh.get("tp", 1))
    found = {m.fqn for m in manifest.tensors if m.section == "model" or m.fqn.startswith("optimizer.state.")}
    assert found == set(expected)
    assert {fqn: assemble(store, manifest, chunks, fqn) for fqn in found} == expected
    assert list(READER.check(source, manifest)) == []


def test_files_are_those_of_megatron(tmp_path: Path) -> None:
    """Folders, keys and their order, shapes and types of one rank's files are those that Megatron itself saved."""
    written("td_dpr_t2p2d2", tmp_path / "out", tp=2, pp=2, arguments={"accumulate_allreduce_grads_in_fp32": False})
    ours, theirs = tmp_path / "out", CHECKPOINTS / "legacy_t2p2/ckpt"
    listed = [sorted(str(path.relative_to(root)) for path in root.rglob("*.*")) for root in (ours, theirs)]
    assert listed[0] == listed[1]
    described = []
    for root in (ours, theirs):
        folder = root / "iter_0000010/mp_rank_01_001"
        model = loaded(folder / "model_optim_rng.pt")
        state = loaded(folder / "distrib_optim.pt")
        described.append((
            [(name, None if value is None else (value.dtype, value.shape)) for name, value in model["model"].items()],
            model["optimizer"], model["opt_param_scheduler"], model["iteration"],
            [(key, {slot: getattr(flat, "shape", flat) for slot, flat in slots.items()})
             for key, slots in state[0].items()],
        ))  # fmt: skip
    assert described[0] == described[1]


@pytest.mark.parametrize("name", ["td_nodist_t2", "legacy_nodist_t2"])
def test_state_by_numbers_is_that_of_megatron(name: str, tmp_path: Path) -> None:
    """Without the distributed optimizer a rank's file has all that Megatron's own has, each parameter its own step."""
    written(name, tmp_path / "out", tp=2)
    files = [
        loaded(root / "iter_0000010/mp_rank_01/model_optim_rng.pt")
        for root in (tmp_path / "out", CHECKPOINTS / "legacy_nodist_t2/ckpt")
    ]
    steps = [one["step"].data_ptr() for one in files[0]["optimizer"]["optimizer"]["state"].values()]
    assert len(set(steps)) == len(steps) == 27
    described = [{key: plain(one[key]) for key in one if key != "args"} for one in files]
    assert described[0] == described[1]


def plain(value: Any) -> Any:
    """Tensors and arrays as text, containers entered, so that it can be compared."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(entry) for entry in value)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize(
    ("name", "mesh", "folder", "tracker"),
    [
        ("td_full_t2p2d2", {"tp": 2, "pp": 2}, "mp_rank_01_001", 4),
        ("legacy_t2p2", {"tp": 2, "pp": 2}, "mp_rank_01_001", 4),
        ("legacy_etp1_t2e2", {"tp": 2, "ep": 2, "etp": 1}, "mp_rank_01_001", 4),
        ("old012_zarr_t2p1d1", {"tp": 2}, "mp_rank_01", None),
    ],
)
def test_random_states_are_kept_on_the_same_grid(
    name: str, mesh: Mesh, folder: str, tracker: int | None, tmp_path: Path
) -> None:
    """Each rank's file has the state that its stage and tensor-parallel rank had, whatever held it."""
    result = written(name, tmp_path / "out", rank_state="keep", **mesh)
    assert [d.fqn for d in result.dropped if d.fqn.startswith("rng")] == []
    [state] = loaded(tmp_path / f"out/iter_0000010/{folder}/model_optim_rng.pt")["rng_state"]
    assert state["torch_rng_state"].shape == (5056,)
    assert state["random_rng_state"][0] == 3
    if tracker is not None:
        assert state["rng_tracker_states"]["model-parallel-rng"].tolist() == [tracker] * 16


def test_state_of_modules_is_kept_both_ways(tmp_path: Path) -> None:
    """Serialised state of modules (``_extra_state`` as uint8, of any length) becomes objects, and tensors again."""
    source = tmp_path / "legacy"
    shutil.copytree(CHECKPOINTS / "legacy_uneven_p2/ckpt", source)
    expected = {}
    for path in sorted(source.rglob("model_optim_rng.pt")):
        root = loaded(path)
        del root["args"].attention_backend
        for number, key in enumerate(k for k in root["model"] if k.endswith("_extra_state")):
            value = torch.arange(number % 3, dtype=torch.uint8)
            root["model"][key] = expected[path.parent.name, key] = value
        torch.save(root, path)
    written_as: dict[str, Any] = {"pp": 2, "first_stage_layers": 3, "durable": False, "include": ["model.*"]}
    reshard(source, tmp_path / "dist", to="megatron-dist", **written_as)
    reshard(tmp_path / "dist", tmp_path / "back", to="megatron-legacy", **written_as)
    found = {
        (path.parent.name, key): value
        for path in (tmp_path / "back").rglob("model_optim_rng.pt")
        for key, value in loaded(path)["model"].items()
        if key.endswith("_extra_state") and value is not None
    }
    kept = {place: value for place, value in expected.items() if "output_layer" not in place[1]}
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[place], value) for place, value in kept.items())


def loaded(path: Path) -> Any:
    """A torch file whose ``args`` need Megatron's enums, which stand-ins replace."""
    import pickle
    import types

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.startswith("megatron"):
                return lambda *values: (name, *values)
            return super().find_class(module, name)

    stand_in = types.ModuleType("stand_in")
    stand_in.Unpickler, stand_in.load = Unpickler, None  # type: ignore[attr-defined]
    return torch.load(path, weights_only=False, pickle_module=stand_in)


def test_layers_are_spread_as_megatron_does() -> None:
    """Even, over virtual stages, and uneven ones; what cannot be spread is refused with the way to do it."""
    assert target_layers(TargetGrid(1, 2, 1, 1, 2, vpp=2), 8) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert target_layers(TargetGrid(1, 3, 1, 1, 3, first_stage_layers=1), 5) == [[[0]], [[1, 2]], [[3, 4]]]
    assert target_layers(TargetGrid(1, 2, 1, 1, 2, first_stage_layers=3, last_stage_layers=2), 5) == [
        [[0, 1, 2]], [[3, 4]]
    ]  # fmt: skip
    with pytest.raises(LayoutError, match="5 layers are no equal share"):
        target_layers(TargetGrid(1, 2, 1, 1, 2), 5)
    with pytest.raises(LayoutError, match="uneven spread over virtual stages"):
        target_layers(TargetGrid(1, 2, 1, 1, 2, vpp=2, first_stage_layers=1), 5)


def test_what_has_no_place_is_said(tmp_path: Path) -> None:
    """Random states of another grid, which are no longer any rank's; keeping them is refused."""
    result = written("td_nodist_t2", tmp_path / "out", tp=4)
    why = {d.fqn: d.why for d in result.dropped}
    assert list(why) == ["rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"]
    assert set(why.values()) == {"random states of 1 stages x 2 tensor-parallel ranks; the target has 1 x 4"}
    assert any("--no-load-rng" in note for note in result.notes)
    with pytest.raises(UsageError, match="the target has 1 x 4"):
        written("td_nodist_t2", tmp_path / "no", tp=4, rank_state="keep")
    with pytest.raises(LayoutError, match="is not cut into 3 equal parts"):
        written("legacy_t2p2", tmp_path / "no", tp=3)


def test_parts_of_experts_never_share_a_file(tmp_path: Path) -> None:
    """Files have no place for experts of more tensor-parallel ranks than the rest: refused, not lost as in Megatron."""
    with pytest.raises(
        Unsupported, match=r"experts of 2 tensor-parallel ranks, the rest of 1: .* would be lost"
    ) as caught:
        written("moe_seq_e2", tmp_path / "out", dp=2, etp=2)
    assert caught.value.hint == "--to megatron-dist has no such limit; --etp 1 fits"
    assert not (tmp_path / "out").exists()


def test_writer_places_boxes_itself() -> None:
    """The contract by which the plan asks the writer."""
    assert isinstance(WRITER, PlacingWriter)
