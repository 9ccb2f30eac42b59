"""Section E of the collected reports: DeepSpeed, through the command.

Told by a test elsewhere, of which those here are at most the view through the command:

====  ============================================================================================
R76   formats/deepspeed/test_reports.py (placeholders, frozen parameters with and without fragments)
R77   formats/deepspeed/test_reports.py (each stage, too few and too many)
R79   formats/deepspeed/test_reports.py, test_sharding.py, test_affine.py (records of how shards join),
      test_target_grids.py (other numbers of tensor-parallel ranks)
R80   formats/deepspeed/test_reports.py (what reading weights reads)
R82   formats/deepspeed/test_reports.py (partitions that are elsewhere)
R83   formats/deepspeed/test_reports.py (names and dtypes of states)
====  ============================================================================================
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tool.api.checkpoint import open_checkpoint
from tests.formats.deepspeed.made import FOLDER, numbered, saved, stage2, stage3, states_of, with_latest
from tests.reports.conftest import FIXTURES, Ckpt

WEIGHTS = {"a": numbered(5, 3), "b": numbered(7, start=100), "c": numbered(2, 2, start=200)}
GROUPS = (("a", "b"), ("c",))
LR = {"lr": 1e-3}


def put(files: Mapping[str, bytes], folder: Path) -> Path:
    """A folder with these files and ``latest``."""
    for path, data in with_latest(files).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def test_r76_a_weight_of_no_elements(ckpt: Ckpt, tmp_path: Path) -> None:
    """R76: a frozen weight that was saved as [0]: verify names it, and no export leaves it out in silence."""
    source = put(stage2(WEIGHTS, GROUPS, module={**WEIGHTS, "b": torch.zeros(0)}), tmp_path / "source")
    checked = ckpt("verify", source)
    assert checked.status == 1
    assert "'b': weight data absent (frozen?)" in checked.text
    refused = ckpt("export", source, tmp_path / "out")
    assert refused.status == 3, refused.err
    assert "b: no stored data" in refused.err, refused.err
    assert not (tmp_path / "out").exists()
    assert ckpt("export", source, tmp_path / "out.safetensors", "--masters").status == 0  # the optimizer has it
    assert torch.equal(load_file(tmp_path / "out.safetensors")["b"], states_of(WEIGHTS)["fp32"]["b"])


def test_r76_a_frozen_weight_of_stage_3(ckpt: Ckpt, tmp_path: Path) -> None:
    """R76: the model state has a name of shape [0], its shape is told elsewhere, and no rank has a fragment."""
    module = {name: torch.zeros(0) for name in WEIGHTS} | {"f": torch.zeros(0, dtype=torch.bfloat16)}
    files = stage3(WEIGHTS, GROUPS, module=module, frozen_param_shapes={"f": torch.Size([8, 8])})
    source = put(files, tmp_path / "source")
    checked = ckpt("verify", source)
    assert (checked.status, "'f': weight data absent (frozen?)" in checked.text) == (1, True)
    refused = ckpt("export", source, tmp_path / "out")
    assert (refused.status, "f: no stored data" in refused.err) == (3, True)


@pytest.mark.parametrize("is_torch", [True, False])
def test_r76_an_adapter_of_empty_tensors(ckpt: Ckpt, tmp_path: Path, is_torch: bool) -> None:
    """R76: LoRA weights saved while ZeRO-3 had them shared out: all are [0], which is said, and not "nothing wrong"."""
    names = [f"base_model.model.layers.{n}.q_proj.lora_{part}.weight" for n in (0, 1) for part in "AB"]
    tensors = {name: torch.zeros(0) for name in names}
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 16}')
    if is_torch:
        torch.save(tensors, tmp_path / "adapter_model.bin")
    else:
        save_file(tensors, tmp_path / "adapter_model.safetensors")
    checked = ckpt("verify", tmp_path)
    assert (checked.status, "weight data absent: 4 weights have the shape [0]" in checked.text) == (1, True)
    written = ckpt("export", tmp_path, f"{tmp_path}-out")
    assert (written.status, "weight data absent: 4 weights" in written.text) == (3, True)
    shown = ckpt("inspect", tmp_path)
    assert (shown.status, "lora_A" in shown.text) == (0, True)
    (tmp_path / "adapter_config.json").unlink()
    torch.save({**tensors, "head.weight": torch.ones(2)}, tmp_path / "some.pt")
    assert "weight data absent: 4 weights" in ckpt("verify", tmp_path / "some.pt").text
    assert "note: weight data absent: 4 weights" in ckpt("export", tmp_path / "some.pt", f"{tmp_path}-out").text


def test_r77_partitions_of_another_length(ckpt: Ckpt, tmp_path: Path) -> None:
    """R77: in place of "something is wrong": what there is, what was expected, and who runs over."""
    files = stage2(WEIGHTS, GROUPS)
    bigger = stage2({**WEIGHTS, "b": numbered(11, start=100)}, GROUPS)
    name = f"{FOLDER}mp_rank_00_model_states.pt"
    refused = ckpt("inspect", put({**files, name: bigger[name]}, tmp_path))
    assert refused.status == 3
    assert "partitions hold 12, 10 = 22 elements, expected 26 of 2 parameters over 2 ranks" in refused.err
    assert "'b' runs over" in refused.err


def test_r79_no_record_of_how_shards_join(ckpt: Ckpt, tmp_path: Path) -> None:
    """R79: nothing is guessed: the shards are listed, and both the note and the refusal say which file would tell."""
    shards = [{"up.weight": numbered(3, 2), "norm.weight": numbered(4)} for _ in range(2)]
    groups = (tuple(shards[0]),)
    own = [stage2(shard, groups, world_size=1, mp=mp, mp_world_size=2) for mp, shard in enumerate(shards)]
    source = put({**own[0], **own[1]}, tmp_path / "source")
    assert "universal_checkpoint_info.json" in ckpt("inspect", source).text
    refused = ckpt("reshard", source, tmp_path / "out", "--to", "deepspeed", "--zero-stage", "2")
    assert (refused.status, "universal_checkpoint_info.json" in refused.err) == (3, True)


def test_r79_rules_in_a_file_lead_to_other_ranks(ckpt: Ckpt, tmp_path: Path) -> None:
    """R79: two tensor-parallel ranks become four by rules beside the files; norms are taken once, alike on all."""
    whole = {"up.weight": numbered(8, 2), "norm.weight": numbered(4, start=90)}
    shards = [{**whole, "up.weight": whole["up.weight"][4 * rank : 4 * rank + 4].clone()} for rank in (0, 1)]
    own = [stage2(shard, (tuple(whole),), mp=mp, mp_world_size=2) for mp, shard in enumerate(shards)]
    source = put({**own[0], **own[1]}, tmp_path / "source")
    rules = {"universal_checkpoint_version": 0.2, "tp_replicated_parameter_patterns": [r".*norm\.weight"]}
    (source / "universal_checkpoint_info.json").write_text(json.dumps(rules))
    words = ["--to", "deepspeed", "--zero-stage", "2", "--tp", "4", "--dp", "3"]
    done = ckpt("reshard", source, tmp_path / "four", *words)
    assert done.status == 0, done.err
    assert ckpt("diff", source, tmp_path / "four").status == 0
    for rank in range(4):
        path = tmp_path / f"four/{FOLDER}mp_rank_{rank:02d}_model_states.pt"
        module = torch.load(path, weights_only=True)["module"]
        assert torch.equal(module["norm.weight"], whole["norm.weight"])
        assert torch.equal(module["up.weight"], whole["up.weight"][2 * rank : 2 * rank + 2])


def test_r79_rules_that_are_not_there(ckpt: Ckpt, tmp_path: Path) -> None:
    """R79: a misspelt rule is refused, for without it a norm would be joined; what no rule names is listed."""
    whole = {"up.weight": numbered(8, 2), "norm.weight": numbered(4, start=90)}
    shards = [{**whole, "up.weight": whole["up.weight"][4 * rank : 4 * rank + 4].clone()} for rank in (0, 1)]
    own = [stage2(shard, (tuple(whole),), mp=mp, mp_world_size=2) for mp, shard in enumerate(shards)]
    source = put({**own[0], **own[1]}, tmp_path / "source")
    for rules, said in (
        (
            {"tp_replicated_parameter_pattern": [".*norm.*"]},
            "'tp_replicated_parameter_pattern' is no rule of a universal",
        ),
        (
            {"tp_replicated_parameter_patterns": ["(*norm"]},
            "universal_checkpoint_info.json: the pattern '(*norm' is none",
        ),
    ):
        (source / "universal_checkpoint_info.json").write_text(json.dumps(rules))
        refused = ckpt("export", source, tmp_path / "out")
        assert (refused.status, said in refused.err) == (3, True)
    (source / "universal_checkpoint_info.json").write_text('{"parameter_to_average_patterns": []}')
    shown = ckpt("inspect", source).text
    assert "no rule of universal_checkpoint_info.json names norm.weight, up.weight: joined along dimension 0" in shown
    rules = {"tp_replicated_parameter_patterns": [".*norm.*"], "vocabulary_parameter_patterns": ["up.*"]}
    (source / "universal_checkpoint_info.json").write_text(json.dumps(rules))
    assert "no rule of" not in ckpt("inspect", source).text


def test_r79_norms_that_ranks_hold_differently(ckpt: Ckpt, tmp_path: Path) -> None:
    """R79: what rules say that ranks have alike is compared before one is taken, and asked for where it differs."""
    rules = {"universal_checkpoint_version": 0.4, "tp_replicated_parameter_patterns": [r".*norm\.weight"]}
    files: dict[str, bytes] = {}
    for mp in range(2):
        shard = {"up.weight": numbered(4, 2, start=8 * mp), "norm.weight": numbered(4, start=90 + mp)}
        files |= stage2(shard, (tuple(shard),), mp=mp, mp_world_size=2, universal_checkpoint_info=rules)
    source = put(files, tmp_path / "source")
    for words in (["export", source, tmp_path / "out"], ["reshard", source, tmp_path / "out", "--to", "dcp"]):
        refused = ckpt(*words)
        said = "'module.norm.weight': model-parallel ranks 0, 1 should hold the same, and hold 2 different values"
        assert (refused.status, said in refused.err, "concat" in refused.err) == (3, True, False)
    target = tmp_path / "out.safetensors"
    assert ckpt("export", source, target, "--unequal", "first").status == 0
    assert torch.equal(load_file(target)["norm.weight"], numbered(4, start=90))
    assert ckpt("export", source, target, "--include", "module.up*", "--overwrite").status == 0


def test_r80_masters_alone_are_read(ckpt: Ckpt, tmp_path: Path) -> None:
    """R80: weights of stage 3 need a third of the optimizer's bytes, and only these are read."""
    source = put(stage3({"a": numbered(300, 301), "b": numbered(5000)}, (("a", "b"),)), tmp_path / "source")
    planned = ckpt("export", source, tmp_path / "out", "--masters", "--dry-run", "--json").json
    assert planned["read_nbytes"] == planned["needed_nbytes"] == 4 * (300 * 301 + 5000)


def test_r82_half_of_the_partitions(ckpt: Ckpt, tmp_path: Path) -> None:
    """R82: two of four are on other disks: inspect and verify name them, a conversion refuses."""
    files = stage2(WEIGHTS, GROUPS, world_size=4)
    gone = [f"{FOLDER}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (2, 3)]
    source = put({path: data for path, data in files.items() if path not in gone}, tmp_path / "source")
    assert f"have 2 of 4 partitions; missing files: {gone[0]}, {gone[1]}" in ckpt("inspect", source).text
    checked = ckpt("verify", source)
    assert (checked.status, all(path in checked.text for path in gone)) == (1, True)
    refused = ckpt("reshard", source, tmp_path / "out", "--to", "deepspeed", "--dp", "2")
    assert (refused.status, gone[0] in refused.err, "--salvage OUT" in refused.err) == (3, True, True)
    kept = ckpt("verify", source, "--salvage", tmp_path / "kept")
    assert kept.status == 1  # partitions are lost, weights of stage 2 are all there
    assert ckpt("export", tmp_path / "kept", tmp_path / "weights.safetensors").status == 0
    found = load_file(tmp_path / "weights.safetensors")
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], weight) for name, weight in WEIGHTS.items())


def test_r82_partitions_of_two_numbers_of_ranks(ckpt: Ckpt, tmp_path: Path) -> None:
    """Beside R82: a save by 2 ranks over one by 4 leaves files of ranks 2 and 3, which are what is wrong."""
    before, now = stage2(WEIGHTS, GROUPS, 4), stage2(WEIGHTS, GROUPS, 2, dp_world_size=2)
    source = put({**before, **now}, tmp_path / "source")
    refused = ckpt("export", source, tmp_path / "out", "--masters")
    assert refused.status == 3
    assert (
        "zero_pp_rank_2_mp_rank_00_optim_states.pt: holds one of 4 partitions, 2 files beside it one of 2"
        in refused.err
    )
    assert "move them away" in refused.err
    findings = ckpt("verify", source, "--json").json["findings"]
    assert {f["file"].rpartition("/")[2] for f in findings if f["severity"] == "error"} == {
        f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (2, 3)
    }
    for path in source.glob("*/zero_pp_rank_[23]_*"):
        path.unlink()
    assert ckpt("verify", source, "--full").status == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_r82_partitions_of_two_saves(ckpt: Ckpt, tmp_path: Path, stage: int) -> None:
    """Beside R82: a rank's partition of another step or another run is told by what all ranks repeat, numbers too."""

    def changed(step: int | None, rate: float | None) -> Path:
        files = dict((stage2 if stage == 2 else stage3)(WEIGHTS, GROUPS))
        for rank in (0, 1):
            name = f"{FOLDER}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            value: Any = torch.load(io.BytesIO(files[name]), weights_only=True)
            outer = value["optimizer_state_dict"]
            base = outer["base_optimizer_state" if stage == 2 else "optimizer_state_dict"]
            for states in base["state"].values():
                states["step"] = step if rank and step else 7
            base["param_groups"][1]["lr"] = rate if rank and rate else 0.5
            files[name] = saved(value)
        return put(files, tmp_path / f"{step}-{rate}")

    assert ckpt("verify", changed(None, None), "--strict").status == 0
    for source, said in (
        (changed(9, None), "optimizer.state.0.step is 7 on ranks 0; 9 on ranks 1: files of several saves are mixed"),
        (changed(None, 0.1), "optimizer.param_groups.1.lr is 0.5 on ranks 0; 0.1 on ranks 1"),
    ):
        checked = ckpt("verify", source, "--strict")
        assert (checked.status, said in checked.text) == (1, True)
        done = ckpt("reshard", source, tmp_path / "out", "--to", "deepspeed", "--dp", "3", "--overwrite")
        assert (done.status, said in done.text) == (0, True)


def test_r82_model_states_of_two_saves(ckpt: Ckpt, tmp_path: Path) -> None:
    """Beside R82: of stage 3 each rank's model state counts steps, and must count the same."""
    name = f"{FOLDER}zero_pp_rank_1_mp_rank_00_model_states.pt"
    later = stage3(WEIGHTS, GROUPS, global_steps=8)[name]
    checked = ckpt("verify", put({**stage3(WEIGHTS, GROUPS), name: later}, tmp_path))
    assert (checked.status, "error mixed-steps global_steps is 7 on ranks 0; 8 on ranks 1" in checked.text) == (1, True)


def test_r82_names_before_there_was_an_underscore(ckpt: Ckpt, tmp_path: Path) -> None:
    """Beside R82: old ``zero_pp_rank_0_mp_rank_00optim_states.pt`` are partitions, and a missing one is called so."""
    files = {path.replace("_optim_states", "optim_states"): data for path, data in stage2(WEIGHTS, GROUPS).items()}
    source = put(files, tmp_path / "source")
    assert ckpt("export", source, tmp_path / "out.safetensors", "--masters").status == 0
    assert torch.equal(load_file(tmp_path / "out.safetensors")["b"], states_of(WEIGHTS)["fp32"]["b"])
    next(source.glob("*/*rank_1*optim_states.pt")).unlink()
    assert "zero_pp_rank_1_mp_rank_00optim_states.pt" in ckpt("verify", source).text


def test_r82_a_parameter_of_a_universal_checkpoint(ckpt: Ckpt, tmp_path: Path) -> None:
    """Beside R82: a folder ``zero/<parameter>`` that was not copied, which only the model states tell of."""
    source = FIXTURES / "deepspeed/ds_z2_bf16/ckpt/global_step3_universal"
    assert ckpt("verify", source).status == 0
    shutil.copytree(source, tmp_path / "in", ignore=shutil.ignore_patterns("emb.weight"))
    checked = ckpt("verify", tmp_path / "in")
    assert (checked.status, "missing-file zero/emb.weight/fp32.pt" in checked.text) == (1, True)
    refused = ckpt("export", tmp_path / "in", tmp_path / "out")
    assert (refused.status, "1 missing file would be lost: zero/emb.weight/fp32.pt" in refused.err) == (3, True)


def test_names_that_lightning_wraps(ckpt: Ckpt, tmp_path: Path) -> None:
    """Lightning's strategies save ``_forward_module.w``: an export has the module's own names."""
    weights = {f"_forward_module.{name}": tensor for name, tensor in WEIGHTS.items()}
    groups = tuple(tuple(f"_forward_module.{name}" for name in group) for group in GROUPS)
    source = put(stage2(weights, groups), tmp_path / "source")
    assert ckpt("export", source, tmp_path / "out.safetensors").status == 0
    assert set(load_file(tmp_path / "out.safetensors")) == set(WEIGHTS)


@pytest.mark.parametrize("stage", [1, 2, 3, None])
def test_r83_muon_keeps_its_momentum(ckpt: Ckpt, tmp_path: Path, stage: int | None) -> None:
    """R83: a state of another name and dtype goes to other ranks as it is, and to a universal checkpoint."""
    files = dict(stage2(WEIGHTS, GROUPS))
    for rank in (0, 1):
        name = f"{FOLDER}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        value: Any = torch.load(io.BytesIO(files[name]), weights_only=True)
        base = value["optimizer_state_dict"]["base_optimizer_state"]
        for states in base["state"].values():
            states["momentum_buffer"] = states.pop("exp_avg").to(torch.bfloat16)
            del states["exp_avg_sq"]
        base["param_groups"] = [{**LR, "params": [number]} for number in range(len(GROUPS))]
        files[name] = saved(value)
    words = ["--to", "deepspeed", "--zero-stage", str(stage), "--dp", "3"]
    words = words if stage else ["--to", "deepspeed-universal"]
    assert ckpt("reshard", put(files, tmp_path / "source"), tmp_path / "out", *words).status == 0
    with open_checkpoint(tmp_path / "out") as found:
        for name, tensor in states_of(WEIGHTS)["exp_avg"].items():
            view = found[f"optimizer.state.{name}.momentum_buffer"]
            assert view.dtype.name == "bfloat16"
            assert torch.equal(view.torch(), tensor.to(torch.bfloat16))


def test_a_number_of_ranks_that_deepspeed_refuses(ckpt: Ckpt, tmp_path: Path) -> None:
    """Its loader says "automatic adjustment is not currently supported": three ranks become two all the same."""
    source = FIXTURES / "deepspeed/ds_z2_rr/ckpt"
    done = ckpt("reshard", source, tmp_path / "two", "--to", "deepspeed", "--dp", "2")
    assert (done.status, "deepspeed, 2 ranks" in done.text) == (0, True)
    names = sorted(path.name for path in (tmp_path / "two/global_step3").iterdir())
    ranks = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    assert names == [*ranks, "mp_rank_00_model_states.pt"]
    assert ckpt("diff", source, tmp_path / "two").status == 0
