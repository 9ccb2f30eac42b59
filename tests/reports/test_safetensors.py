"""Section F of the collected reports: safetensors files and Hugging Face repositories.

Told by a test elsewhere, of which those here are at most the view through the command:

====  ============================================================================================
R85   formats/safetensors/test_header.py, test_index.py (101 MB of header), test_writer.py (split in time)
R86   formats/test_content.py (each kind of content)
R91   formats/safetensors/test_index.py (each contradiction)
R94   verify/test_content.py (what no checksum covers)
R97   storage/test_urls.py (Windows paths, drive letters)
====  ============================================================================================
"""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.reports.conftest import FIXTURES, Ckpt
from tests.reports.made import as_bytes, put, safetensors_bytes

REPO = FIXTURES / "torch/hf_sharded/ckpt"
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def shard(number: int) -> str:
    """A file of the repository."""
    return f"model-{number:05d}-of-00003.safetensors"


@pytest.mark.parametrize(
    ("data", "what", "fix"),
    [
        (POINTER, "a git-LFS pointer", 'of a file of 12,345 bytes: run "git lfs pull"'),
        (b"<!DOCTYPE html><html></html>", "an HTML page", "the download failed"),
        (gzip.compress(b"tensors" * 100), "a gzip file", "gunzip"),
        (pickle.dumps({"a": 1}), "a pickle", "torch.save did not write it"),
        (b"", "an empty file", "fetch or save it again"),
    ],
)
def test_r86_what_it_is_instead(ckpt: Ckpt, tmp_path: Path, data: bytes, what: str, fix: str) -> None:
    """R86: a file that is something else is called what it is, with the fix; by its own name, or as the folder's."""
    (tmp_path / "model.safetensors").write_bytes(data)
    for place in (tmp_path, tmp_path / "model.safetensors"):
        refused = ckpt("inspect", place)
        assert (refused.status, f"not a safetensors file but {what}" in refused.err, fix in refused.err) == (
            3,
            True,
            True,
        )


def test_r86_one_pointer_among_files(ckpt: Ckpt, tmp_path: Path) -> None:
    """R86: of a half cloned repository the pointer is named, with the tensors that are missing."""
    source = shutil.copytree(REPO, tmp_path / "repo")
    (source / shard(2)).write_bytes(POINTER)
    found = ckpt("verify", source)
    assert found.status == 1
    assert (
        f"{shard(2)}: not a safetensors file but a git-LFS pointer; 10 of its 10 tensors are in no other" in found.text
    )
    assert ckpt("export", source, tmp_path / "out").status == 3


def test_many_tied_tensors_are_named_in_short(ckpt: Ckpt, tmp_path: Path) -> None:
    """Of tensors that share their bytes the first are named, and of groups of such; the others are counted."""
    values = [torch.arange(4.0) + n for n in range(5)]
    torch.save({f"{letter}{n}": values[n] for n in range(5) for letter in "abcde"}, tmp_path / "m.pt")
    done = ckpt("export", tmp_path / "m.pt", tmp_path / "out.safetensors")
    groups = "; ".join(f"a{n} = b{n} = c{n} = 2 more" for n in range(3))
    assert f"5 groups of tensors share their bytes and are each written: {groups} and 2 more groups" in done.text


def test_r88_views_of_one_storage(ckpt: Ckpt, tmp_path: Path) -> None:
    """R88: whole and partial views of one storage are written out each with its values, and reported."""
    base = torch.arange(12.0)
    state = {"a": base, "b": base, "head": base[:4], "odd": base[1::2], "t": base.view(3, 4).t()}
    torch.save(state, tmp_path / "m.pt")
    done = ckpt("export", tmp_path / "m.pt", tmp_path / "out.safetensors")
    assert "share their bytes and are each written: a = b" in done.text
    found = load_file(tmp_path / "out.safetensors")
    assert {fqn: value.tolist() for fqn, value in found.items()} == {
        fqn: value.tolist() for fqn, value in state.items()
    }
    views = "3 tensors have bytes in common with others, as views of one storage, and are each written with all of"
    assert f"{views} theirs: head (of a), odd (of a), t (of a)" in done.text
    done = ckpt("export", tmp_path / "m.pt", tmp_path / "once.safetensors", "--tied", "drop")
    assert "1 left out, shares its bytes with a: b" in done.text
    assert views in done.text
    once = load_file(tmp_path / "once.safetensors")
    assert {fqn: value.tolist() for fqn, value in once.items()} == {
        fqn: value.tolist() for fqn, value in state.items() if fqn != "b"
    }


def test_r88_the_same_bytes_read_in_another_way(ckpt: Ckpt, tmp_path: Path) -> None:
    """R88, R35: a square tensor and its transpose, a tensor and its conjugate share all bytes, and are not tied."""
    square, signal = torch.arange(16.0).view(4, 4), torch.tensor([1 + 2j, 3 - 4j])
    turned = torch.arange(5.0)
    state = {
        "w": square, "w_t": square.t(), "c": signal, "conj": signal.conj(), "n": turned, "neg": torch._neg_view(turned),
        "one": square[:1].t(), "row": square[0].unsqueeze(1),
    }  # fmt: skip
    torch.save(state, tmp_path / "m.pt")
    done = ckpt("export", tmp_path / "m.pt", tmp_path / "out.safetensors", "--tied", "drop")
    assert "1 left out, shares its bytes with one: row" in done.text
    found = load_file(tmp_path / "out.safetensors")
    assert set(found) == set(state) - {"row"}
    assert all(torch.equal(found[fqn], state[fqn].resolve_conj().resolve_neg()) for fqn in found)


def test_r89_two_names_of_one_range(ckpt: Ckpt, tmp_path: Path) -> None:
    """R89: such a file is an error for verify and for the library; exported, each name has bytes of its own."""
    data = np.arange(4, dtype=np.float32).tobytes()
    raw = safetensors_bytes({"a": ("F32", [4], data), "b": ("F32", [4], b"")}, {"b": (0, 16)})
    (tmp_path / "m.safetensors").write_bytes(raw)
    found = ckpt("verify", tmp_path / "m.safetensors")
    assert (found.status, "'b' has the same bytes as 'a', which the format forbids" in found.text) == (1, True)
    for tied, names in (("keep", ["a", "b"]), ("drop", ["a"])):
        out = tmp_path / f"{tied}.safetensors"
        assert ckpt("export", tmp_path / "m.safetensors", out, "--tied", tied).status == 0
        assert {fqn: value.tolist() for fqn, value in load_file(out).items()} == {
            fqn: [0.0, 1.0, 2.0, 3.0] for fqn in names
        }


Change = Callable[[Path, dict[str, str]], None]


def ghost(_: Path, weights: dict[str, str]) -> None:
    """A tensor that no file has."""
    weights["ghost.weight"] = shard(1)


def wrong_file(_: Path, weights: dict[str, str]) -> None:
    """A tensor that another file has."""
    weights["buf_bool"] = shard(2)


def absent(folder: Path, _: dict[str, str]) -> None:
    """A file that was not copied."""
    (folder / shard(2)).unlink()


def stale(_: Path, weights: dict[str, str]) -> None:
    """An index of another cut of the same tensors."""
    for number, fqn in enumerate(weights):
        weights[fqn] = f"model-{number + 1:05d}-of-00036.safetensors"


def stray(folder: Path, _: dict[str, str]) -> None:
    """A second copy of a file."""
    shutil.copy(folder / shard(1), folder / "model-00004-of-00003.safetensors")


def twice(folder: Path, _: dict[str, str]) -> None:
    """A tensor in two files, with two values."""
    other = load_file(folder / shard(2)) | {"buf_bool": ~load_file(folder / shard(1))["buf_bool"]}
    save_file(other, folder / shard(2), metadata={"format": "pt"})


def unlisted(_: Path, weights: dict[str, str]) -> None:
    """A tensor that the index does not list."""
    del weights["buf_bool"]


@pytest.mark.parametrize(
    ("change", "said", "is_exported"),
    [
        (ghost, f"error index-ghost-tensor {INDEX} puts 'ghost.weight' into {shard(1)}, which lacks it", True),
        (wrong_file, f"puts 'buf_bool' into {shard(2)}, which lacks it; it is in {shard(1)}", True),
        (absent, f"error missing-file {shard(2)} is named by {INDEX} and is not here; 10 of its 10 tensors", False),
        (stale, f"error stale-index {INDEX} names 36 files, of which none is here", True),
        (stray, f"'buf_bool' is in {shard(1)} and in model-00004-of-00003.safetensors", True),
        (twice, f"'buf_bool' is in {shard(1)} and in {shard(2)}; {shard(1)} was taken", True),
        (unlisted, f"{shard(1)} holds 1 tensor that {INDEX} does not list: 'buf_bool'", True),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_r91_index_against_files(ckpt: Ckpt, tmp_path: Path, change: Change, said: str, is_exported: bool) -> None:
    """R91: each contradiction names tensor and files; all that is there is exported right, what is missing stops it."""
    source = shutil.copytree(REPO, tmp_path / "repo")
    index = json.loads((source / INDEX).read_text("utf-8"))
    change(source, index["weight_map"])
    (source / INDEX).write_text(json.dumps(index), "utf-8")
    found = ckpt("verify", source)
    assert said in found.text
    assert found.status == (0 if change is unlisted else 1)
    quick = ckpt("verify", source, "--quick")  # headers are no payload
    assert (quick.status, said in quick.text) == (found.status, True)
    done = ckpt("export", source, tmp_path / "out", "--names", "source")
    assert done.status == (0 if is_exported else 3)
    if is_exported:
        assert as_bytes(tmp_path / "out") == as_bytes(REPO)


def test_r91_json_that_hides_a_key(ckpt: Ckpt, tmp_path: Path) -> None:
    """R91: a key that the JSON of the index has twice is seen, with both files."""
    source = shutil.copytree(REPO, tmp_path / "repo")
    text = (source / INDEX).read_text("utf-8").rstrip().removesuffix("}").rstrip().removesuffix("}").rstrip()
    (source / INDEX).write_text(f'{text}, "buf_bool": "{shard(2)}"}}}}', "utf-8")
    found = ckpt("verify", source)
    assert (found.status, f"lists 'buf_bool' twice: in {shard(1)} and in {shard(2)}" in found.text) == (1, True)


def test_r92_total_size(ckpt: Ckpt, tmp_path: Path) -> None:
    """R92: total_size counts tensor bytes; one that counts file bytes is a warning, and export writes the right one."""
    source = shutil.copytree(REPO, tmp_path / "repo")
    index = json.loads((source / INDEX).read_text("utf-8"))
    true_size, of_files = index["metadata"]["total_size"], sum(p.stat().st_size for p in source.glob("*.safetensors"))
    index["metadata"]["total_size"] = of_files
    (source / INDEX).write_text(json.dumps(index), "utf-8")
    found = ckpt("verify", source)
    said = f"total_size {of_files:,} (the sum of the file sizes), expected the sum of the tensors' bytes, {true_size:,}"
    assert (found.status, said in found.text) == (0, True)
    assert ckpt("export", source, tmp_path / "out", "--max-shard-size", "20KB").status == 0
    assert json.loads((tmp_path / "out" / INDEX).read_text("utf-8"))["metadata"]["total_size"] == true_size


class TestR95NewTypes:
    """R95: types that are newer than the tool, or narrower than a byte."""

    RAW = safetensors_bytes({
        "e8": ("F8_E8M0", [4], bytes([1, 2, 3, 4])),
        "e4": ("F8_E4M3", [2, 2], bytes([9, 8, 7, 6])),
        "f4": ("F4", [2, 8], bytes(range(8))),
        "x": ("X9", [3], bytes([5, 0, 6, 0, 7, 0])),
    })  # fmt: skip

    def test_listed(self, ckpt: Ckpt, tmp_path: Path) -> None:
        """F4 counts two to a byte; an unknown type is named as it is, with the bytes that it takes."""
        (tmp_path / "m.safetensors").write_bytes(self.RAW)
        rows = ckpt("inspect", tmp_path / "m.safetensors", "--json").json["tensors"]
        assert {row["fqn"]: (row["dtype"], row["shape"], row["nbytes"]) for row in rows} == {
            "e8": ("float8_e8m0fnu", [4], 4),
            "e4": ("float8_e4m3fn", [2, 2], 4),
            "f4": ("float4_e2m1fn_x2", [2, 4], 8),
            "x": ("X9", [3], 6),
        }
        assert ckpt("verify", tmp_path / "m.safetensors", "--full").status == 0

    @pytest.mark.parametrize(
        "words",
        [
            ["export"],
            ["reshard", "--dp", "2", "--to", "rank-files"],
            ["reshard", "--dp", "2", "--exclude", "x"],
            ["reshard", "--dp", "2", "--to", "torch-ranks", "--exclude", "x"],
        ],
        ids=str,
    )
    def test_moved(self, ckpt: Ckpt, tmp_path: Path, words: list[str]) -> None:
        """Copied and cut over two ranks, the bytes stay; torch's formats take all but the unknown type."""
        source, out = put(tmp_path / "source", {"m.safetensors": self.RAW}), tmp_path / "out"
        assert ckpt(words[0], source, out, *words[1:]).status == 0
        expected = {fqn: tensor for fqn, tensor in as_bytes(source).items() if fqn != "x" or "--exclude" not in words}
        assert as_bytes(out) == expected

    def test_no_torch_type(self, ckpt: Ckpt, tmp_path: Path) -> None:
        """The error names the type, a tensor and the way out."""
        source = put(tmp_path / "source", {"m.safetensors": self.RAW})
        refused = ckpt("reshard", source, tmp_path / "out", "--dp", "2")
        assert (refused.status, "X9 ('x')" in refused.err, "--exclude" in refused.err) == (3, True, True)
        assert "--to safetensors of export, rank-files of reshard" in refused.err


READ = """
import sys
from ckpt_tool.cli.app import main
assert main(["cat", sys.argv[1], "w[5000000:5000001, 0:3]", "--json"]) == 0
assert main(["verify", sys.argv[1], "--quick", "-q"]) == 0
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sparse files, and /proc")
def test_r97_files_larger_than_memory(tmp_path: Path) -> None:
    """R97: of a file of 5 GB (sparse) a slice is read in 1 GB of address space: nothing is mapped, few bytes read."""
    path, nbytes = tmp_path / "m.safetensors", 5 * 10**9
    header = json.dumps({"w": {"dtype": "F32", "shape": [10**7, 125], "data_offsets": [0, nbytes]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
        file.seek(8 + len(header) + 5_000_000 * 500)
        file.write(np.array([1, 2, 3], np.float32).tobytes())
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({10**9}, {10**9}))\n"
    run = subprocess.run([sys.executable, "-c", limit + READ, str(path)], capture_output=True, text=True, check=True)
    document, peak = run.stdout.rsplit("\n", 2)[:2]
    assert json.loads(document)["values"] == [[1.0, 2.0, 3.0]]
    assert int(peak) * 1024 < 256 << 20


@pytest.mark.parametrize(
    "place",
    [
        "torch/dcp_fsdp2_4r_fp32/ckpt", "torch/hf_sharded/ckpt", "torch/hf_pytorch_bin/ckpt", "torch/verl_2d/ckpt",
        "torch/hf_dcp_sharded/ckpt", "deepspeed/accelerate_fsdp2/ckpt", "deepspeed/ds_z3_bf16/ckpt",
        "bytecheckpoint/hsdp_4r/ckpt", "torch_checkpointing/fsdp2_tp_2x2/ckpt",
    ],
)  # fmt: skip
def test_r98_no_payload_is_read(ckpt: Ckpt, tmp_path: Path, place: str) -> None:
    """R98: with every payload byte overwritten, inspect says the same of every format."""
    source, copy = FIXTURES / place, shutil.copytree(FIXTURES / place, tmp_path / "copy")
    for chunk in ckpt("inspect", copy, "--json", "--shards").json["chunks"]:
        with (copy / chunk["file"]).open("r+b") as file:
            file.seek(chunk["offset"])
            file.write(b"\xa5" * chunk["length"])
    assert ckpt("inspect", copy, "--json").out.replace(str(copy), str(source)) == ckpt("inspect", source, "--json").out


def test_bytes_behind_the_last_tensor(ckpt: Ckpt, tmp_path: Path) -> None:
    """Beside R91: a second write into the same file; what the header names is whole, and salvage keeps it."""
    whole = safetensors_bytes({"w": ("F32", [2], bytes(8))})
    put(tmp_path / "run/step-1", {"model.safetensors": whole})
    put(tmp_path / "run/step-2", {"model.safetensors": whole + bytes(24)})
    path = tmp_path / "run/step-2/model.safetensors"
    ran = ckpt("verify", path)
    assert (ran.status, "24 bytes after the last tensor, of none" in ran.err) == (3, True)
    assert "ckpt verify SRC --salvage OUT" in ran.err
    assert ckpt("verify", path, "--salvage", tmp_path / "kept").status == 0
    assert list(as_bytes(tmp_path / "kept")) == ["w"]
    assert ckpt("ls", tmp_path / "run", "--latest").out == f"{tmp_path}/run/step-1\n"
