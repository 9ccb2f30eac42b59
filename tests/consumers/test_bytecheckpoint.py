"""bytecheckpoint 0.0.2 loads what was written here, into FSDP, HSDP, FSDP2 and DDP models.

``CKPT_PEER_BYTECHECKPOINT`` names the python of an environment with it (``--no-deps``, for it asks for torch 2.5),
torch 2.13, grpcio, protobuf 3.20, cachetools, mmh3 4, numpy, safetensors and universal-pathlib 0; run with ``-m peer``.
The script is the one that made the fixtures: with ``--load`` it compares every parameter and every moment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ckpt_tool.api.convert.reshard import reshard
from tests.consumers import bytecheckpoint_job
from tests.job import workers

pytestmark = pytest.mark.peer

FAMILY = Path(__file__).parents[2] / "fixtures/bytecheckpoint"
SCRIPT = FAMILY / "make/bcp_make.py"
TARGETS: dict[str, dict[str, Any]] = {"one": {}, "dp3": {"dp": 3}, "tp2dp2": {"tp": 2, "dp": 2}}


LAYERS = [f"blocks.{i}.{part}.{kind}" for i in range(3) for part in ("ln", "up", "down") for kind in ("weight", "bias")]
ORDER = ["emb.weight", *LAYERS, "head.weight"]
"""Parameters of the script's model, as an optimizer numbers them."""


def load(mode: str, folder: Path, world_size: int) -> str:
    """What rank 0 says of a load into ``world_size`` ranks."""
    command = [os.environ["CKPT_PEER_BYTECHECKPOINT"], "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-ranks-filter=0"]  # ranks would print into each other's lines
    command += [f"--nproc_per_node={world_size}", str(SCRIPT), "--mode", mode, "--h", "5", "--out", str(folder)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run([*command, "--load"], capture_output=True, text=True, check=False, env=environment)
    said = re.search(r"LOAD .*", run.stdout)
    assert said, run.stderr[-4000:]
    return said[0]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "mode", "world_size"),
    [
        ("fsdp_dec_4r", "fsdp", 2),
        ("fsdp_dec_4r", "hsdp", 4),
        ("hsdp_4r", "hsdp", 4),
        ("hsdp_4r", "fsdp", 2),
        ("hsdp_4r", "fsdp2", 2),
        ("ddp_2r", "ddp", 1),
        ("ddp_2r", "ddp", 2),
    ],
)
def test_the_library_loads_it(name: str, mode: str, world_size: int, target: str, tmp_path: Path) -> None:
    """Other numbers of ranks than were written, and modes that its own loader refuses (decomposed into sharded)."""
    options: dict[str, Any] = {"default": "replicate", "rank_state": "drop", "durable": False, **TARGETS[target]}
    reshard(FAMILY / name / "ckpt", tmp_path / "there", to="bytecheckpoint", **options)
    shutil.copy(FAMILY / name / "truth.safetensors", tmp_path / "there")
    assert load(mode, tmp_path / "there", world_size).startswith(f"LOAD {mode} world {world_size} tensors 81 bad 0 []")


@pytest.mark.parametrize(
    ("name", "style", "mode", "world_size"),
    [
        ("ddp_2r", "fqn", "fsdp2", 2),
        ("ddp_2r", "fqn", "fsdp", 2),
        ("hsdp_4r", "ids", "ddp", 1),
        ("hsdp_4r", "ids", "ddp", 2),
    ],
)
def test_between_numbers_and_names(name: str, style: str, mode: str, world_size: int, tmp_path: Path) -> None:
    """DDP into FSDP and FSDP2, and FSDP into DDP, where its own loader ends with a KeyError."""
    folder = tmp_path / "there"
    reshard(FAMILY / name / "ckpt", folder, to="bytecheckpoint", optim_style=style, rank_state="drop", durable=False)
    save_file(dict(as_the_other(load_file(FAMILY / name / "truth.safetensors"), style)), folder / "truth.safetensors")
    assert load(mode, folder, world_size).startswith(f"LOAD {mode} world {world_size} tensors 81 bad 0 []")


def as_the_other(truth: Mapping[str, Any], style: str) -> Iterator[tuple[str, Any]]:
    """The truth under the keys of the mode that is to load it."""
    for key, value in truth.items():
        section, rest = key.split("/", 1)
        if section == "model":
            yield (f"model/module.{rest}" if style == "ids" else f"model/{rest.removeprefix('module.')}"), value
        else:
            name, state = rest.split("/")
            yield f"optim/{ORDER.index(name) if style == 'ids' else ORDER[int(name)]}/{state}", value


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job of two ranks saved."""
    folder = tmp_path_factory.mktemp("saved")
    workers.start(bytecheckpoint_job.save, 2, folder)
    for kind, name in bytecheckpoint_job.SOURCES.items():
        shutil.copy(FAMILY / name / "truth.safetensors", folder / kind)
    return folder


@pytest.mark.parametrize(
    ("kind", "mode", "world_size"),
    [
        ("sharded", "fsdp2", 2), ("sharded", "fsdp2", 1), ("sharded", "fsdp", 2), ("sharded", "hsdp", 4),
        ("replicated", "ddp", 1), ("replicated", "ddp", 2),
    ],
)  # fmt: skip
def test_it_loads_what_a_job_saved(saved: Path, kind: str, mode: str, world_size: int) -> None:
    """What `ckpt_tool.save` wrote on two ranks, each its own files, with each rank's extra state."""
    said = load(mode, saved / kind, world_size)
    assert said.startswith(f"LOAD {mode} world {world_size} tensors 81 bad 0 []")
    assert "'rank': 0" in said
