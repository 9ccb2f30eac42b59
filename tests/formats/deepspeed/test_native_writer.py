"""The writer of DeepSpeed's own checkpoints: at the source's layout the original's files, at others its state."""

from __future__ import annotations

import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import CkptError, LayoutError, Unsupported, UsageError
from tests.formats.conformance import FIXTURES

DEEPSPEED = FIXTURES / "deepspeed"
FRAGMENT = ("deepspeed.utils.tensor_fragment", "fragment_address")
CLASSES = (FRAGMENT, ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"))


def content(url: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor."""
    with open_checkpoint(url) as checkpoint:
        return {fqn: (view.dtype.name, view.shape, view.numpy().tobytes()) for fqn, view in checkpoint.items()}


def written(name: str, folder: Path, **options: Any) -> Path:
    """A fixture, resharded."""
    reshard(DEEPSPEED / name / "ckpt", folder, to="deepspeed", durable=False, **options)
    return folder


@pytest.mark.parametrize(
    ("name", "stage", "dp"),
    [
        ("ds_z2_bf16", 2, 2), ("ds_z2_bf16", 1, 7), ("ds_z2_rr", 2, 2), ("ds_z2_align", 2, 4), ("ds_z1_bf16opt", 1, 2),
        ("ds_z2_elastic", 2, 5), ("ds_z1_fp32", 3, 2), ("ds_z3_sub", 3, 2), ("ds_z3_sub", 1, 4), ("ds_z3_bf16", 3, 64),
        ("ds_autotp2_z3", 2, 3),
    ],
)  # fmt: skip
def test_state_is_the_source_s(name: str, stage: int, dp: int, tmp_path: Path) -> None:
    """Weights, buffers, masters, moments, steps, groups and values, at any stage and number of ranks."""
    target = written(name, tmp_path / "target", zero_stage=stage, dp=dp)
    assert content(target) == content(DEEPSPEED / name / "ckpt")
    with open_checkpoint(DEEPSPEED / name / "ckpt") as before, open_checkpoint(target) as after:
        assert after.manifest.info["zero_stage"] == stage
        assert after.manifest.mesh is not None
        assert after.manifest.mesh.sizes == (1, dp, 1)
        groups = {fqn: value for fqn, value in before.objects().items() if ".param_groups." in fqn}
        assert {fqn: value for fqn, value in after.objects().items() if ".param_groups." in fqn} == groups
        assert after.objects()["my_iteration" if "autotp" not in name else "global_steps"] == 3


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("ds_pp2_dp2_z1", (1, 3, 1), {}), ("ds_pp2_dp2_z1", (2, 3, 1), {}),
        ("ds_pp2_dp2_z1", (2, 1, 1), {"first_stage_layers": 2}),
        ("ds_moe_ep2_z1", (1, 4, 1), {"ep": 4}), ("ds_moe_ep2_z1", (1, 3, 1), {}),
        ("ds_moe_ep2_z1", (1, 6, 1), {"ep": 2, "zero_stage": 2}), ("ds_moe_ep2_z1", (1, 2, 1), {"ep": 2}),
        ("ds_autotp2_z3", (1, 3, 2), {}), ("ds_autotp2_z3", (1, 2, 2), {"zero_stage": 1, "dtype": "bf16"}),
        ("ds_autotp2_z3", (1, 1, 2), {"zero_stage": 2}),
    ],
)  # fmt: skip
def test_other_grids(name: str, mesh: tuple[int, int, int], options: dict[str, Any], tmp_path: Path) -> None:
    """Stages of a pipeline, ranks that share experts, and tensor-parallel ones: what is read back is the source."""
    pp, dp, tp = mesh
    target = written(name, tmp_path / "target", pp=pp, dp=dp, tp=tp, **options)
    before, after = content(DEEPSPEED / name / "ckpt"), content(target)
    rounded = {fqn for fqn in before if "dtype" in options and fqn.startswith("module.")}
    assert set(after) == set(before)
    assert {fqn: after[fqn] for fqn in after if fqn not in rounded} == {
        fqn: before[fqn] for fqn in before if fqn not in rounded
    }
    with open_checkpoint(DEEPSPEED / name / "ckpt") as source, open_checkpoint(target) as found:
        assert found.manifest.mesh is not None
        assert found.manifest.mesh.sizes == mesh
        groups = {fqn: value for fqn, value in source.objects().items() if ".param_groups." in fqn}
        if "moe" in name:
            groups["optimizer.param_groups.1.name"] = f"ep_size_{options.get('ep', 1)}"
        assert {fqn: value for fqn, value in found.objects().items() if ".param_groups." in fqn} == groups
    assert verify(target, level="full").is_ok


def test_stage_3_has_masters_for_weights(tmp_path: Path) -> None:
    """Low-precision weights are left out, which is said; frozen parameters and buffers stay."""
    result = reshard(DEEPSPEED / "ds_z2_bf16/ckpt", tmp_path / "z3", to="deepspeed", zero_stage=3, dp=2, durable=False)
    before, after = content(DEEPSPEED / "ds_z2_bf16/ckpt"), content(tmp_path / "z3")
    gone = {dropped.fqn for dropped in result.dropped}
    assert all("masters alone" in dropped.why for dropped in result.dropped)
    assert gone == {fqn for fqn in before if fqn.startswith("module.") and after[fqn] != before[fqn]} - {
        "module.head.weight"  # tied: no tensor of its own in the first place
    }
    for fqn in gone:
        assert after[fqn] == after[f"optimizer.state.{fqn.removeprefix('module.')}.fp32"]
    assert after["module.pos"] == before["module.pos"]


def test_stage_3_weights_are_rounded_on_request(tmp_path: Path) -> None:
    """At stages 1 and 2 weights are masters too unless a dtype is asked for; it gives what a bf16 run had."""
    asked = written("ds_z3_bf16", tmp_path / "asked", zero_stage=2, dp=2, dtype="bf16")
    from safetensors.torch import load_file

    truth = load_file(DEEPSPEED / "ds_z3_bf16/truth.safetensors")
    found = content(asked)
    for name in ("emb.weight", "blocks.0.qkv.weight", "pos"):
        expected = truth[f"param/{name}"].view(torch.uint8).numpy().tobytes()
        assert found[f"module.{name}"] == ("bfloat16", tuple(truth[f"param/{name}"].shape), expected)
    plain = content(written("ds_z3_bf16", tmp_path / "plain", zero_stage=2, dp=2))
    assert plain["module.emb.weight"] == plain["optimizer.state.emb.weight.fp32"]


class Inert:
    """Stands for a class of DeepSpeed."""


def plain(value: Any) -> Any:
    """A loaded object as data that compares."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), raw
    if isinstance(value, torch.Size | tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return dict(value.__dict__) if isinstance(value, Inert) else value


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of DeepSpeed for torch.load, which imports them."""
    for module, name in (*CLASSES, ("deepspeed.runtime.zero.config", "ZeroStageEnum")):
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        made = int if name == "ZeroStageEnum" else type(name, (Inert,), {})
        setattr(sys.modules[module], name, made)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        *((name, {"dp": 3}) for name in ("ds_z2_bf16", "ds_z2_align", "ds_z2_rr", "ds_z1_fp32", "ds_z3_bf16")),
        ("ds_z3_sub", {"dp": 3}), ("ds_pp2_dp2_z1", {"pp": 2, "dp": 2}), ("ds_moe_ep2_z1", {"dp": 4, "ep": 2}),
        ("ds_autotp2_z3", {"dp": 2, "tp": 2}),
    ],
)  # fmt: skip
def test_at_the_source_s_layout_files_are_the_original_s(
    name: str, grid: dict[str, int], tmp_path: Path, stand_ins: None
) -> None:
    """On as many ranks, every file loads to what DeepSpeed saved there, padding and all."""
    target = written(name, tmp_path / "target", **grid)
    original = DEEPSPEED / name / "ckpt"
    assert (target / "latest").read_bytes() == (original / "latest").read_bytes()
    names = {path.name for path in (original / "global_step3").iterdir()}
    assert {path.name for path in (target / "global_step3").iterdir()} == names
    for path in sorted((target / "global_step3").iterdir()):
        found = plain(torch.load(path, weights_only=False))
        expected = plain(torch.load(original / "global_step3" / path.name, weights_only=False))
        if "mp_rank" in path.name and "module" in found:
            if "autotp" not in name:
                found.pop("universal_checkpoint_info")  # which ds_to_universal asks for
            expected.pop("ds_autoep_layers", None)  # None, without AutoEP
            if path.name.startswith("zero_pp_rank_") and "zero_pp_rank_0_" not in path.name:
                expected["shared_params"] = found["shared_params"]  # DeepSpeed's first rank alone has it
        elif name == "ds_z2_rr":  # DeepSpeed records the addresses of the order before the shuffle: 0.19.8
            expected["optimizer_state_dict"].pop("param_slice_mappings")
            mappings = found["optimizer_state_dict"].pop("param_slice_mappings")
            shapes = torch.load(target / "global_step3/mp_rank_00_model_states.pt", weights_only=False)["param_shapes"]
            assert [list(own) for own in mappings] == [
                [n for n in shapes[g] if n in own] for g, own in enumerate(mappings)
            ]
        _without_padding(found, expected)
        assert found == expected, path.name


def _without_padding(found: Any, expected: Any) -> None:
    """The tail of moments behind the last parameter: zeros here, at stage 3 whatever was in memory there."""
    if "optimizer_state_dict" in found.get("optimizer_state_dict", {}):
        inner = [one["optimizer_state_dict"]["optimizer_state_dict"]["state"] for one in (found, expected)]
        masters = [one["optimizer_state_dict"]["fp32_flat_groups"] for one in (found, expected)]
        for number in inner[0]:
            vectors = [(inner[0][number], inner[1][number], key) for key in ("exp_avg", "exp_avg_sq")]
            for mine, other, key in [*vectors, (masters[0], masters[1], number)]:
                kind, shape, raw = mine[key]
                cells = list(zip(*(memoryview(one[key][2]).cast("I") for one in (mine, other)), strict=True))
                raw = b"".join(
                    (b if a == 0 else a).to_bytes(4, sys.byteorder) for a, b in cells
                )  # a zero may be padding
                mine[key] = (kind, shape, raw)


@pytest.mark.parametrize(("name", "stage"), [("ds_z2_align", 2), ("ds_z3_sub", 3)])
def test_zips_are_sound(name: str, stage: int, tmp_path: Path) -> None:
    """Checksums of storages that several boxes and padding fill are right."""
    target = written(name, tmp_path / "target", zero_stage=stage, dp=4)
    files = list(target.rglob("*.pt"))
    assert len(files) == (5 if stage == 2 else 8)
    for path in files:
        with zipfile.ZipFile(path) as opened:
            assert opened.testzip() is None
            assert all(member.CRC for member in opened.infolist() if member.file_size > 4)


def test_fp32_weights_of_fsdp_become_masters(tmp_path: Path) -> None:
    """A DCP checkpoint of a run in fp32: its weights are the masters, its order and groups are kept."""
    source = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"
    result = reshard(source, tmp_path / "ds", to="deepspeed", zero_stage=2, dp=3, dtype="bf16", durable=False)
    assert any("in the order of the source's optimizer" in note for note in result.notes)
    before, after = content(source), content(tmp_path / "ds")
    weights = [fqn.removeprefix("optim.state.").removesuffix(".exp_avg") for fqn in before if fqn.endswith(".exp_avg")]
    assert len(weights) == 32
    for weight in weights:
        assert after[f"optimizer.state.{weight}.fp32"] == before[f"model.{weight}"]
        assert after[f"module.{weight}"][:2] == ("bfloat16", before[f"model.{weight}"][1])
        for state in ("exp_avg", "exp_avg_sq", "step"):
            assert after[f"optimizer.state.{weight}.{state}"] == before[f"optim.state.{weight}.{state}"]
    assert after["module.buf_scalar"] == before["model.buf_scalar"]
    assert (tmp_path / "ds/global_step3/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").exists()


@pytest.mark.parametrize(
    ("name", "options", "error", "match"),
    [
        ("deepspeed/ds_z2_bf16", {"mesh": "dp=2,cp=2"}, Unsupported, "tensor-parallel ranks, got cp=2"),
        ("deepspeed/ds_z2_bf16", {"tp": 2}, Unsupported, "nothing says how they share tensors"),
        ("deepspeed/ds_z2_bf16", {"pp": 2}, Unsupported, "nothing numbers its layers"),
        ("deepspeed/ds_z2_bf16", {"dp": 2, "ep": 2}, Unsupported, "there are no experts"),
        ("deepspeed/ds_pp2_dp2_z1", {"dp": 2, "zero_stage": 2}, Unsupported, "stage 2 of a pipeline"),
        ("deepspeed/ds_pp2_dp2_z1", {"pp": 3}, LayoutError, "stage 2 has no parameter of group 1"),
        ("deepspeed/ds_pp2_dp2_z1", {"pp": 6}, LayoutError, "5 layers cannot be shared by 6 stages"),
        ("deepspeed/ds_moe_ep2_z1", {"dp": 2, "zero_stage": 3}, Unsupported, "experts at stage 3"),
        ("deepspeed/ds_moe_ep2_z1", {"dp": 3, "ep": 3}, LayoutError, "4 experts cannot be shared by 3"),
        ("deepspeed/ds_autotp2_z3", {"tp": 4}, LayoutError, "how 2 tensor-parallel ranks share it, not how 4"),
        (
            "deepspeed/ds_z2_elastic",
            {"dp": 2, "zero_stage": 3},
            Unsupported,
            "elastic checkpoint has no hyperparameters",
        ),
        ("deepspeed/accelerate_fsdp2", {"dp": 2}, UsageError, "stage of the target is not known"),
        ("torch/dcp_fsdp2_4r_fp32", {"dp": 2, "zero_stage": 3}, LayoutError, "buffers, frozen parameters or second"),
        ("torch/verl_4r_bf16", {"dp": 2, "zero_stage": 2}, Unsupported, "no fp32 master and no weight in fp32"),
        ("torch/hf_sharded", {"dp": 2, "zero_stage": 2}, Unsupported, "one optimizer's state, there are 0"),
    ],
)
def test_refusals(name: str, options: dict[str, Any], error: type[CkptError], match: str, tmp_path: Path) -> None:
    """What DeepSpeed could not load, or nothing tells how, is refused before a byte is written."""
    with pytest.raises(error, match=match):
        reshard(FIXTURES / name / "ckpt", tmp_path / "target", to="deepspeed", durable=False, **options)
    assert not list(tmp_path.iterdir())


def test_through_dcp_and_back(tmp_path: Path) -> None:
    """What DCP carries is enough: groups, masters, moments; the step is the optimizer's where no other is told."""
    source = DEEPSPEED / "ds_z2_rr/ckpt"
    reshard(source, tmp_path / "dcp", dp=2, default="replicate", durable=False)
    reshard(tmp_path / "dcp", tmp_path / "back", to="deepspeed", zero_stage=2, dp=5, durable=False)
    assert content(tmp_path / "back") == content(source)
    assert (tmp_path / "back/latest").read_text("utf-8") == "global_step3"


def test_steps_that_differ(tmp_path: Path) -> None:
    """DeepSpeed has one step for a vector: parameters that began at different times cannot share one."""
    state = {"model": {"a": torch.ones(3), "b": torch.ones(2)}, "optimizer": {
        "state": {name: {"exp_avg": torch.ones(size), "step": torch.tensor(step)}
                  for name, size, step in (("a", 3, 4.0), ("b", 2, 5.0))},
        "param_groups": [{"lr": 0.1, "params": ["a", "b"]}],
    }}  # fmt: skip
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(LayoutError, match=r"step is 5\.0, that of 'a' is 4\.0"):
        reshard(tmp_path / "state.pt", tmp_path / "target", to="deepspeed", zero_stage=2, durable=False)
    del state["optimizer"]["state"]["b"]
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(LayoutError, match="1 parameter of group 0 has no state"):
        reshard(tmp_path / "state.pt", tmp_path / "target", to="deepspeed", zero_stage=2, durable=False)
