"""Section C of the collected reports: files of torch.save, and what else is pickled.

Told by a test elsewhere, of which those here are at most the view through the command:

====  ============================================================================================
R43   formats/pickle/test_files.py, test_hostile.py (nothing is imported)
R46   formats/torch_save/test_reader.py (zip, legacy, any name), formats/pickle/test_legacy.py
R47   formats/torch_save/test_reader.py (cut anywhere, one error that counts the whole storages)
R49   formats/torch_save/test_reader.py (of 100 tensors one costs its bytes)
====  ============================================================================================
"""

from __future__ import annotations

import enum
import pickle
import random
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.reports.conftest import Ckpt
from tests.reports.made import values


def repacked(source: Path, target: Path, *changes: tuple[str, bytes, bytes]) -> Path:
    """A copy of a torch zip; each change is the end of a member's name, bytes in it, and what stands there instead."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for member in old.infolist():
            data = old.read(member)
            for ending, before, after in changes:
                if member.filename.endswith(ending):
                    assert before in data
                    data = data.replace(before, after)
            new.writestr(member.filename, data)
    return target


def test_r43_both_majors_of_numpy(ckpt: Ckpt, tmp_path: Path) -> None:
    """R43: random states are data, whichever numpy pickled them, and come out of torch.load as they were."""
    states: dict[str, Any] = {
        "numpy": np.random.RandomState(0).get_state(), "python": random.Random(0).getstate(),
        "scalar": np.float64(2.5), "array": np.arange(3, dtype=np.uint32), "dtype": np.dtype("uint32"),
    }  # fmt: skip
    torch.save({"w": torch.ones(2), "rng": states}, tmp_path / "new.pt")
    old = repacked(tmp_path / "new.pt", tmp_path / "old.pt", ("data.pkl", b"numpy._core", b"numpy.core"))
    shown = [ckpt("inspect", path, "--objects", "--json").json["blobs"] for path in (tmp_path / "new.pt", old)]
    assert shown[0] == shown[1]
    assert {blob["fqn"] for blob in shown[0]} == {f"rng.{name}" for name in states}
    done = ckpt("export", old, tmp_path / "out.pt", "--to", "torch-save", "--all")
    assert (done.status, "torch.load needs weights_only=False for" in done.text) == (0, True)
    found = torch.load(tmp_path / "out.pt", weights_only=False)["rng"]
    assert found["python"] == states["python"]
    assert (found["scalar"], found["dtype"]) == (2.5, np.dtype("uint32"))
    assert found["array"].tolist() == [0, 1, 2]
    assert [part.tolist() if isinstance(part, np.ndarray) else part for part in found["numpy"]] == [
        part.tolist() if isinstance(part, np.ndarray) else part for part in states["numpy"]
    ]


def test_r43_records_with_arrays_in_fields(ckpt: Ckpt, tmp_path: Path) -> None:
    """R43: a field that is an array keeps its elements' type and its shape, where it became opaque bytes."""
    kind = np.dtype([("x", "<f4", (2, 3)), ("y", "<i8"), ("z", [("a", "<u2", 2)])])
    array = np.zeros(2, dtype=kind)
    array["x"], array["y"], array["z"]["a"] = 1.5, 7, 9
    torch.save({"w": torch.ones(2), "table": array, "kind": kind}, tmp_path / "m.pt")
    assert ckpt("export", tmp_path / "m.pt", tmp_path / "out.pt", "--all").status == 0
    found = torch.load(tmp_path / "out.pt", weights_only=False)
    assert (found["table"].dtype, found["kind"]) == (kind, kind)
    assert found["table"].tobytes() == array.tobytes()


def test_r44_an_enum_of_a_missing_library(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R44: an enum of a library that is not here is shown by its class and its value."""
    module: Any = ModuleType("deepspeed_of_a_test")
    kind: Any = enum.IntEnum("ZeroStageEnum", {"weights": 3}, module=module.__name__)  # type: ignore[misc]
    module.ZeroStageEnum = kind
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.save({"w": torch.ones(2), "zero_stage": kind.weights}, tmp_path / "m.pt")
    monkeypatch.delitem(sys.modules, module.__name__)
    (shown,) = ckpt("inspect", tmp_path / "m.pt", "--objects", "--json").json["blobs"]
    assert (shown["fqn"], shown["text"]) == ("zero_stage", "<deepspeed_of_a_test.ZeroStageEnum args=(3)>")


class TestR46Containers:
    """R46: what a file is, its bytes say, not its name."""

    @pytest.mark.parametrize("name", ["zip.pth.tar", "legacy.pth.tar", "no_suffix", "version_99.pt"])
    def test_torch_files_of_any_name(self, ckpt: Ckpt, tmp_path: Path, name: str) -> None:
        """Zip and legacy files that are called tar archives, or nothing, and a zip of a version to come."""
        path = tmp_path / name
        torch.save({"w": torch.arange(4.0)}, path, _use_new_zipfile_serialization=not name.startswith("legacy"))
        if name.startswith("version"):
            path = repacked(path, tmp_path / "changed.pt", ("/version", b"3", b"99"))
        assert ckpt("inspect", path, "--json").json["format"] == "torch-save"
        assert values(path, "w") == [0.0, 1.0, 2.0, 3.0]

    @pytest.mark.parametrize("beside", [False, True])
    def test_what_is_no_checkpoint(self, ckpt: Ckpt, tmp_path: Path, beside: bool) -> None:
        """A pickle without tensors is named, and so is a tar archive of something else, also beside a checkpoint."""
        (tmp_path / "inner").write_bytes(b"log")
        with tarfile.open(tmp_path / "real.pth.tar", "w") as archive:
            archive.add(tmp_path / "inner", arcname="inner")
        (tmp_path / "inner").unlink()
        (tmp_path / "plain.pt").write_bytes(pickle.dumps({"a": 1, "b": [1, 2]}))
        if beside:
            (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
        for name, said in (
            ("real.pth.tar", "a tar archive with no known checkpoint format among 1 without an ending"),
            ("plain.pt", "is a pickle, which is no checkpoint"),
        ):
            refused = ckpt("inspect", tmp_path / name)
            assert (refused.status, f"{name}: {said}" in refused.err) == (3, True)


@pytest.mark.parametrize(("keep", "whole"), [(0.1, 0), (0.5, 4), (0.8, 7), (-1, 9), ("directory", 9)])
def test_r47_cut_files(ckpt: Ckpt, tmp_path: Path, keep: float | str, whole: int) -> None:
    """R47: a cut zip is called that, with the number of storages that are whole; nothing is exported of it."""
    path = tmp_path / "m.pt"
    torch.save({f"w{number}": torch.full((1000,), float(number)) for number in range(9)}, path)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        middle = archive.start_dir + 200
    path.write_bytes(data[: middle if isinstance(keep, str) else -1 if keep == -1 else int(len(data) * keep)])
    for command in (["verify", path], ["export", path, tmp_path / "out"]):
        refused = ckpt(*command)
        assert refused.status == 3
        assert f"truncated: no end record in its {path.stat().st_size:,} bytes" in refused.err
        assert f"local headers allow salvage of {whole} of 9 storages" in refused.err
        assert ("or keep what is whole: ckpt verify SRC --salvage OUT" in refused.err) == (whole > 0)
    assert [found.name for found in tmp_path.iterdir()] == ["m.pt"]


@pytest.mark.parametrize("is_zip", [False, True])
def test_r47_cut_at_every_byte(ckpt: Ckpt, tmp_path: Path, *, is_zip: bool) -> None:
    """R47: wherever a file was cut, also in front of its tensors, it is called a cut one, with what to do."""
    path = tmp_path / "m.pt"
    torch.save({"a": torch.arange(3.0), "b": torch.ones(2)}, path, _use_new_zipfile_serialization=is_zip)
    data = path.read_bytes()
    path.unlink()
    cut = tmp_path / "cut.pt"
    for length in (*range(4, 60, 3), *range(60, len(data), 41), len(data) - 1):
        cut.write_bytes(data[:length])
        refused = ckpt("inspect", cut)
        assert (refused.status, "cut.pt" in refused.err) == (3, True), length
        hint = refused.err.partition("hint: ")[2]
        assert hint.startswith(
            ("the copy or the save did not finish", "the copy or the save was cut", "the copy was cu")
        )
