"""What a program may do with an open checkpoint, and what it is told when it does something else."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_tool
from ckpt_tool.errors import BadIndex, UnknownTensor, UsageError

SOURCE = Path("fixtures/torch/dcp_fsdp2_4r_fp32/ckpt")
NAME = "model.lm_head.weight"


def test_star_import_gives_what_is_exported() -> None:
    """``__all__`` names everything, errors included."""
    names: dict[str, Any] = {}
    exec("from ckpt_tool import *", names)
    assert set(ckpt_tool.__all__) <= set(names)
    assert issubclass(ckpt_tool.errors.NotFound, ckpt_tool.CkptError)


def test_indices_are_those_of_numpy() -> None:
    """Steps, numbers of numpy, rows in a loop; what is no basic index is refused, never taken for another."""
    with ckpt_tool.open(SOURCE) as checkpoint:
        view, whole = checkpoint[NAME], checkpoint[NAME].numpy()
        assert (view.ndim, view.size, len(view), str(view.dtype)) == (2, whole.size, 97, "float32")
        for index in (np.s_[::2], np.s_[::-1], np.s_[90:3:-7, np.int64(3)], np.int64(5), np.s_[..., -1], np.s_[5:2]):
            assert np.array_equal(view[index], whole[index])
        assert sum(1 for row in view) == 97
        for wrong in ([0, 1], np.array([0, 1]), None, True, "0", 1.5, np.s_[..., ...], np.s_[::0], 97, np.s_[0, 0, 0]):
            with pytest.raises(BadIndex):
                view[wrong]
        with pytest.raises(ValueError, match="a copy"):
            view.__array__(copy=False)
        for box in (ckpt_tool.Box((0,), (1,)), ckpt_tool.Box((0, 0), (98, 1))):
            with pytest.raises(BadIndex, match=r"is not inside of \[97, 24\]"):
                checkpoint.read([(NAME, box)])


def test_names_that_are_not_there() -> None:
    """A missing name is a KeyError with the nearest names; ``in`` and ``get`` ask without one."""
    with ckpt_tool.open(SOURCE) as checkpoint:
        with pytest.raises(UnknownTensor, match="among 134") as caught:
            checkpoint["model.lm_head.weigth"]
        assert isinstance(caught.value, KeyError)
        assert caught.value.hint
        assert caught.value.hint.startswith("did you mean model.lm_head.weight")
        assert "x" not in checkpoint
        assert checkpoint.get("x") is None


def test_copies_open_it_again() -> None:
    """A checkpoint goes to another process by its name, as a data loader's worker needs it."""
    with ckpt_tool.open(SOURCE) as checkpoint, pickle.loads(pickle.dumps(checkpoint)) as copy:
        assert np.array_equal(copy[NAME].numpy(), checkpoint[NAME].numpy())


def test_one_pattern_is_a_pattern(tmp_path: Path) -> None:
    """A text alone where several are taken is one of them, not its letters."""
    done = ckpt_tool.export(SOURCE, tmp_path / "out", include="model.*", exclude="*norm*", durable=False)
    assert done.n_tensors > 20
    assert {name for name, _ in ckpt_tool.stream(SOURCE, include="*lm_head*", sections="model")} == {NAME}
    assert ckpt_tool.diff(SOURCE, tmp_path / "out", include="*lm_head.weight", section="model").is_same


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 0}, {"tp": 2.0}, {"tp": "2"}, {"default": "foo"}, {"dp_mode": "foo"}, {"replicas": "foo"},
        {"rank_state": "foo"}, {"names": "foo"}, {"n_workers": 0}, {"memory_budget_bytes": "1GiB"}, {"vpp": 0},
        {"dtype": "int8"}, {"dtype": "complex64"}, {"dtype": "float4_e2m1fn_x2"},
    ],
)  # fmt: skip
def test_arguments_that_mean_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    """They are refused, whether or not this conversion would have looked at them."""
    with pytest.raises(UsageError):
        ckpt_tool.reshard(SOURCE, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())
    for path in ("", tmp_path / "out"):
        with pytest.raises(ckpt_tool.CkptError):
            ckpt_tool.open(path)


@pytest.mark.parametrize("name", ["rules", "naming", "config"])
@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_files_that_arguments_name(name: str, content: bytes | None, tmp_path: Path) -> None:
    """One that is not there, or no text, is refused, also by a conversion that would not have looked at it."""
    path = tmp_path / "options"
    if content is not None:
        path.write_bytes(content)
    options: dict[str, Any] = {name: path}
    message = f"{path}: the {name} file cannot be read: {'No such file' if content is None else 'it is no text'}"
    with pytest.raises(UsageError, match=message):
        ckpt_tool.reshard(SOURCE, tmp_path / "out", to="megatron" if name == "config" else "dcp", **options)
    if name == "naming":
        with pytest.raises(UsageError, match=message):
            ckpt_tool.export(SOURCE, tmp_path / "out", names="source", **options)
    if name == "rules":
        with pytest.raises(UsageError, match=message):
            next(ckpt_tool.stream(SOURCE, **options))


@pytest.mark.parametrize(
    "options", [{"family": "llama"}, {"facts": {"heads": 4}}, {"true_vocab": 7}, {"naming": Path(__file__)}]
)
def test_names_that_are_not_asked_for(options: dict[str, Any], tmp_path: Path) -> None:
    """What is said of a family's names and would be ignored is refused, with the option that asks for them."""
    for convert in (ckpt_tool.reshard, ckpt_tool.export):
        with pytest.raises(UsageError, match="is about other names, which are not asked for") as caught:
            convert(SOURCE, tmp_path / "out", names="source", **options)
        assert caught.value.hint == "add --names hf"


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("", 'write "." for the folder that you are in'),
        ("s3:/bucket/x", "write s3://bucket/x, or ./s3:/bucket/x for a folder"),
        ("afile/x", "choose another name"),
        ("out.safetensors", "leave the suffix out, or choose the format that has it with --to"),
    ],
)
def test_names_that_are_no_place_to_write(
    target: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was meant is said, and nothing is left behind."""
    source = SOURCE.absolute()
    monkeypatch.chdir(tmp_path)
    Path("afile").touch()
    with pytest.raises(ckpt_tool.CkptError) as caught:
        ckpt_tool.reshard(source, target, durable=False)
    assert caught.value.hint == hint
    assert [path.name for path in tmp_path.iterdir()] == ["afile"]


def test_links_of_the_hub_cache_lead_to_names(tmp_path: Path) -> None:
    """A folder above a revision is told which folder has the names, not the one of digests."""
    for name in ("blobs", "snapshots/1a2b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "blobs/cafe").write_bytes((SOURCE.parents[1] / "hf_single/ckpt/model.safetensors").read_bytes())
    (tmp_path / "snapshots/1a2b/model.safetensors").symlink_to("../../blobs/cafe")
    with pytest.raises(ckpt_tool.CkptError) as caught:
        ckpt_tool.open(tmp_path / "snapshots")
    assert str(tmp_path / "snapshots/1a2b") in (caught.value.hint or "")
    assert len(ckpt_tool.open(tmp_path / "snapshots/1a2b"))


def test_scales_are_cast_through_float32(tmp_path: Path) -> None:
    """ml_dtypes has no way from float8_e8m0fnu to its other types; that nothing is multiplied out is said."""
    data = b"\x7f\x80\x7e\x00"
    header = b'{"w_scale":{"dtype":"F8_E8M0","shape":[4],"data_offsets":[0,4]}}'
    (tmp_path / "s.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    done = ckpt_tool.export(tmp_path / "s.safetensors", tmp_path / "out", dtype="fp8", durable=False)
    assert any("multiplies nothing out" in note for note in done.notes)
    with ckpt_tool.open(tmp_path / "out") as checkpoint:
        assert checkpoint["w_scale"].numpy().astype("f4").tolist() == [1.0, 2.0, 0.5, 0.0]
