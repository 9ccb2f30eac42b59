"""DeepSpeed: the readers' contract on real checkpoints of every layout, bit for bit, masters and moments included."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ckpt_tool.errors import NotFound
from ckpt_tool.formats.base import Reader, Source
from ckpt_tool.formats.deepspeed.reader import READER
from ckpt_tool.formats.deepspeed.universal import READER as UNIVERSAL
from ckpt_tool.formats.detect import detect
from ckpt_tool.manifest.optimizer import optimizer_views
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.open import open_store
from ckpt_tool.storage.store import Store
from tests.formats.conformance import (
    FIXTURES,
    Case,
    ReaderTests,
    Truth,
    all_rows,
    assemble,
    source_of,
    stored_bytes,
    truth_of,
)

DEEPSPEED = FIXTURES / "deepspeed"
STEP = "global_step3"


Open = Callable[[Path], Source]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens sources, and closes them behind the test."""
    stores: list[Store] = []

    def open_one(location: Path) -> Source:
        store, listing = open_store(location)
        stores.append(store)
        return Source(store, listing)

    yield open_one
    for store in stores:
        store.close()


def fqn_of(name: str, numbers: Mapping[str, int] | None = None) -> str:
    """``exp_avg/w`` of the truth is ``optimizer.state.w.exp_avg``; parameters and buffers are below ``module``.

    Stage 0 keys states by number, as torch does: then ``numbers`` says which, by ``module.w``.
    """
    kind, _, fqn = name.partition("/")
    if kind in ("param", "buffer"):
        return f"module.{fqn}"
    return f"optimizer.state.{(numbers or {}).get(f'module.{fqn}', fqn)}.{kind}"


# The optimizer of stage 0 was given matrices first, then vectors.
MATRICES = ("emb.weight", *(f"blocks.0.{name}.weight" for name in ("qkv", "proj", "up", "down")))
VECTORS = ("scale", "ln1.weight", "ln1.bias", "qkv.bias", "ln2.weight", "ln2.bias", "up.bias")
ORDER = (*MATRICES, *(f"blocks.0.{name}" for name in VECTORS), "norm.weight", "norm.bias")
NUMBERS = {f"module.{name}": number for number, name in enumerate(ORDER)}


def stored_truth(folder: Path, *, weights_are_masters: bool = False) -> Callable[[], Mapping[str, Truth]]:
    """What the files hold: the truth, with the tied head under both names; at stage 3 masters in place of weights."""

    def read() -> Mapping[str, Truth]:
        numbers = NUMBERS if folder.name.startswith("ds_z0") else None
        found = dict(truth_of(folder, lambda name: fqn_of(name, numbers))())
        if weights_are_masters:
            masters = {fqn: truth for fqn, truth in found.items() if fqn.endswith(".fp32")}
            found |= {f"module.{fqn[len('optimizer.state.') : -len('.fp32')]}": t for fqn, t in masters.items()}
        if "module.pos" in found:  # only the model with frozen positions has tied weights
            found["module.head.weight"] = found["module.emb.weight"]
        return found

    return read


def case(name: str, n_files: int, folder: str = "ckpt", *, weights_are_masters: bool = False) -> Case:
    """A fixture whose files cost at most three requests each, and one for ``latest``."""
    return Case(
        f"{name}-{folder}",
        DEEPSPEED / name / folder,
        stored_truth(DEEPSPEED / name, weights_are_masters=weights_are_masters),
        without_truth=("optimizer.state.*.step",),
        max_read_requests=3 * n_files + 1,
    )


NATIVE = (
    case("ds_z0_fp32", 1),
    case("ds_z1_fp32", 4),
    case("ds_z1_bf16opt", 4),
    case("ds_z2_bf16", 4, f"ckpt/{STEP}"),
    case("ds_z2_rr", 4),
    case("ds_z2_align", 4),
    case("ds_z2_elastic", 4),
    case("ds_z3_bf16", 6, f"ckpt/{STEP}", weights_are_masters=True),
    case("ds_z3_sub", 6, weights_are_masters=True),
    case("ds_moe_ep2_z1", 9),
    case("ds_pp2_dp2_z1", 10),
    case("ds_autotp2_z3", 8, weights_are_masters=True),
)


class TestDeepSpeed(ReaderTests):
    """Stages 0 to 3, BF16_Optimizer, round robin, alignment, elastic, sub-groups, experts, pipeline, AutoTP."""

    reader = READER
    reader_import = "ckpt_tool.formats.deepspeed.reader:READER"
    cases = NATIVE


class TestUniversal(ReaderTests):
    """From stage 2, with whole tensors, and from stage 3, with flat ones."""

    reader = UNIVERSAL
    reader_import = "ckpt_tool.formats.deepspeed.universal:READER"
    cases = (
        case("ds_z2_bf16", 66, f"ckpt/{STEP}_universal"),
        case("ds_z3_bf16", 50, f"ckpt/{STEP}_universal", weights_are_masters=True),
    )


def numbered_by_position(name: str) -> bool:
    """Stage 0 saves the optimizer as torch does."""
    return name.startswith("ds_z0")


def test_masters_round_to_the_weights_of_stage_3(opened: Open) -> None:
    """Weights that stage 3 does not store are its masters, rounded to nearest even."""
    truth = truth_of(DEEPSPEED / "ds_z3_bf16", fqn_of)()
    source = opened(DEEPSPEED / "ds_z3_bf16/ckpt")
    manifest = READER.read(source)
    chunks = READER.resolve(source, manifest, all_rows(manifest))
    for fqn, expected in truth.items():
        if fqn.startswith("module.") and expected.dtype == "bfloat16":
            actual = assemble(source.store, manifest, chunks, fqn)
            values = np.frombuffer(actual.data, dtype="<f4" if actual.dtype == "float32" else ml_dtypes.bfloat16)
            assert values.astype(ml_dtypes.bfloat16).tobytes() == expected.data, fqn
    assert manifest.info["model_dtype"] == "bfloat16"


@pytest.mark.parametrize("one", NATIVE, ids=lambda one: one.name)
def test_the_optimizer_has_its_normal_form(one: Case, opened: Open) -> None:
    """Masters and moments are one optimizer, keyed by the names that the groups list, with their hyperparameters."""
    manifest = READER.read(opened(one.location))
    (view,) = optimizer_views(manifest)
    members = [name for group in view.groups for name in group.params]
    assert view.prefix == "optimizer"
    assert set(view.parameters) == set(members)
    states = {frozenset(states) for states in view.parameters.values()}
    expected = {"exp_avg", "exp_avg_sq", "step"} | (set() if numbered_by_position(one.name) else {"fp32"})
    assert states == {frozenset(expected)}
    if one.name != "ds_z2_elastic-ckpt":  # which saves no groups
        assert all("lr" in group.hyperparameters for group in view.groups)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("ds_z2_bf16", (1, 3, 1)),
        ("ds_z3_sub", (1, 3, 1)),
        ("ds_moe_ep2_z1", (1, 4, 1)),
        ("ds_pp2_dp2_z1", (2, 2, 1)),
        ("ds_autotp2_z3", (1, 2, 2)),
    ],
)
def test_mesh(name: str, sizes: tuple[int, ...], opened: Open) -> None:
    """Axes are pipeline, data, tensor; chunks name the global rank of their file."""
    manifest = READER.read(opened(DEEPSPEED / name / "ckpt"))
    assert manifest.mesh is not None
    assert (manifest.mesh.axes, manifest.mesh.sizes) == (("pp", "dp", "tp"), sizes)
    world_size = int(np.prod(sizes))
    assert manifest.info["world_size"] == world_size
    assert set(manifest.chunks.rank.tolist()) == set(range(world_size))


def test_facts(opened: Open) -> None:
    """Step, stage, version and tag are told, and the program's own values keep their names."""
    manifest = READER.read(opened(DEEPSPEED / "ds_z3_sub/ckpt"))
    expected = {"step": 3, "zero_stage": 3, "deepspeed_version": "0.19.8", "tag": STEP, "weights_are_masters": True}
    assert {key: manifest.info[key] for key in expected} == expected
    values = {blob.fqn: blob.value for blob in manifest.blobs}
    assert (values["my_iteration"], values["note"], values["global_samples"]) == (3, "client", 18)


@pytest.mark.parametrize(
    ("path", "reader"),
    [
        ("ds_z2_bf16/ckpt", READER),
        (f"ds_z2_bf16/ckpt/{STEP}", READER),
        (f"ds_z2_bf16/ckpt/{STEP}_universal", UNIVERSAL),
        ("ds_pp2_dp2_z1/ckpt", READER),
    ],
)
def test_detected(path: str, reader: Reader, opened: Open) -> None:
    """The tag folder and its parent are recognised; where both forms lie side by side, the native one is taken."""
    assert detect(opened(DEEPSPEED / path)) is reader


def test_the_folder_of_a_trainer() -> None:
    """Weights beside a training state, as transformers' Trainer saves both: the state is read, the weights are told."""
    state = stored_bytes(DEEPSPEED / "ds_z2_rr/ckpt")
    weights = stored_bytes(DEEPSPEED / "hf_st_tied/ckpt")
    source = source_of(MemoryStore({**weights, **state, "rng_state_0.pth": b"x"}))
    assert detect(source) is READER
    assert any("2 files beside it hold weights alone" in note for note in READER.read(source).notes)


@pytest.mark.parametrize(
    ("file", "what"),
    [
        (f"{STEP}/mp_rank_00_model_states.pt", "the model state of model-parallel rank 0"),
        (
            f"{STEP}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "the optimizer partition of data-parallel rank 1, model-parallel rank 0",
        ),
        ("latest", "the file that names the last step, 'global_step3'"),
    ],
)
def test_one_file_of_many(file: str, what: str, opened: Open) -> None:
    """A single file is told for what it is, and the hint is the folder to type."""
    source = opened(DEEPSPEED / "ds_z2_bf16/ckpt" / file)
    with pytest.raises(NotFound, match=f"one file of a DeepSpeed checkpoint, not the whole: {what}") as error:
        detect(source).read(source)
    assert error.value.hint == f'give the folder: "{source.listing.url.rstrip("/")}"'


def test_larger_checkpoints_too(opened: Open) -> None:
    """Every tensor of every truth in a folder of one's own (``CKPT_EXTRA_FIXTURES``), else in this repository's."""
    extra = os.environ.get("CKPT_EXTRA_FIXTURES")
    folders = sorted((Path(extra) / "deepspeed" if extra else DEEPSPEED).glob("ds_*"))
    assert folders
    for folder in folders:
        source = opened(folder / "ckpt" if (folder / "ckpt").is_dir() else folder)
        manifest = READER.read(source)
        chunks = READER.resolve(source, manifest, all_rows(manifest))
        (view,) = optimizer_views(manifest)
        numbers = {fqn: number for number, fqn in view.names.items()}
        for fqn, expected in truth_of(folder, partial(fqn_of, numbers=numbers))().items():
            actual = assemble(source.store, manifest, chunks, fqn)
            if (actual.dtype, expected.dtype) == ("float32", "bfloat16"):
                rounded = np.frombuffer(actual.data, dtype="<f4").astype(ml_dtypes.bfloat16)
                actual = Truth("bfloat16", actual.shape, rounded.tobytes())
            assert actual == expected, f"{folder.name}: {fqn}"
