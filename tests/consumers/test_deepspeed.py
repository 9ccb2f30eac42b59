"""Real DeepSpeed resumes from what was written for it, at other stages and on other ranks, and its tools take it.

``CKPT_PEER_DEEPSPEED`` names the python of an environment with DeepSpeed (0.19.8 when this was written) and torch; run
with ``-m peer``, or ``make test-deepspeed``. Checkpoints and truth are those of ``fixtures/deepspeed``.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from tests.formats.conformance import FIXTURES
from tests.formats.megatron.hf_training import save_dcp, torch_state
from tests.formats.megatron.places import CHECKPOINTS, dense_shapes, truth_from_seed

pytestmark = pytest.mark.peer

DEEPSPEED = FIXTURES / "deepspeed"
FP32 = {"bf16": {"enabled": False}}
# Fixture (three data-parallel ranks), stage and ranks of the target, and the configuration of the run that loads it.
CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("ds_z2_bf16", 1, 2, {}),
    ("ds_z2_bf16", 2, 4, {}),
    ("ds_z2_bf16", 3, 2, {}),
    ("ds_z2_rr", 2, 2, {"zero_optimization": {"round_robin_gradients": True}}),
    ("ds_z2_align", 2, 2, {"zero_optimization": {"parameter_alignment": True}}),
    ("ds_z1_bf16opt", 1, 2, {"data_types": {"grad_accum_dtype": "fp32"}}),
    ("ds_z2_elastic", 2, 2, {"zero_optimization": {"elastic_checkpoint": True}}),
    ("ds_z3_sub", 3, 2, {"zero_optimization": {"sub_group_size": 400, "stage3_param_persistence_threshold": 20}}),
    ("ds_z3_bf16", 2, 2, {}),
    ("ds_z1_fp32", 3, 2, FP32),
    ("ds_z0_fp32", 2, 2, FP32),
]  # fmt: skip
# What is written of four ranks' pipeline and experts: stages, ranks, and how the run that loads it parts its layers.
GRIDS: list[dict[str, Any]] = [
    {"kind": "pipeline", "pp": 1, "dp": 2, "method": "uniform"},
    {"kind": "pipeline", "pp": 2, "dp": 1, "method": "uniform"},
    {"kind": "pipeline", "pp": 2, "dp": 2, "method": "type:block", "first_stage_layers": 2},
    {"kind": "moe", "pp": 1, "dp": 4, "ep": 4, "stage": 1},
    {"kind": "moe", "pp": 1, "dp": 3, "ep": 1, "stage": 2},
    {"kind": "moe", "pp": 1, "dp": 2, "ep": 2, "stage": 2},
]
TOOLS = """
import json, os, subprocess, sys, torch
import deepspeed
from deepspeed.checkpoint.ds_to_universal import main, parse_arguments
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
for folder, out in json.loads(sys.argv[1]):
    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    save_file({name: tensor.contiguous().clone() for name, tensor in found.items()}, out + ".safetensors")
    tag = open(os.path.join(folder, "latest")).read()
    arguments = ["--input_folder", os.path.join(folder, tag), "--output_folder", out, "--num_extract_workers", "1"]
    sys.argv = ["ds_to_universal", *arguments, "--num_merge_workers", "1"]
    main(parse_arguments())
"""


def name_of(case: tuple[str, int, int, dict[str, Any]]) -> str:
    """Of a folder."""
    return "-".join(map(str, case[:3]))


def environment() -> dict[str, str]:
    """Without this package, on CPU."""
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**own, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Every case's checkpoint."""
    root = tmp_path_factory.mktemp("deepspeed")
    for case in CASES:
        name, stage, dp, _ = case
        reshard(DEEPSPEED / name / "ckpt", root / name_of(case), to="deepspeed", zero_stage=stage, dp=dp, durable=False)
    return {name_of(case): root / name_of(case) for case in CASES}


def said_of(
    rows: Sequence[Mapping[str, Any]], folder: Path, script_name: str = "ds_accept_native.py"
) -> list[dict[str, Any]]:
    """What rank 0 of each case's run says."""
    (folder / "cases.json").write_text(json.dumps(rows), "utf-8")
    script = DEEPSPEED / "make" / script_name
    command = [os.environ["CKPT_PEER_DEEPSPEED"], str(script), str(folder / "cases.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith(('{"stage"', '{"kind"'))]


def test_training_goes_on(targets: Mapping[str, Path], tmp_path: Path) -> None:
    """Masters, moments, weights, buffers, steps, hyperparameters and values are the source's; then one more step."""
    rows = [
        {
            "folder": str(targets[name_of(case)]),
            "stage": case[1],
            "world": case[2],
            "truth": str(DEEPSPEED / case[0] / "truth.safetensors"),
            "config": case[3],
        }
        for case in CASES
    ]
    for case, found in zip(CASES, said_of(rows, tmp_path), strict=True):
        assert (found["stage"], found["world"], found["wrong"]) == (case[1], case[2], []), case
        assert found["equal"] == 3 * 14 + 15 + 2  # states of trained parameters, all parameters, buffers
        assert (found["steps"], found["later"], found["global_steps"]) == ([3.0], [4.0], 3)
        rates = [0.01, 0.02] if "elastic" in case[0] else [0.0025, 0.005]  # elastic files have none: the run's own
        assert found["groups"] == [[rates[0], 0.1], [rates[1], 0.0]]
        assert found["last_epoch"] == 4
        assert {"my_iteration", "note"} <= set(found["client"])


def test_training_goes_on_in_other_stages_and_with_other_ranks_for_experts(tmp_path: Path) -> None:
    """Pipelines of other stages, and experts that more or fewer ranks share; every master and moment is the truth's."""
    rows = []
    for number, case in enumerate(GRIDS):
        source = DEEPSPEED / ("ds_moe_ep2_z1" if case["kind"] == "moe" else "ds_pp2_dp2_z1")
        grid = {key: case[key] for key in ("pp", "dp", "ep", "first_stage_layers") if key in case}
        stage = case.get("stage", 1)
        target = tmp_path / f"{number}"
        reshard(source / "ckpt", target, to="deepspeed", zero_stage=stage, durable=False, **grid)
        rows.append({**case, "folder": str(target), "truth": str(source / "truth.safetensors")})
    for case, found in zip(GRIDS, said_of(rows, tmp_path, "ds_accept_grid.py"), strict=True):
        assert (found["kind"], found["world"], found["wrong"]) == (case["kind"], case["pp"] * case["dp"], []), case
        assert found["equal"] == found["of"] == (68 if case["kind"] == "moe" else 52)
        assert (found["steps"], found["later"], found["global_steps"]) == ([3.0], [4.0], 4)
        if case["kind"] == "moe":
            assert (found["rates"], found["names"]) == ([[0.01, 0.01]], ["all", f"ep_size_{case['ep']}"])
        else:
            assert found["rates"] == [[0.01, 0.1], [0.02, 0.0]]


def test_training_of_other_programs_goes_on(tmp_path: Path) -> None:
    """Runs of Megatron and of FSDP: masters, moments, step and hyperparameters, native and universal, then a step."""
    state = torch_state(truth_from_seed(dense_shapes(4, 128))(), weights=torch.float32)
    truth = {f"fp32/{name}": tensor for name, tensor in state["model"].items()}
    for name, own in state["optim"]["state"].items():
        truth |= {f"{key}/{name}": own[key] for key in ("exp_avg", "exp_avg_sq")}
    save_file(truth, tmp_path / "truth.safetensors")
    names: dict[str, Any] = {"names": "hf", "family": "llama", "true_vocab": 100}
    sources = {
        "megatron": (CHECKPOINTS / "td_full_t2p2d2/ckpt", names, 0.00012580800065610593),
        "fsdp": (save_dcp(state, tmp_path / "source"), {}, 5e-4),
    }
    rows, rates = [], []
    for program, (source, options, rate) in sources.items():
        for stage, world in ((2, 3), (3, 2), (0, 2)):  # 0 stands for a universal one
            to = "deepspeed" if stage else "deepspeed-universal"
            grid: dict[str, Any] = {"zero_stage": stage, "dp": world} if stage else {}
            target = tmp_path / f"{program}{stage}"
            reshard(source, target, to=to, dtype="bfloat16", durable=False, **options, **grid)
            with open_checkpoint(target) as written:
                listed = written.objects()
            groups = [listed[f"optimizer.param_groups.{number}.params"] for number in (0, 1)]
            rows.append(
                {"folder": str(target), "truth": str(tmp_path / "truth.safetensors"), "stage": stage or 1,
                 "world": world, "universal": not stage, "groups": groups}
            )  # fmt: skip
            rates.append([[rate, listed[f"optimizer.param_groups.{number}.weight_decay"]] for number in (0, 1)])
    for row, expected, found in zip(rows, rates, said_of(rows, tmp_path, "ds_accept_named.py"), strict=True):
        assert (found["wrong"], found["equal"]) == ([], 4 * found["of"]), row
        assert sorted(found["rates"]) == sorted(expected), row
        assert (found["steps"], found["later"], found["global_steps"]) == ([10.0], [11.0], 10), row


def test_its_tools_take_it(targets: Mapping[str, Path], tmp_path: Path) -> None:
    """``zero_to_fp32`` gives the truth, and ``ds_to_universal`` each master and moment, round robin included."""
    # Elastic checkpoints crash ds_to_universal, its own too ('list' object has no attribute 'get').
    chosen = [case for case in CASES if case[0] not in ("ds_z0_fp32", "ds_z2_elastic")]
    rows = [(str(targets[name_of(case)]), str(tmp_path / name_of(case))) for case in chosen]
    command = [os.environ["CKPT_PEER_DEEPSPEED"], "-c", TOOLS, json.dumps(rows)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), cwd=tmp_path)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    for case in chosen:
        truth = load_file(DEEPSPEED / case[0] / "truth.safetensors")
        found = load_file(tmp_path / f"{name_of(case)}.safetensors")
        expected = {name.removeprefix("fp32/"): value for name, value in truth.items() if name.startswith("fp32/")}
        assert set(expected) < set(found)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), case
        with open_checkpoint(tmp_path / name_of(case)) as universal:
            for name in expected:
                for state in ("fp32", "exp_avg", "exp_avg_sq"):
                    own = universal[f"optimizer.state.{name}.{state}"].numpy()
                    assert np.array_equal(own, truth[f"{state}/{name}"].numpy()), (case, name, state)


def test_training_goes_on_from_universal(tmp_path: Path) -> None:
    """Universal checkpoints at other stages; of stage 3's, which store weights as masters only, and of tied ones."""
    cases = [("ds_z3_sub", 3, 2), ("ds_z3_sub", 2, 2), ("ds_z2_rr", 3, 2), ("ds_z2_bf16", 1, 4)]
    for name, _, _ in cases:
        reshard(DEEPSPEED / name / "ckpt", tmp_path / name, to="deepspeed-universal", durable=False, overwrite=True)
    rows = [
        {"folder": str(tmp_path / name), "stage": stage, "world": world, "universal": True,
         "truth": str(DEEPSPEED / name / "truth.safetensors")}
        for name, stage, world in cases
    ]  # fmt: skip
    for case, found in zip(cases, said_of(rows, tmp_path), strict=True):
        # At stage 3 it gives one step tensor to both groups, each of which counts it up (zero/stage3.py of 0.19.8).
        later = [5.0] if case[1] == 3 else [4.0]
        assert (found["wrong"], found["steps"], found["later"]) == ([], [3.0], later), case
        assert found["equal"] == 3 * 14 + 14
