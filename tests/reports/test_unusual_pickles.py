"""What torch.save takes besides plain tensors in dicts: nothing of it is lost, and bytes are as torch loads them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from tests.reports.conftest import Ckpt
from tests.reports.made import as_bytes


class Rebuilt:
    """Pickled as a call of one of torch's functions."""

    def __init__(self, function: str, *args: Any) -> None:
        self.call = (getattr(torch._utils, function), args)

    def __reduce__(self) -> Any:
        return self.call


def expected(**tensors: torch.Tensor) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What `as_bytes` gives."""
    return {
        fqn: (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for fqn, tensor in tensors.items()
    }


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol(tmp_path: Path, protocol: int) -> None:
    """Both containers, in every protocol; 0 names storages by text alone, which torch itself does not read."""
    w = torch.arange(6.0).reshape(2, 3)
    for name, is_zip in (("zip.pt", True), ("legacy", False)):
        state = {"w": w, "v": w[1], "n": 2**70}
        torch.save(state, tmp_path / name, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
        assert as_bytes(tmp_path / name) == expected(w=w, v=w[1])


@pytest.mark.parametrize(("protocol", "is_zip"), [(1, False), (2, True), (4, True)])
def test_tensors_of_devices_without_storages(ckpt: Ckpt, tmp_path: Path, protocol: int, *, is_zip: bool) -> None:
    """XLA's tensors stand in the pickle as arrays, bfloat16 as float32: they are tensors like others."""
    w, b = torch.arange(-300, 300).reshape(3, 200), torch.randn(4, 3).bfloat16()
    make = "_rebuild_device_tensor_from_numpy"
    state = {
        "w": Rebuilt(make, w.numpy(), torch.int64, "xla:0", False),
        "f": Rebuilt(make, np.asfortranarray(w.numpy()), torch.int64, "xla:0", False),
        "b": Rebuilt(make, b.float().numpy(), torch.bfloat16, "xla:0", False),
        "plain": torch.ones(2),
    }
    path = tmp_path / "m.pt"
    torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    assert as_bytes(path) == expected(w=w, f=w, b=b, plain=torch.ones(2))
    assert ckpt("verify", path, "--full").status == 0
    assert ckpt("export", path, tmp_path / "out").status == 0
    assert as_bytes(tmp_path / "out") == as_bytes(path)


def test_tensors_of_ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_npu has a function of its own that rebuilds a tensor."""
    module: Any = ModuleType("torch_npu.utils.storage")

    def _rebuild_npu_tensor() -> None: ...

    _rebuild_npu_tensor.__module__, _rebuild_npu_tensor.__qualname__ = module.__name__, "_rebuild_npu_tensor"
    module._rebuild_npu_tensor = _rebuild_npu_tensor
    for name in ("torch_npu", "torch_npu.utils", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    w = torch.arange(6.0)
    saved = Rebuilt("_rebuild_tensor_v2", w.storage(), 2, (2, 2), (2, 1), False, {}, 2)
    saved.call = (_rebuild_npu_tensor, saved.call[1])
    torch.save({"w": saved}, tmp_path / "m.pt")
    assert as_bytes(tmp_path / "m.pt") == expected(w=w[2:].view(2, 2))


def test_attributes_of_tensors(tmp_path: Path) -> None:
    """A scale that hangs on a weight (bitsandbytes' quant_state) is read; attributes without tensors are named."""
    p, q = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.zeros(1))
    p.quant_state = {"absmax": torch.arange(3.0), "blocksize": 64}
    p.itself = p
    q.tag = "x"
    torch.save({"layer": {"p": p, "q": q}}, tmp_path / "m.pt")
    found = as_bytes(tmp_path / "m.pt")
    names = {"layer.p": p, "layer.p.itself": p, "layer.q": q, "layer.p.quant_state.absmax": torch.arange(3.0)}
    assert found == expected(**names)
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        assert checkpoint.objects() == {"layer.p.quant_state.blocksize": 64}
        assert any("attributes of tensors are left out: tag" in note for note in checkpoint.manifest.notes)


def _generator() -> Any:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: deque([1, torch.ones(2)], maxlen=3), {"x.1": torch.ones(2)}),
        (_generator, {"x.state.2": _generator().get_state()}),
        (lambda: torch.arange(3.0).untyped_storage(), {"x": torch.arange(3.0).view(torch.uint8)}),
        (lambda: Rebuilt("_rebuild_meta_tensor_no_storage", torch.float32, (2,), (1,), False), {}),
    ],
)
def test_objects_that_hold_bytes(ckpt: Ckpt, tmp_path: Path, make: Callable[[], Any], names: Any) -> None:
    """Appended items beside arguments, states that are tuples, bare storages: all can be written again."""
    torch.save({"w": torch.ones(1), "x": make()}, tmp_path / "m.pt")
    assert as_bytes(tmp_path / "m.pt") == expected(w=torch.ones(1), **names)
    for out, to in (("out.pt", "torch-save"), ("out", "dcp")):
        assert ckpt("export", tmp_path / "m.pt", tmp_path / out, "--to", to, "--all").status == 0
        assert as_bytes(tmp_path / out) == as_bytes(tmp_path / "m.pt")


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch announces the end of quantized tensors
def test_several_elements_a_byte_and_jagged_tensors(tmp_path: Path) -> None:
    """Packed quantized bytes are kept as they are; a jagged tensor's pickle names a class of torch._dynamo."""
    packed = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.quint4x2)
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    torch.save({"q": packed, "j": jagged}, tmp_path / "m.pt")
    found = as_bytes(tmp_path / "m.pt")
    assert found["q.0"][1] == (8,)
    assert torch.ones(3, 3).numpy().tobytes() in [data for _, _, data in found.values()]


@pytest.mark.parametrize("is_zip", [True, False])
def test_whole_modules(ckpt: Ckpt, tmp_path: Path, *, is_zip: bool) -> None:
    """What ``torch.save(model)`` wrote before 1.6 names each class by a persistent id that holds its source, too."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    saved = {"net": model, "epoch": 3}
    torch.save(saved, tmp_path / "m.pt", _use_new_zipfile_serialization=is_zip)
    assert as_bytes(tmp_path / "m.pt") == expected(**{f"net.{fqn}": value for fqn, value in model.state_dict().items()})
    assert ckpt("verify", tmp_path / "m.pt", "--full").status == 0
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        assert checkpoint.objects() == {"epoch": 3}


def test_tensors_without_data(ckpt: Ckpt, tmp_path: Path) -> None:
    """A meta tensor that was saved is what verify warns of, not a file in which nothing is wrong."""
    state = {"w": torch.ones(2), "gone": torch.empty(3, 4, device="meta")}
    torch.save(state, tmp_path / "m.pt")
    found = ckpt("verify", tmp_path / "m.pt")
    assert (found.status, "'gone': weight data absent: a meta tensor was saved" in found.text) == (0, True)
    assert ckpt("verify", tmp_path / "m.pt", "--strict").status == 1
    done = ckpt("export", tmp_path / "m.pt", tmp_path / "out.safetensors")
    assert "'gone' is a meta tensor [3, 4] without data; it is left out" in done.text
    torch.save({"w": state["w"]}, tmp_path / "whole.pt")
    assert ckpt("verify", tmp_path / "whole.pt", "--strict").status == 0


def test_keys_that_are_no_text(ckpt: Ckpt, tmp_path: Path) -> None:
    """Tuples and other keys become text in names, which is said; text and integers stay what they are."""
    state = {"rng": {(0, 1): torch.ones(2), None: torch.zeros(1)}, "moments": {0: torch.ones(3)}}
    torch.save(state, tmp_path / "m.pt")
    done = ckpt("export", tmp_path / "m.pt", tmp_path / "out.pt", "--all")
    assert "keys that are neither text nor integers are called by their text, in rng" in done.text
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert [type(key) for key in found["rng"]] == [str, str]
    assert found["moments"].keys() == {0}
    torch.save({"moments": state["moments"]}, tmp_path / "plain.pt")
    assert "are called by their text" not in ckpt("inspect", tmp_path / "plain.pt").text


@pytest.mark.parametrize("state", [[1.0, 2.0], {0: 1.0, 1: 2.0}, [{"w": 1.0}, [2.0, 3.0]]], ids=str)
def test_a_list_at_the_top(ckpt: Ckpt, tmp_path: Path, state: Any) -> None:
    """A list of tensors comes back as one, and a dict by number as that."""

    def tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: tensors(item) for key, item in value.items()}
        return [tensors(item) for item in value] if isinstance(value, list) else torch.tensor([value])

    torch.save(tensors(state), tmp_path / "m.pt")
    assert ckpt("export", tmp_path / "m.pt", tmp_path / "out.pt").status == 0
    assert torch.load(tmp_path / "out.pt", weights_only=True) == tensors(state)
