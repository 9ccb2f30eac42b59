"""Files that contradict themselves, or ask for what no checkpoint needs: errors of this package, and no effort."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from ckpt_tool.errors import CkptError, FormatError, LayoutError, NotFound, UnsafePickle
from ckpt_tool.formats.megatron.dist_reader import READER as DIST
from ckpt_tool.formats.megatron.rank_reader import READER as RANKS
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import all_rows, source_of
from tests.formats.megatron.build import (
    GROUP,
    DistWriter,
    add_buckets,
    add_weights,
    common_state,
    legacy_files,
    saved,
)
from tests.formats.megatron.run import SLOTS, Run

MODEL = "mp_rank_00/model_optim_rng.pt"
OPTIMIZER = "mp_rank_00/distrib_optim.pt"


class Dangerous:
    """A pickle of it asks for ``os.system``."""

    def __reduce__(self) -> Any:
        """What is pickled."""
        import os

        return os.system, ("true",)


def loaded(data: bytes) -> Any:
    """The object in a torch file that this test wrote."""
    return torch.load(io.BytesIO(data), weights_only=False)


def read_dist(**changes: Any) -> None:
    """Read and resolve a bucketed checkpoint whose arguments are changed."""
    run = Run(dp=2, n_experts=4)
    writer = DistWriter(run)
    add_weights(writer)
    add_buckets(writer)
    writer.add_object("common_state/shard_0_1", common_state(run, **changes))
    source = source_of(MemoryStore(writer.files()))
    manifest = DIST.read(source)
    DIST.resolve(source, manifest, all_rows(manifest))


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
def test_dangerous_pickles_are_refused(name: str) -> None:
    """A rank's file that asks for ``os.system`` is named, with the byte; nothing runs."""
    files = legacy_files(Run())
    root = loaded(files[name])
    root["danger"] = Dangerous()
    files[name] = saved(root)
    with pytest.raises(UnsafePickle) as caught:
        RANKS.read(source_of(MemoryStore(files)))
    assert str(caught.value.where).startswith(name)


def test_dangerous_common_state_is_refused() -> None:
    """An object of a distributed checkpoint likewise."""
    with pytest.raises(UnsafePickle, match="system"):
        read_dist(more=Dangerous())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 10**15},
        {"expert_model_parallel_size": 10**15},
        {"tensor_model_parallel_size": 10**15},
        {"tensor_model_parallel_size": -1},
        {"tensor_model_parallel_size": 10**400},
        {"pipeline_model_parallel_size": 0},
        {"pipeline_model_parallel_size": 10**15},
        {"virtual_pipeline_model_parallel_size": 10**15},
        {"world_size": 0},
        {"tensor_model_parallel_size": "two"},
        {"expert_tensor_parallel_size": 3},
    ],
    ids=str,
)
def test_absurd_arguments_cost_nothing(changes: dict[str, Any]) -> None:
    """Arguments that contradict the tensors leave buckets as they are, or are an error; neither time nor memory."""
    try:
        read_dist(**changes)
    except CkptError as error:
        assert error.message  # noqa: PT017 - whether it raises depends on the argument


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda state: state.pop("buckets_coalesced"), FormatError, "buckets_coalesced"),
        (lambda state: state[0][GROUP].update(numel_unpadded=3), FormatError, "tensors of other sizes than 3"),
        (lambda state: state[0][GROUP].update(numel_unpadded="many"), FormatError, "tensors of other sizes than many"),
        (lambda state: state[0][GROUP].update(param=torch.zeros(2, 3)), FormatError, "tensors of other sizes"),
        (lambda state: [state[0][GROUP].pop(slot) for slot in SLOTS], FormatError, "tensors of other sizes"),
    ],
    ids=["old-layout", "wrong-count", "count-of-words", "two-dimensional", "empty"],
)
def test_damaged_optimizer_files_are_refused(change: Any, error: type[CkptError], message: str) -> None:
    """``distrib_optim.pt`` that contradicts itself is an error that names the file."""
    files = legacy_files(Run())
    state = loaded(files[OPTIMIZER])
    change(state)
    with pytest.raises(error, match=message) as caught:
        RANKS.read(source_of(MemoryStore({**files, OPTIMIZER: saved(state)})))
    assert caught.value.where == OPTIMIZER


def test_buffer_of_another_model_is_left_as_it_lies() -> None:
    """State whose size does not fit the weights is kept under its own keys, and the numbers are named."""
    files = legacy_files(Run())
    other = legacy_files(Run(layers=(((0, 1, 2),),)))
    source = source_of(MemoryStore({**files, OPTIMIZER: other[OPTIMIZER]}))
    manifest = RANKS.read(source)
    assert "no split into buckets gives the 2,784 elements" in manifest.info["optimizer_undecoded"]
    kept = [fqn for fqn in manifest.tensors.fqns if fqn.startswith("optimizer.0.")]
    assert [fqn.rpartition(".")[2] for fqn in kept] == [f"{slot}@rank0" for slot in SLOTS]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda root: root.pop("model"), FormatError, "no model among the keys"),
        (lambda root: root.update(model=[1]), FormatError, "no model among the keys"),
        (lambda root: root.update(model={1: torch.ones(2)}), FormatError, "no model among the keys"),
        (
            lambda root: root["model"].update({"decoder.layers.7.mlp.linear_fc2.weight": torch.ones(8, 20)}),
            FormatError,
            "expected them numbered from 0 on",
        ),
        (
            lambda root: setattr(root["args"], "pipeline_model_parallel_size", 10**12),
            NotFound,
            "999,999,999,999 of 1,000,000,000,000 rank folders are missing",
        ),
    ],
    ids=["no-model", "list", "number", "gap-in-layers", "absurd-grid"],
)
def test_damaged_model_files_are_refused(change: Any, error: type[CkptError], message: str) -> None:
    """Model files that contradict themselves, or the grid of folders, are errors."""
    files = legacy_files(Run())
    root = loaded(files[MODEL])
    change(root)
    with pytest.raises(error, match=message):
        RANKS.read(source_of(MemoryStore({**files, MODEL: saved(root)})))


def test_ranks_of_different_shape_are_refused() -> None:
    """A rank whose part is wider than the others' does not fit the global weight."""
    files = legacy_files(Run(tp=2))
    path = "mp_rank_01/model_optim_rng.pt"
    root = loaded(files[path])
    root["model"]["output_layer.weight"] = torch.ones(9, 8)
    with pytest.raises((FormatError, LayoutError), match=r"\[18, 8\]"):
        RANKS.read(source_of(MemoryStore({**files, path: saved(root)})))


def test_cut_file_is_named() -> None:
    """A file that was cut is told as such, with the storages that could be salvaged."""
    files = legacy_files(Run())
    with pytest.raises(FormatError, match="truncated"):
        RANKS.read(source_of(MemoryStore({**files, MODEL: files[MODEL][: len(files[MODEL]) // 2]})))
