"""Saving in one process: what needs no other rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tool
from ckpt_tool.api.job.saver import Saver
from ckpt_tool.engine.save.log import OperationLog
from ckpt_tool.errors import LayoutError, TargetExists, UnsafePickle, Unsupported, UsageError
from tests.frameworks.wrappers import Held, Sharded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def saver() -> Iterator[Saver]:
    """One saver for all tests, as a job has one."""
    made = Saver()
    yield made
    made.close()


def save(saver: Saver, state: Any, url: Path, **changes: Any) -> Any:
    """`ckpt_tool.save` with a saver of its own."""
    options: dict[str, Any] = {
        "async_": True, "format": "dcp", "extra_state": None, "on_resize": "keep", "step": None, "overwrite": True,
        "durable": True, "digests": None, "overlap_staging": False, "timeout_s": 60.0,
    }  # fmt: skip
    return saver.save(state, url, **{**options, **changes})


def loaded(url: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as torch loads them."""
    state = {name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in like.items()}
    dcp.load(state, checkpoint_id=url, no_dist=True)
    return state


def test_orders_of_memory(saver: Saver, tmp_path: Path) -> None:
    """Permuted, sliced, expanded, conjugated and large tensors are saved as their values, whatever their strides."""
    whole = torch.arange(24 * 36, dtype=torch.float32).reshape(24, 36)
    state = {
        "transposed": whole.t(),
        "permuted": whole.reshape(4, 6, 36).permute(2, 0, 1),
        "sliced": whole[::3, 5:20],
        "expanded": torch.arange(5.0).expand(3, 5),
        "conjugated": torch.complex(whole, whole + 1).conj(),
        "large": torch.randn(3000, 1500).t(),
        "parameter": torch.nn.Parameter(torch.randn(3, 4)),
    }
    save(saver, state, tmp_path / "a").wait()
    found = loaded(tmp_path / "a", state)
    assert [name for name, tensor in state.items() if not torch.equal(tensor.detach(), found[name])] == []
    save(saver, state, tmp_path / "b").wait()  # staged by what is known of the first
    found = loaded(tmp_path / "b", state)
    assert [name for name, tensor in state.items() if not torch.equal(tensor.detach(), found[name])] == []


def test_changes_after_the_call(saver: Saver, tmp_path: Path) -> None:
    """What is saved is what was there when `save` returned, or with overlapped staging when `wait_staged` did."""
    for overlap in (False, True):
        state = {"w": torch.ones(2_000_000)}
        handle = save(saver, state, tmp_path / "s", overlap_staging=overlap)
        handle.wait_staged()
        state["w"].zero_()
        handle.wait()
        assert loaded(tmp_path / "s", state)["w"].sum() == 2_000_000


def test_saves_from_several_threads(saver: Saver, tmp_path: Path) -> None:
    """Each is what its thread saved, and each thread hears how its own ended."""

    def work(number: int) -> int:
        return int(save(saver, {"w": torch.full((1000,), float(number))}, tmp_path / str(number)).wait(30).nbytes)

    with ThreadPoolExecutor(6) as pool:
        assert min(pool.map(work, range(12))) > 4000
    like = {"w": torch.zeros(1000)}
    assert [int(loaded(tmp_path / str(number), like)["w"][0]) for number in range(12)] == list(range(12))


def test_a_thread_that_waits_keeps_nobody(saver: Saver, tmp_path: Path) -> None:
    """While one waits for a save another begins the next one, and both may ask for one handle."""
    handle = save(saver, {"w": torch.ones(4_000_000)}, tmp_path / "a")
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(handle.wait, 60) for _ in range(2)]
        others = [save(saver, {"w": torch.ones(4_000_000)}, tmp_path / str(number)) for number in range(3)]
        assert len({each.result() for each in waiting}) == 1
    assert [other.wait(60).payload_nbytes for other in others] == [16_000_000] * 3


def test_the_structure_may_change(saver: Saver, tmp_path: Path) -> None:
    """States that differ in names, shapes, strides or types of the one before are planned anew."""
    states: list[dict[str, torch.Tensor]] = [
        {"w": torch.randn(4, 6)},
        {"w": torch.randn(6, 4).t()},
        {"w": torch.randn(4, 6).double()},
        {"w": torch.randn(6, 4)},
        {"w": torch.randn(4, 6), "b": torch.randn(3)},
        {"v": torch.randn(4, 6)},
        {"w": torch.randn(4, 6)},
    ]
    for number, state in enumerate(states):
        save(saver, state, tmp_path / str(number)).wait()
    for number, state in enumerate(states):
        found = loaded(tmp_path / str(number), state)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_values_of_every_save(saver: Saver, tmp_path: Path) -> None:
    """Values that are no tensors are those of their save, in whatever length."""
    for number in range(3):
        state = {"w": torch.ones(3), "step": number, "text": "x" * 1000 * number, "on": number == 1, "zero": -0.0}
        save(saver, state, tmp_path / str(number), async_=False)
    for number in range(3):
        found: dict[str, Any] = {"w": torch.zeros(3), "step": 9, "text": "", "on": None, "zero": 1.0}
        dcp.load(found, checkpoint_id=tmp_path / str(number), no_dist=True)
        assert (found["step"], len(found["text"]), found["on"]) == (number, 1000 * number, number == 1)
        assert str(found["zero"]) == "-0.0"


def test_modules_and_optimizers(saver: Saver, tmp_path: Path) -> None:
    """Modules and optimizers stand for their state dicts; integer keys become text, as DCP has them."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    save(saver, {"model": model, "optim": optimizer}, tmp_path / "m").wait()
    state = {"model": torch.nn.Linear(3, 2).state_dict(), "optim": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "m", no_dist=True)
    assert torch.equal(state["model"]["weight"], model.weight)
    assert "optim.state.0.momentum_buffer" in ckpt_tool.open(tmp_path / "m").manifest.tensors.fqns


def test_the_log(saver: Saver, tmp_path: Path) -> None:
    """Operations of the rank and of its writer process are in the log, as columns, in Arrow and JSON."""
    result = save(saver, {"w": torch.ones(1000)}, tmp_path / "s", step=17).wait()
    names = [each.operation for each in result.operations]
    assert [name for name in ("walk", "stage", "write", "commit") if name not in names] == []
    assert {each.step for each in result.operations} == {17}
    written = next(each for each in result.operations if each.operation == "write")
    assert (written.nbytes, result.payload_nbytes) == (4000, 4000)
    assert result.nbytes == sum(os.path.getsize(tmp_path / "s" / name) for name in os.listdir(tmp_path / "s"))
    log = OperationLog(result.operations)
    log.write(tmp_path / "log.arrow")
    with pa.memory_map(str(tmp_path / "log.arrow")) as source:
        assert pa.ipc.open_file(source).read_all().to_pydict() == log.columns()
    assert set(result.operations) <= set(saver.log.operations)


def test_refused(saver: Saver, tmp_path: Path) -> None:
    """What cannot be saved is refused in the call, and the next save works."""
    (tmp_path / "file").write_text("")
    save(saver, {"w": torch.ones(2)}, tmp_path / "good").wait()
    with pytest.raises(UsageError, match="expected a state dict"):
        save(saver, torch.ones(2), tmp_path / "a")
    with pytest.raises(UsageError, match="two entries of the state have this name"):
        save(saver, {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, tmp_path / "a")
    with pytest.raises(UsageError, match="on_resize must be one of"):
        save(saver, {"w": torch.ones(2)}, tmp_path / "a", extra_state={"x": 1}, on_resize="some")
    with pytest.raises(Unsupported, match="npz cannot be written by ranks together"):
        save(saver, {"w": torch.ones(2)}, tmp_path / "a", format="npz").wait()
    with pytest.raises(TargetExists, match="is a file"):
        save(saver, {"w": torch.ones(2)}, tmp_path / "file").wait()
    with pytest.raises(TargetExists, match="is there already"):
        save(saver, {"w": torch.ones(2)}, tmp_path / "good", overwrite=False).wait()
    save(saver, {"w": torch.ones(2)}, tmp_path / "good").wait()
    assert sorted(os.listdir(tmp_path)) == ["file", "good", "good.digests.json"]


def test_digests_may_be_left_out(saver: Saver, tmp_path: Path) -> None:
    """A manifest of what was there before does not stay beside what replaces it."""
    save(saver, {"w": torch.ones(2)}, tmp_path / "s").wait()
    assert sorted(os.listdir(tmp_path)) == ["s", "s.digests.json"]
    save(saver, {"w": torch.zeros(2)}, tmp_path / "s", digests=False).wait()
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize("format_name", ["safetensors", "bytecheckpoint"])
def test_a_format_of_each_save(saver: Saver, tmp_path: Path, format_name: str) -> None:
    """Saves of one state may be of different formats, one after another."""
    whole = torch.randn(3, 4)
    state = {"model": {"w": whole}, "step": 5}
    for number, name in enumerate(("dcp", format_name, "dcp", format_name)):
        save(saver, state, tmp_path / str(number), format=name).wait()
        found: dict[str, Any] = {"model": {"w": torch.zeros(3, 4)}, "step": 0}
        ckpt_tool.load(found, tmp_path / str(number))
        assert torch.equal(found["model"]["w"], whole)
        assert found["step"] == 5


def test_what_a_format_cannot_hold(saver: Saver, tmp_path: Path) -> None:
    """Refused in the call, with the entry."""
    with pytest.raises(UsageError, match="two entries of the state would have one place"):
        save(saver, {"step": 1, "extra_state": {"step": 2}}, tmp_path / "a", format="bytecheckpoint")
    with pytest.raises(LayoutError, match="one of Megatron's ShardedTensors"):
        save(saver, {"w": torch.ones(2)}, tmp_path / "a", format="megatron").wait()


def test_a_failure_nobody_waited_for(saver: Saver, tmp_path: Path) -> None:
    """The next save warns of it, once."""
    (tmp_path / "file").write_text("")
    handle = save(saver, {"w": torch.ones(2)}, tmp_path / "file")
    while not handle.done():
        pass
    with pytest.warns(RuntimeWarning, match="file failed: .*is a file"):
        save(saver, {"w": torch.ones(2)}, tmp_path / "a").wait()
    save(saver, {"w": torch.ones(2)}, tmp_path / "a").wait()


@pytest.mark.parametrize(
    ("policy", "rank", "size", "expected"),
    [
        ("keep", 0, 1, {"n": 3}), ("keep", 0, 2, {"n": 3}), ("keep", 1, 2, {}), ("drop", 0, 1, {"n": 3}),
        ("drop", 0, 2, {}), ("rank0", 1, 2, {"n": 3}),
    ],
)  # fmt: skip
def test_extra_state_in_another_world(
    saver: Saver, tmp_path: Path, policy: str, rank: int, size: int, expected: dict[str, int]
) -> None:
    """With as many ranks each gets its own; otherwise what the save said."""
    save(saver, {"w": torch.ones(2)}, tmp_path / "s", extra_state={"n": 3}, on_resize=policy).wait()
    assert ckpt_tool.load_extra_state(tmp_path / "s", rank, size) == expected


def test_extra_state_beside_megatrons_state(saver: Saver, tmp_path: Path) -> None:
    """Each object is a ShardedObject in one dimension, ranks, whatever it is called."""
    whole = torch.randn(4, 6)
    state = {"w": Sharded("decoder.w", whole, (4, 6), (0, 0)), "iteration": 3, "path": Path("/a")}
    states = [{"torch": torch.get_rng_state(), "numpy": np.random.default_rng(7).bit_generator.state["state"]}]
    states[0]["array"] = np.arange(5, dtype=np.uint32)
    extra = {"rng": states, "a/b%2F": [1], "world": {"x": None}}
    save(saver, state, tmp_path / "s", format="megatron", extra_state=extra).wait()
    assert str(ckpt_tool.load_extra_state(tmp_path / "s", 0, 1)) == str(extra)
    assert ckpt_tool.load_extra_state(tmp_path / "s", 1, 2) == {}
    asked: dict[str, Any] = {
        "w": Sharded("decoder.w", torch.zeros(4, 6), (4, 6), (0, 0)), "iteration": 0, "path": None,
        "rng": Held("extra_state.rng", None, (1,), (0,)), "name": Held("extra_state.a%2Fb%252F", None, (1,), (0,)),
    }  # fmt: skip
    report = ckpt_tool.load(asked, tmp_path / "s")
    assert (asked["iteration"], asked["name"], report.missing) == (3, [1], ("path",))
    assert torch.equal(asked["w"], whole)
    assert str(asked["rng"]) == str(states)


def test_extra_state_of_any_class(saver: Saver, tmp_path: Path) -> None:
    """Objects of other classes come back where the caller trusts them, and are refused otherwise."""
    save(saver, {"w": torch.ones(2)}, tmp_path / "s", extra_state={"path": Path("/a"), "n": 1}).wait()
    with pytest.raises(UnsafePickle, match="path: holds objects"):
        ckpt_tool.load_extra_state(tmp_path / "s", 0, 1)
    assert ckpt_tool.load_extra_state(tmp_path / "s", 0, 1, trusted=True) == {"path": Path("/a"), "n": 1}


_FORKING = """
import atexit, os, sys, torch, ckpt_tool
first = ckpt_tool.save({"w": torch.ones(4_000_000)}, sys.argv[1] + "/first")
if not (child := os.fork()):
    atexit._run_exitfuncs()  # as a copy that ends on its own does; those of multiprocessing do not
    os._exit(0)
os.waitpid(child, 0)
first.wait(60)
if not (child := os.fork()):
    ckpt_tool.save({"w": torch.ones(3)}, sys.argv[1] + "/child").wait(60)
    ckpt_tool.api.job.saver._close_all()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
ckpt_tool.save({"w": torch.ones(3)}, sys.argv[1] + "/second").wait(60)
"""


def test_copies_of_the_process(tmp_path: Path) -> None:
    """A copy that ends takes no answer of the writer that the first process waits for, and has savers of its own."""
    command = [sys.executable, "-W", "ignore", "-c", _FORKING, str(tmp_path)]
    done = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("first", "child", "second"):
        assert ckpt_tool.verify(tmp_path / name, level="full").is_ok


def test_the_writer_process_has_no_torch() -> None:
    """It starts in a fraction of a second, and holds none of torch's memory."""
    code = "import sys, ckpt_tool.engine.save.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
