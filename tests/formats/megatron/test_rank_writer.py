"""The writer of per-rank files: every form that is read comes out as the files of one grid, bit for bit.

With ``-m peer`` real Megatron resumes from what was written, see ``test_writer``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.errors import LayoutError, UsageError
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
)


def written(name: str, target: Path, **options: Any) -> Any:
    """A bundled checkpoint, written for a mesh."""
    return reshard(CHECKPOINTS / name / "ckpt", target, to="megatron-legacy", durable=False, **options)


@pytest.mark.parametrize(("name", "truth", "mesh"), ROUND_TRIPS, ids=[name for name, _, _ in ROUND_TRIPS])
def test_every_form_comes_out_bit_for_bit(name: str, truth: TruthOf, mesh: Mesh, tmp_path: Path) -> None:
    """Weights, fp32 masters and both moments, read back from the ranks' files; copies that ranks have are equal."""
    written(name, tmp_path / "out", **mesh)
    store, _ = open_store(tmp_path / "out")
    source = source_of(store)
    manifest = READER.read(source)
    chunks = READER.resolve(source, manifest, all_rows(manifest))
    expected = dict(truth()) if "fsms" in name else padded_for(dict(truth()), mesh.get("tp", 1))
    if "nodist" in name:
        expected = {fqn: one for fqn, one in expected.items() if fqn.startswith("model.")}
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
    """Random states, and state without the distributed optimizer; keeping the former is refused."""
    result = written("td_nodist_t2", tmp_path / "out", tp=2)
    why = {d.fqn: d.why for d in result.dropped}
    assert "--rng emit" in why["rng_state/shard_0.0_1.2"]
    assert "megatron-dist keeps it" in why["optimizer.state.exp_avg.output_layer.weight"]
    assert any("--no-load-rng" in note for note in result.notes)
    with pytest.raises(UsageError, match="random states are not carried over"):
        written("td_nodist_t2", tmp_path / "no", tp=2, rank_state="keep")
    with pytest.raises(LayoutError, match="is not cut into 3 equal parts"):
        written("legacy_t2p2", tmp_path / "no", tp=3)


def test_writer_places_boxes_itself() -> None:
    """The contract by which the plan asks the writer."""
    assert isinstance(WRITER, PlacingWriter)
