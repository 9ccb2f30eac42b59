"""Files that lie, or are of other kinds than their names: an error of this package with a place, never a guess."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from ckpt_tool.errors import CkptError, FormatError, NotFound, UnsafePickle, Unsupported
from ckpt_tool.formats.deepspeed.locate import single_file_text
from ckpt_tool.formats.deepspeed.names import tag_files, tags_below
from ckpt_tool.formats.deepspeed.reader import READER
from ckpt_tool.formats.deepspeed.universal import READER as UNIVERSAL
from ckpt_tool.formats.detect import detect
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import Listing
from tests.formats.conformance import FIXTURES, Truth, all_rows, assemble, source_of, stored_bytes
from tests.formats.deepspeed.made import FOLDER, model_state, numbered, saved, stage2, stage3, with_latest

WEIGHTS = {"a": numbered(5, 3), "b": numbered(7, start=100)}
GROUPS = (("a", "b"),)
MODEL = f"{FOLDER}mp_rank_00_model_states.pt"
OPTIM = f"{FOLDER}zero_pp_rank_0_mp_rank_00_optim_states.pt"
Z3_MODEL = f"{FOLDER}zero_pp_rank_0_mp_rank_00_model_states.pt"
Change = Callable[[dict[str, Any]], None]


def read(files: Mapping[str, bytes]) -> Any:
    """The manifest of ``files``."""
    return READER.read(source_of(MemoryStore(with_latest(files))))


def changed(files: Mapping[str, bytes], path: str, change: Change) -> dict[str, bytes]:
    """``files`` with one saved object changed."""
    value = torch.load(io.BytesIO(files[path]), weights_only=True)
    change(value)
    return {**files, path: saved(value)}


def setting(*keys: str, value: Any) -> Change:
    """Sets one entry of nested dicts."""

    def change(root: dict[str, Any]) -> None:
        for key in keys[:-1]:
            root = root[key]
        root[keys[-1]] = value

    return change


STATE = "optimizer_state_dict"


@pytest.mark.parametrize(
    ("path", "change", "match"),
    [
        (MODEL, setting("param_shapes", value=[{"a": "x"}]), "param_shapes of 'a': expected a shape"),
        (MODEL, setting("param_shapes", value=[{"a": torch.Size([1 << 40, 1 << 40])}]), "expected a shape"),
        (MODEL, setting("param_shapes", value=[{"a": torch.Size([5, 3])}]), "partitions hold"),
        (MODEL, setting("param_shapes", value=[{"a": torch.Size([3, 5]), "b": torch.Size([7])}]), "has shape"),
        (MODEL, setting("buffer_names", value=7), "buffer_names: expected a list"),
        (MODEL, setting("shared_params", value=[1]), "shared_params: expected a dict"),
        (MODEL, setting("dp_world_size", value=1 << 23), "8,388,608 x 1 rank wrote it"),
        (OPTIM, setting(STATE, value=None), "optimizer_state_dict: expected a dict"),
        (OPTIM, setting(STATE, "partition_count", value=["x"]), "partition_count: expected a list of numbers"),
        (OPTIM, setting(STATE, "partition_count", value=[5]), "holds one of 5 partitions"),
        (OPTIM, setting(STATE, "param_alignment_paddings", value=3), "param_alignment_paddings: expected a list"),
        (OPTIM, setting(STATE, "single_partition_of_fp32_groups", value=[1]), "expected a list of flat tensors"),
        (
            OPTIM,
            setting(STATE, "single_partition_of_fp32_groups", value=[torch.zeros(3, 4)]),
            "expected a list of flat tensors",
        ),
        (OPTIM, setting(STATE, "single_partition_of_fp32_groups", value=[torch.zeros(3)]), "partitions hold"),
        (OPTIM, setting(STATE, "base_optimizer_state", value=7), "base_optimizer_state: expected a dict"),
        (OPTIM, setting(STATE, "base_optimizer_state", "state", value=[1]), "state: expected a dict"),
    ],
)
def test_wrong_fields(path: str, change: Change, match: str) -> None:
    """Fields of other types or sizes than DeepSpeed writes: the message names file, field and what was expected."""
    files = changed(stage2(WEIGHTS, GROUPS), path, change)
    with pytest.raises(CkptError, match=match) as error:
        read(files)
    assert (error.value.where or "").startswith(FOLDER)


def test_a_state_of_unknown_form_is_left_out() -> None:
    """A factored moment is neither flat nor one value: it is named, and the others are read."""

    def factor(root: dict[str, Any]) -> None:
        root[STATE]["base_optimizer_state"]["state"][0]["exp_avg_sq_row"] = torch.zeros(5)

    manifest = read(changed(stage2(WEIGHTS, GROUPS), OPTIM, factor))
    assert manifest.info["states_left_out"] == ["exp_avg_sq_row"]
    assert "optimizer.state.a.exp_avg" in manifest.tensors.index


def test_states_of_different_dtypes() -> None:
    """Ranks that disagree on a dtype contradict each other."""

    def halve(root: dict[str, Any]) -> None:
        states = root[STATE]["base_optimizer_state"]["state"][0]
        states["exp_avg"] = states["exp_avg"].half()

    with pytest.raises(FormatError, match="'exp_avg' is float32, of another rank float16"):
        read(changed(stage2(WEIGHTS, GROUPS), OPTIM, halve))


class Evil:
    """Asks for a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo unsafe",)


@pytest.mark.parametrize("path", [MODEL, OPTIM])
def test_code_is_refused(path: str) -> None:
    """A pickle that would run something is refused, whatever file it is in."""
    with pytest.raises(UnsafePickle, match="system"):
        read({**stage2(WEIGHTS, GROUPS), path: saved({"module": Evil(), STATE: Evil()})})


def test_patterns_from_files_cannot_hang() -> None:
    """A rule that could match for ever is refused before it matches anything."""
    info = {"tp_replicated_parameter_patterns": ["(a+)+$"]}
    files = stage2(WEIGHTS, GROUPS, mp_world_size=2, universal_checkpoint_info=info)
    with pytest.raises(Unsupported, match="unbounded time"):
        read({**files, **stage2(WEIGHTS, GROUPS, mp=1, mp_world_size=2)})


@pytest.mark.parametrize("tag", ["..", "../other", "/etc", "a/b", "", "x\ny", "\udcff", "t" * 2000])
def test_trackers_name_a_folder_here(tag: str) -> None:
    """A tracker that leaves the checkpoint, or names none, is refused."""
    files = {**stage2(WEIGHTS, GROUPS), "latest": tag.encode("utf-8", "surrogateescape")}
    with pytest.raises(FormatError, match="expected the name of a folder"):
        READER.read(source_of(MemoryStore(files)))


def test_a_tracker_of_another_step() -> None:
    """The step that it names was not copied: the hint is one that was."""
    files = {**stage2(WEIGHTS, GROUPS), "latest": b"global_step9"}
    source = source_of(MemoryStore(files))
    assert detect(source) is READER
    with pytest.raises(NotFound, match="names 'global_step9', and there is no such folder here") as error:
        READER.read(source)
    assert error.value.hint == 'give the folder of a step: "memory:/global_step7"'


def test_no_model_states() -> None:
    """Without them nothing names the parameters; the missing file is named."""
    files = {path: data for path, data in stage2(WEIGHTS, GROUPS).items() if path != MODEL}
    with pytest.raises(NotFound, match=f"missing files: {MODEL}"):
        read(files)


def test_weights_without_optimizer() -> None:
    """Model states alone are weights, and the rest is said to be missing."""
    manifest = read({MODEL: stage2(WEIGHTS, GROUPS)[MODEL]})
    assert manifest.tensors.fqns == ("module.a", "module.b")
    assert manifest.notes == ("no optimizer partitions are here: weights only",)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({f"{FOLDER}offloaded_tensors/rank0/a.swp": b"x"}, "offloaded to NVMe"),
        (changed(stage2(WEIGHTS, GROUPS), MODEL, setting("param_shapes", value=None)), "no param_shapes"),
        ({OPTIM: saved({STATE: {"fp32_groups": []}})}, "no partitions of ZeRO"),
    ],
)
def test_unsupported(files: Mapping[str, bytes], match: str) -> None:
    """What cannot be read says why."""
    with pytest.raises(Unsupported, match=match):
        read({**stage2(WEIGHTS, GROUPS), **files})


def test_shards_of_a_group_of_ranks() -> None:
    """MiCS: fewer partitions than ranks, the groups of ranks holding the same; without its option it is refused."""
    files = stage3(WEIGHTS, GROUPS)
    copies = {path.replace("pp_rank_0", "pp_rank_2").replace("pp_rank_1", "pp_rank_3"): d for path, d in files.items()}
    both = {**files, **copies}
    with pytest.raises(Unsupported, match="2 partitions on 4 ranks"):
        read(both)
    mics = setting("ds_config", value={"zero_optimization": {"mics_shard_size": 2}})
    store = MemoryStore(with_latest(changed(both, Z3_MODEL, mics)))
    manifest = READER.read(source_of(store))
    chunks = READER.resolve(source_of(store), manifest, all_rows(manifest))
    found = assemble(store, manifest, chunks, "optimizer.state.a.fp32")
    assert found == Truth("float32", (5, 3), (WEIGHTS["a"] + 0.25).numpy().tobytes())


def test_client_state_with_tensors_is_kept_by_rank() -> None:
    """What ranks save under one key, such as random states, keeps every rank's own."""
    files = stage3(WEIGHTS, GROUPS)
    for rank in (0, 1):
        path = f"{FOLDER}zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        files = changed(files, path, setting("rng", value=torch.full((4,), rank, dtype=torch.uint8)))
    manifest = read(files)
    assert {fqn for fqn in manifest.tensors.fqns if fqn.startswith("rng")} == {"rng@rank0", "rng@rank1"}
    assert manifest.tensor("rng@rank1").section == "other"


UC = FIXTURES / "deepspeed/ds_z3_bf16/ckpt/global_step3_universal"


@pytest.mark.parametrize(
    ("value", "match"),
    [(torch.zeros(5), "has 5 elements"), ({"param": "x"}, "expected a tensor"), ([1], "expected a tensor")],
)
def test_wrong_universal_files(value: object, match: str) -> None:
    """A universal file with other elements than its parameter has."""
    files = stored_bytes(UC)
    with pytest.raises(FormatError, match=match):
        UNIVERSAL.read(source_of(MemoryStore({**files, "zero/emb.weight/exp_avg.pt": saved(value)})))


def test_universal_states_have_any_name() -> None:
    """A momentum under its own name and dtype; a step that is a number stays one."""
    files = stored_bytes(UC)
    files["zero/norm.weight/momentum_buffer.pt"] = saved(torch.arange(8, dtype=torch.bfloat16))
    files["zero/norm.weight/step.pt"] = saved(3)
    manifest = UNIVERSAL.read(source_of(MemoryStore(files)))
    assert manifest.tensor("optimizer.state.norm.weight.momentum_buffer").dtype.name == "bfloat16"
    assert {b.fqn: b.value for b in manifest.blobs}["optimizer.state.norm.weight.step"] == 3


def test_files_of_two_runs() -> None:
    """Two partitions of one rank, or of two layouts, are files of two runs."""
    files = stage2(WEIGHTS, GROUPS)
    with pytest.raises(FormatError, match="a second partition of data-parallel rank 0") as error:
        read({**files, OPTIM.replace("zero_pp", "bf16_zero_pp"): files[OPTIM]})
    assert error.value.hint == "files of two runs are mixed: move those of one away"
    with pytest.raises(FormatError, match="a partition of stage 2, beside one of stage 3"):
        read({**files, OPTIM: stage3(WEIGHTS, GROUPS)[OPTIM]})


def without_member(data: bytes, end: str) -> bytes:
    """A torch zip that lacks one member."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(target, "w") as after:
        for name in before.namelist():
            if not name.endswith(end):
                after.writestr(name, before.read(name))
    return target.getvalue()


@pytest.mark.parametrize(("path", "member"), [(MODEL, "/data/0"), (OPTIM, "/data/0"), (OPTIM, "/data/1")])
def test_storages_that_are_not_there(path: str, member: str) -> None:
    """A file that was repacked without one of its storages."""
    files = stage2(WEIGHTS, GROUPS)
    with pytest.raises(FormatError, match="needs storage") as error:
        read({**files, path: without_member(files[path], member)})
    assert path in (error.value.where or "")


def universal(*, flat: bool, **more: Any) -> dict[str, bytes]:
    """A universal form on two tensor-parallel ranks."""
    whole = {"w": numbered(6, 4), "n": numbered(4)}
    files: dict[str, Any] = {}
    for mp in (0, 1):
        shards = {"w": whole["w"][mp * 3 : mp * 3 + 3], "n": whole["n"]}
        files[f"mp_rank_{mp:02d}_model_states.pt"] = model_state(shards, [list(shards)], mp_world_size=2, **more)
    for name, tensor in whole.items():
        files[f"zero/{name}/fp32.pt"] = tensor.flatten() if flat else {"param": tensor + 0.5}
        files[f"zero/{name}/exp_avg.pt"] = tensor.flatten() if flat else {"param": tensor * 2}
    return {path: saved(value) for path, value in files.items()}


def whole_tensors(files: Mapping[str, bytes]) -> dict[str, Truth]:
    """Everything in a universal checkpoint."""
    store = MemoryStore(files)
    manifest = UNIVERSAL.read(source_of(store))
    chunks = UNIVERSAL.resolve(source_of(store), manifest, all_rows(manifest))
    return {fqn: assemble(store, manifest, chunks, fqn) for fqn in manifest.tensors.fqns}


def test_universal_of_tensor_parallel_ranks() -> None:
    """States are whole; weights are joined by the rules, or are the masters where there are none."""
    rules = {"tp_replicated_parameter_patterns": ["n"]}
    joined = whole_tensors(universal(flat=False, universal_checkpoint_info=rules))
    assert joined["module.w"] == Truth("float32", (6, 4), numbered(6, 4).numpy().tobytes())
    masters = whole_tensors(universal(flat=False))
    assert masters["module.w"] == masters["optimizer.state.w.fp32"] == joined["optimizer.state.w.fp32"]
    assert masters["module.n"].data == (numbered(4) + 0.5).numpy().tobytes()


def test_flat_universal_tensors_take_the_whole_shape() -> None:
    """Flat tensors of stage 3 have the shape of the joined shards."""
    rules = {"tp_replicated_parameter_patterns": ["n"]}
    found = whole_tensors(universal(flat=True, universal_checkpoint_info=rules))
    assert found["optimizer.state.w.exp_avg"] == Truth("float32", (6, 4), numbered(6, 4).numpy().tobytes())


def test_names_of_files() -> None:
    """Ranks sort by number; other files of the folder are left alone."""
    names = ["zero_pp_rank_10_mp_rank_00_optim_states.pt", "zero_pp_rank_2_mp_rank_00_optim_states.pt"]
    found = tag_files([f"s/{name}" for name in (*names, "rng_state_0.pth", "x/mp_rank_00_model_states.pt")], "s/")
    assert [file.dp for file in found.optims] == [2, 10]
    assert found.models == ()
    assert tags_below(Listing("", {"s/" + names[0]: 1, "t/u/" + names[0]: 1, names[1]: 1})) == ("s",)


def test_a_lone_file_is_no_part_of_anything() -> None:
    """With nothing beside it, a model state is one torch.save file like any other."""
    listing = Listing("", {"mp_rank_00_model_states.pt": 1}, entry="mp_rank_00_model_states.pt")
    store = MemoryStore({"mp_rank_00_model_states.pt": b"x"})
    assert single_file_text(type(source_of(store))(store, listing)) is None
