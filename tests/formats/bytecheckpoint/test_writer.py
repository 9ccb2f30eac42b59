"""ByteCheckpoint written: its own classes read the metadata, torch rebuilds each shell, and our reader every bit."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.dtypes import dtype
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats.base import WriteRequest
from ckpt_tool.formats.bytecheckpoint.keys import key_of, with_names
from ckpt_tool.formats.bytecheckpoint.location import MODULE
from ckpt_tool.formats.bytecheckpoint.reader import READER
from ckpt_tool.formats.bytecheckpoint.writer import WRITER
from ckpt_tool.manifest.model import Blob, TensorMeta
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.storage.open import open_store
from tests.formats.bytecheckpoint.real import FAMILY, case
from tests.formats.conformance import all_rows, assemble, source_of
from tests.formats.dcp.written import boxes_of


@dataclass
class _StorageInfo:
    """As ``meta_type.py`` of bytecheckpoint 0.0.2 has it."""

    relative_path: str
    offset: int
    length: int


@dataclass
class Metadata:
    """As ``meta_type.py`` of bytecheckpoint 0.0.2 has it."""

    state_dict_metadata: dict[str, Any]
    planner_data: Any = None
    storage_data: dict[Any, _StorageInfo] | None = None
    all_tensor_metadata: dict[Any, bytes | None] | None = None
    bytecheckpoint_version: str | None = None
    user_defined_dict: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules that the pickle names."""
    for depth in range(1, MODULE.count(".") + 2):
        name = ".".join(MODULE.split(".")[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = sys.modules[MODULE]
    for cls in (_StorageInfo, Metadata):
        monkeypatch.setattr(cls, "__module__", MODULE)
        monkeypatch.setattr(module, cls.__name__, cls, raising=False)


class Shells(pickle.Unpickler):
    """``_deserialize_tensor``: a shell over the bytes of its storage."""

    data: bytes

    def persistent_load(self, pid: Any) -> Any:
        """The storage, typed."""
        _, kind, _, _, _ = pid
        raw = torch.UntypedStorage.from_buffer(bytearray(self.data), dtype=torch.uint8)
        return torch.storage.TypedStorage(wrap_storage=raw, dtype=kind.dtype, _internal=True)

    def find_class(self, module: str, name: str) -> Any:
        """Storage classes become their dtypes."""
        return torch.serialization.StorageType(name) if name.endswith("Storage") else super().find_class(module, name)


def loaded(section: Path) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Key, offsets and tensor (or object) of each item, as the library loads them."""
    metadata = pickle.loads((section / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        data = (section / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        shell = metadata.all_tensor_metadata[index]
        if shell is None:
            yield index.fqn, (), torch.load(io.BytesIO(data), weights_only=True)
        else:
            unpickler = Shells(io.BytesIO(shell))
            unpickler.data = data
            yield index.fqn, tuple(index.offset), unpickler.load()


OPTIONS: dict[str, Any] = {"to": "bytecheckpoint", "default": "replicate", "rank_state": "drop", "durable": False}


@pytest.mark.parametrize("mesh", [{}, {"dp": 3}, {"tp": 2, "dp": 2}], ids=["one", "dp3", "tp2dp2"])
@pytest.mark.parametrize("name", ["fsdp_dec_4r", "hsdp_4r", "ddp_2r"])
def test_other_layouts_keep_every_bit(name: str, mesh: dict[str, Any], tmp_path: Path) -> None:
    """Written for other ranks, every tensor of the truth reads the same; the tracker names the step."""
    reshard(FAMILY / name / "ckpt", tmp_path / "there", **OPTIONS, **mesh)
    store, listing = open_store(tmp_path / "there")
    assert (tmp_path / "there/latest_checkpointed_iteration.txt").read_text() == "2"
    source = source_of(store)
    manifest = READER.read(source)
    chunks = READER.resolve(source, manifest, all_rows(manifest))
    truth = case(FAMILY / name).truth()
    assert {fqn: assemble(store, manifest, chunks, fqn) for fqn in truth} == dict(truth)
    assert [finding.message for finding in READER.check(source, manifest)] == []
    assert manifest.info["world_size"] == int(np.prod([*mesh.values()]))
    assert f"global_step_2/model/__{manifest.info['world_size'] - 1}_0.distcp" in listing


@pytest.mark.usefixtures("classes")
def test_the_library_s_classes_read_it(tmp_path: Path) -> None:
    """Metadata unpickles into the library's classes; shells over their bytes are the boxes; groups are one object."""
    reshard(FAMILY / "ddp_2r/ckpt", tmp_path / "there", **OPTIONS, dp=3)
    truth = case(FAMILY / "ddp_2r").truth()
    for section in ("model", "optimizer"):
        for key, offsets, found in loaded(tmp_path / "there/global_step_2" / section):
            if key == "param_groups":
                assert found[0]["params"] == list(range(20))
                continue
            whole = truth[f"{section}.{key}"]
            expected = torch.frombuffer(bytearray(whole.data), dtype=torch.float32).reshape(whole.shape)
            box = tuple(slice(start, start + size) for start, size in zip(offsets, found.shape, strict=True))
            assert torch.equal(found, expected[box])
    extra = torch.load(tmp_path / "there/global_step_2/extra_state/extra_state_rank_2.pt", weights_only=True)
    assert extra == {"sampler": {"epoch": 1}}


def test_extra_state_stays_with_its_rank(tmp_path: Path) -> None:
    """As many ranks as before get their random states and counters back."""
    reshard(FAMILY / "ddp_2r/ckpt", tmp_path / "there", **{**OPTIONS, "rank_state": "keep"}, dp=2)
    for rank in range(2):
        name = f"global_step_2/extra_state/extra_state_rank_{rank}.pt"
        there = torch.load(tmp_path / "there" / name, weights_only=True)
        here = torch.load(FAMILY / "ddp_2r/ckpt" / name, weights_only=False)
        assert there.keys() == here.keys()
        assert torch.equal(there.pop("torch_rng_state"), here.pop("torch_rng_state"))
        assert there == here


@pytest.mark.usefixtures("classes")
def test_groups_of_decomposed_checkpoints_get_names(tmp_path: Path) -> None:
    """Numbers beside named state, which the library cannot load, become names; the result says so."""
    result = reshard(FAMILY / "fsdp_dec_4r/ckpt", tmp_path / "there", **OPTIONS)
    assert any("load this one as FSDP" in note for note in result.notes)
    items = {key: found for key, _, found in loaded(tmp_path / "there/global_step_2/optimizer")}
    assert sorted(items["param_groups"][0]["params"]) == sorted(
        key.removeprefix("state.").removesuffix(".exp_avg") for key in items if key.endswith(".exp_avg")
    )


def test_groups_that_keep_their_numbers() -> None:
    """Several groups, numbers of numbered state, and names stay as they are."""
    named = [key_of("optimizer", ("optimizer", "state", "w", "exp_avg"))]
    numbered = [key_of("optimizer", ("optimizer", "state", 0, "exp_avg"))]
    assert with_names([{"params": [0]}], named) == [{"params": ["w"]}]
    for groups, keys in (
        ([{"params": [0]}, {"params": []}], named),
        ([{"params": [0, 1]}], named),
        ([{"params": ["w"]}], named),
        ([{"params": [0]}], numbered),
        ([{"lr": 1}], named),
        ({"params": [0]}, named),
    ):
        assert with_names(groups, keys) is None


def request(*metas: TensorMeta, boxes: list[tuple[int, Any, Any, int]], blobs: tuple[Blob, ...] = ()) -> WriteRequest:
    """A request of two ranks."""
    tensors = TensorTable.from_records(metas)
    return WriteRequest(tensors, boxes_of(tensors, boxes), 2, blobs=blobs)


W = TensorMeta("model.w", dtype("int32"), (4, 2), "model", ("model", "w"))
RNG = TensorMeta("rng@rank1", dtype("uint8"), (8,), "other", ("rng@rank1",))
PART = TensorMeta("table", dtype("uint8"), (8,), "other", ("table",))


def test_a_layout_without_a_step() -> None:
    """Without a step the folder itself is the step's, and the model's metadata makes it one; empty files stand in."""
    layout = WRITER.lay_out(request(W, RNG, boxes=[(0, (0, 0), (4, 2), 0), (1, (0,), (8,), 0)]))
    assert layout.commit_path == "model/.metadata"
    assert [(entry.path, entry.nbytes) for entry in layout.manifest.files][:2] == [
        ("model/__0_0.distcp", 32),
        ("model/__1_0.distcp", 0),
    ]
    assert layout.manifest.files.paths[2:] == (
        "model/.metadata", "extra_state/extra_state_rank_0.pt", "extra_state/extra_state_rank_1.pt",
    )  # fmt: skip
    assert layout.manifest.chunks.file.tolist() == [0, 4]
    assert layout.needs_crc32


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        (request(W, boxes=[(0, (0, 0), (4, 2), 2)]), LayoutError, "a box is of rank 2, the target has 2"),
        (request(W, boxes=[]), LayoutError, "no box of the tensor is to be stored"),
        (
            request(W, boxes=[(0, (0, 0), (4, 2), 0), (0, (0, 0), (4, 2), 1)]),
            LayoutError,
            r"two boxes begin at \[0, 0\]",
        ),
        (request(PART, boxes=[(0, (0,), (4,), 0)]), Unsupported, "extra state of ByteCheckpoint is whole"),
        (
            request(TensorMeta("r@rank5", dtype("uint8"), (1,), "other", ("r@rank5",)), boxes=[(0, (0,), (1,), 0)]),
            LayoutError,
            "state of rank 5, the target has 2 ranks",
        ),
    ],
)
def test_what_does_not_fit_is_refused(asked: WriteRequest, kind: type[Exception], message: str) -> None:
    """One error each, before anything is written."""
    with pytest.raises(kind, match=message):
        WRITER.lay_out(asked)
