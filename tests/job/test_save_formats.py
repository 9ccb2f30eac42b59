"""Formats that ranks write together: each layout bit for bit, from one rank to two and back, with its digests."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import ckpt_tool
from ckpt_tool.api.job.saver import Saver
from tests.job import format_jobs, save_jobs, workers
from tests.job.test_save_alone import save

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

SIZE = 2
SAVED = [f"{SIZE}/{name}/{layout}" for name, layout in product(format_jobs.FORMATS, format_jobs.LAYOUTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this process saved alone, and what a job of two ranks made of it."""
    found = tmp_path_factory.mktemp("formats")
    saver = Saver()
    for name in format_jobs.FORMATS:
        save(saver, format_jobs.state_of("plain"), found / "one" / name, format=name).wait()
    saver.close()
    workers.start(format_jobs.run, SIZE, found)
    return found


def test_two_ranks_load_what_one_saved(folder: Path) -> None:
    """Into every layout, values and extra state of the trainer included."""
    for rank in range(SIZE):
        told = json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
        assert {case: wrong for case, wrong in told.items() if wrong} == {}
        assert len(told) == len(format_jobs.FORMATS) * len(format_jobs.LAYOUTS)


@pytest.mark.parametrize("saved", SAVED)
def test_one_rank_loads_what_two_saved(folder: Path, saved: str) -> None:
    """The whole of each tensor, and each rank's own objects."""
    state = format_jobs.state_of("plain", is_empty=True)
    report = ckpt_tool.load(state, folder / saved)
    assert format_jobs.differences("plain", state) == []
    assert report.missing == ()
    for rank in range(SIZE):
        extra = ckpt_tool.load_extra_state(folder / saved, rank, SIZE)
        assert str(sorted(extra.items())) == str(sorted(format_jobs.extra_of(rank).items()))


@pytest.mark.parametrize("saved", [*SAVED, *(f"one/{name}" for name in format_jobs.FORMATS)])
def test_digests_prove_it(folder: Path, saved: str) -> None:
    """The manifest beside a save has every tensor, and one changed byte of payload contradicts it."""
    manifest = f"{folder / saved}.digests.json"
    report = ckpt_tool.verify(folder / saved, level="full", manifest=manifest)
    recorded = len(json.loads(Path(manifest).read_text(encoding="utf-8"))["tensors"])
    n_named = len(save_jobs.truth())
    assert report.is_ok, [finding.message for finding in report.findings]
    assert recorded >= 3 * n_named
    with ckpt_tool.open(folder / saved) as checkpoint:
        chunks, files = checkpoint.manifest.chunks, checkpoint.manifest.files
        row = int(chunks.length.argmax())
        checkpoint.resolve([checkpoint.manifest.tensors.fqns[int(chunks.tensor[row])]])
        chunks = checkpoint.manifest.chunks
        place = (folder / saved / files.paths[int(chunks.file[row])], int(chunks.offset[row]))
    with place[0].open("r+b") as file:
        file.seek(place[1])
        byte = file.read(1)
        file.seek(place[1])
        file.write(bytes([byte[0] ^ 1]))
        file.flush()
        changed = ckpt_tool.verify(folder / saved, manifest=manifest)
        file.seek(place[1])
        file.write(byte)
    assert not changed.is_ok


@pytest.mark.parametrize("layout", format_jobs.LAYOUTS)
def test_safetensors_opens_the_files_of_ranks(folder: Path, layout: str) -> None:
    """Each file is a plain one, with the rank's boxes under the tensors' names."""
    whole = save_jobs.truth()["even"]
    rows: list[torch.Tensor] = []
    for rank in range(SIZE):
        with safe_open(folder / f"{SIZE}/safetensors/{layout}/rank_{rank:05d}.safetensors", "pt") as file:
            rows += [file.get_tensor(name) for name in file.keys() if name == "model.even"]  # noqa: SIM118
    dim = 1 if layout == "fsdp x tp" else 0
    assert torch.equal(torch.cat(rows, dim), whole)
