from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.cli.app import main
from ckpt_tool.cli.render_header import header_lines
from ckpt_tool.cli.render_tables import file_lines, folded_names, object_lines, rank_lines, sorted_rows, tensor_lines
from ckpt_tool.manifest.arrow import from_parquet
from ckpt_tool.manifest.codec import from_json
from ckpt_tool.manifest.model import Blob
from tests.cli.synthetic import inspection, manifest, row, text
from tests.formats import zoo
from tests.formats.megatron.places import CHECKPOINTS

FIXTURES = Path(__file__).parents[2] / "fixtures"
FSDP = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"
SMALL = manifest(
    [
        ("w", "float32", (4, 6), "model"),
        ("b", "bfloat16", (6,), "model"),
        ("w.exp_avg", "float32", (4, 6), "optimizer"),
    ],
    [
        ("w", "0.bin", (0, 0), (2, 6), 0),
        ("w", "1.bin", (2, 0), (2, 6), 1),
        ("b", "0.bin", (0,), (6,), 0),
        ("b", "1.bin", (0,), (6,), 1),
        ("w.exp_avg", "1.bin", (0, 0), (4, 6), 1),
    ],
)


def ckpt(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """What ``ckpt`` prints on stdout, having ended well."""
    assert main([str(argument) for argument in argv]) == 0
    return capsys.readouterr().out


def test_header() -> None:
    """The header says what it is, which step, who wrote it and how much there is, by section and type."""
    assert (
        text(header_lines(inspection(SMALL), width=80))
        == """\
run/step-7
  format   dcp (torch 2.13.0)
  step     7
  written  by 2 ranks, mesh dp=2 (made up)
  tensors  3, stored as 5 boxes in 2 files
  bytes    204 B (204), with replicas 216 B

  section     tensors   float32   bfloat16     all
  model             2      96 B       12 B   108 B
  optimizer         1      96 B          -    96 B
"""
    )


def test_tensors_flat() -> None:
    """A flat list has exact bytes, and how each tensor is cut."""
    assert (
        text(tensor_lines(inspection(SMALL).rows, width=120, limit=2))
        == """\
tensor  dtype     shape   bytes  parts
w       float32   [4, 6]     96  2x1
b       bfloat16  [6]        12  2 copies
… 1 more tensor; --limit 0 shows all"""
    )


def test_files() -> None:
    """Files show what lies in them, and from which ranks."""
    assert (
        text(file_lines(inspection(SMALL).files, width=120, limit=None))
        == """\
file   bytes  tensor bytes                    boxes  tensors  ranks
0.bin     60            60  ██████▏               2        2  0
1.bin    156           156  ████████████████      3        3  1"""
    )


def test_files_are_listed_in_the_order_of_their_numbers() -> None:
    """Whatever order the metadata name them in, file 10 stands behind file 2."""
    rows = [replace(inspection(SMALL).files[0], path=f"__{n}_0.distcp") for n in (10, 0, 2)]
    listed = text(file_lines(rows, width=120, limit=None)).splitlines()[1:]
    assert [found.split()[0] for found in listed] == ["__0_0.distcp", "__2_0.distcp", "__10_0.distcp"]


def test_ranks() -> None:
    """Ranks show what they wrote."""
    assert text(rank_lines(inspection(SMALL).ranks, width=120, limit=None)).splitlines()[1:] == [
        "   0            60  ██████▏               2        2      1",
        "   1           156  ████████████████      3        3      1",
    ]


@pytest.mark.parametrize(
    ("by", "expected"),
    [(None, "bca"), ("name", "abc"), ("size", "cba"), ("shape", "cba"), ("dtype", "acb")],
)
def test_order(by: str | None, expected: str) -> None:
    """Tensors are sorted by what was asked for; the largest first by size and shape."""
    rows = [row("b", (8,), "int8"), row("c", (2, 8), "float32"), row("a", (), "bfloat16")]
    assert "".join(found.fqn for found in sorted_rows(rows, by)) == expected


def test_objects_of_ranks_that_agree_are_one_line() -> None:
    """Objects are shown by value; equal ones of several ranks share a line, and long ones are cut."""
    blobs = tuple(Blob("rng", "value", None, (3, 4), rank=rank, is_loaded=True) for rank in range(3))
    long = Blob("list", "value", None, list(range(1000)), is_loaded=True)
    found = inspection(SMALL.replace(blobs=(*blobs, long)))
    assert (
        text(object_lines(found, width=50, limit=None))
        == """\
rng   ranks 0-2  (3, 4)
list             [0, 1, 2, 3, 4, … 1,000 items]"""
    )


def test_folded_names_keep_what_differs() -> None:
    """Numbers fold only where every combination is there."""
    grid = [(f"h.{layer}.e.{expert}", "x") for layer in range(2) for expert in range(3)]
    assert folded_names(grid) == [("h.0,1.e.0-2", "x", 6)]
    assert folded_names(grid[:-1]) == [(name, "x", 1) for name, _ in grid[:-1]]


def test_json_is_the_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    """The document with shards is a manifest that reads back whole, with the totals beside it."""
    document = json.loads(ckpt(capsys, "inspect", FSDP, "--json", "--shards"))
    with open_checkpoint(FSDP) as checkpoint:
        expected = checkpoint.resolve()
    actual = from_json(document)
    assert actual.tensors.fqns == expected.tensors.fqns
    assert actual.chunks.offset.tolist() == expected.chunks.offset.tolist()
    assert document["url"] == str(FSDP)
    assert (document["step"], document["world_size"]) == (3, 4)
    assert document["nbytes"] == sum(tensor["nbytes"] for tensor in document["tensors"])
    assert document["nbytes"] == sum(total["nbytes"] for total in document["totals"])
    assert document["stored_nbytes"] == sum(found["payload_nbytes"] for found in document["by_file"])


KEYS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "tensors": {"fqn": str, "dtype": str, "shape": list, "nbytes": int, "section": str, "chunks": int},
    "chunks": {
        "fqn": str, "offsets": list, "sizes": list, "file": str, "offset": int, "length": int,
        "rank": (int, type(None)),
    },
    "files": {"path": str, "nbytes": int},
    "blobs": {"fqn": str, "kind": str, "path": list},
    "totals": {"section": str, "dtype": str, "n_tensors": int, "nbytes": int},
    "by_file": {
        "path": str, "nbytes": int, "n_chunks": int, "n_tensors": int, "payload_nbytes": int, "ranks": list,
    },
    "by_rank": {"rank": int, "n_chunks": int, "n_tensors": int, "payload_nbytes": int, "n_files": int},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["torch/dcp_fsdp2_4r_fp32", "torch/verl_2d", "torch/hf_sharded", "torch/hf_pytorch_bin"]
)
def test_json_schema(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The document of any format has the documented keys and types."""
    document = json.loads(ckpt(capsys, "inspect", FIXTURES / name / "ckpt", "--json", "--shards"))
    assert document["schema"] == "ckpt-tool/manifest/1"
    assert {"format", "root", "mesh", "info", "notes", "url", "step", "world_size", "nbytes", "stored_nbytes"} <= set(
        document
    )
    for key, fields in KEYS.items():
        for entry in document[key]:
            assert {field: isinstance(entry[field], kind) for field, kind in fields.items()} == dict.fromkeys(
                fields, True
            )


def test_json_without_shards(capsys: pytest.CaptureFixture[str]) -> None:
    """Chunks are in the document only when they were asked for."""
    assert "chunks" not in json.loads(ckpt(capsys, "inspect", FSDP, "--json"))


def test_json_objects(capsys: pytest.CaptureFixture[str]) -> None:
    """With --objects the values of objects are there."""
    document = json.loads(ckpt(capsys, "inspect", FSDP, "--json", "--objects"))
    values = {blob["fqn"]: blob.get("value", blob.get("text")) for blob in document["blobs"]}
    assert values["step"] == 3
    assert None not in [
        blob.get("value", blob.get("text", None)) for blob in document["blobs"] if blob["fqn"] == "step"
    ]


def test_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The Parquet file is the manifest too."""
    ckpt(capsys, "inspect", FSDP, "--parquet", tmp_path / "m.parquet", "--section", "model")
    found = from_parquet((tmp_path / "m.parquet").read_bytes())
    with open_checkpoint(FSDP) as checkpoint:
        expected = [meta.fqn for meta in checkpoint.manifest.tensors if meta.section == "model"]
    assert list(found.tensors.fqns) == expected


def test_quiet_prints_names(capsys: pytest.CaptureFixture[str]) -> None:
    """Quiet, the result is names alone, selected as ever."""
    printed = ckpt(
        capsys, "inspect", FSDP, "--quiet", "--tensor", "model.model.layers.*.q_proj.weight", "--exclude", "*.1.*"
    )
    assert printed.splitlines() == [f"model.model.layers.{n}.self_attn.q_proj.weight" for n in (0, 2)]
    assert ckpt(capsys, "inspect", FSDP, "-q", "--by", "rank").split() == ["0", "1", "2", "3"]
    assert sorted(ckpt(capsys, "inspect", FSDP, "-q", "--by", "file").split()) == [f"__{n}_0.distcp" for n in range(4)]


def test_selection_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The header counts what is listed, and of how many."""
    assert "  tensors  1 of 134, stored as" in ckpt(capsys, "inspect", FSDP, "--tensor", "model.lm_head.weight")


def test_map(capsys: pytest.CaptureFixture[str]) -> None:
    """A map of a real tensor: four bands, the file of each; exact bytes only when asked for."""
    printed = ckpt(capsys, "inspect", FSDP, "--map", "model.lm_head.weight")
    assert [line.split("│")[1].split() for line in printed.splitlines() if "│" in line] == [
        ["A", "r0"], ["B", "r1"], ["C", "r2"], ["D", "r3"],
    ]  # fmt: skip
    assert "__3_0.distcp\n" in printed
    document = json.loads(ckpt(capsys, "inspect", FSDP, "--map", "model.lm_head.weight", "--json", "--shards"))
    with open_checkpoint(FSDP) as checkpoint:
        manifest_ = checkpoint.resolve(["model.lm_head.weight"])
    rows = manifest_.chunks.rows_of(manifest_.tensor_id("model.lm_head.weight"))
    assert sorted(found["offset"] for found in document["chunks"]) == sorted(manifest_.chunks.offset[rows].tolist())


def test_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    """Optimizers are shown in one normal form, with the values of their hyperparameters."""
    printed = ckpt(capsys, "inspect", FSDP, "--optimizer")
    assert "lr: 0.01" in printed
    assert "model.layers.0-2.self_attn.q_proj.weight" in printed
    assert "exp_avg exp_avg_sq step" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tensor", "nothing.*"], "no tensor matches 'nothing.*'"),
        (["--map", "model.lm_head.weigth"], "no tensor 'model.lm_head.weigth'"),
    ],
)
def test_unknown_names(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is not there ends with 3 and names near ones."""
    assert main(["inspect", str(FSDP), *argv]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(FIXTURES.glob("*/*/ckpt")) if not path.match("*/torchtitan*/*")],
    ids=lambda path: path.parent.name,
)
@pytest.mark.parametrize("width", [80, 120])
def test_every_fixture_fits(
    path: Path, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every bundled checkpoint is shown, and no line of the tree is wider than the terminal."""
    monkeypatch.setenv("COLUMNS", str(width))
    lines = ckpt(capsys, "inspect", path).splitlines()
    assert lines[1].startswith("  format   ")
    assert max(len(line) for line in lines) <= width


def test_formats_are_listed_in_short(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line or two for each format; of those that are named also how they are told, and what proves them."""
    monkeypatch.setenv("COLUMNS", "120")
    listed = ckpt(capsys, "formats").splitlines()
    head = listed[0]
    assert head.split("  ") == ["format", *[""] * 6, " read", "write", "what it is"]
    [orbax] = [found for found in listed if found.startswith("orbax ")]
    assert orbax[head.index("what it is") :] == "Orbax (JAX): OCDBT or files, zarr 2 or 3"
    assert listed[-1] == "ckpt formats NAME tells how a format is recognised, and what it was tested with."
    told = ckpt(capsys, "formats", "orbax", "npz").splitlines()
    assert [found.split()[0] for found in told if not found.startswith(" ")] == ["format", "orbax", "npz"]
    assert sum(found.startswith("  told by ") for found in told) == 2
    assert not any("told by" in found for found in listed)
    monkeypatch.setenv("COLUMNS", "45")
    assert "    Orbax (JAX): OCDBT or files, zarr 2 or 3" in ckpt(capsys, "formats").splitlines()
    assert main(["formats", "hf"]) == 2
    assert capsys.readouterr().err.startswith("error: no format is called 'hf'\nhint: one of: ")


def test_formats(capsys: pytest.CaptureFixture[str]) -> None:
    """The proofs of the table of formats exist: checkpoints that are read as that format, or tests."""
    document = json.loads(ckpt(capsys, "formats", "--json"))
    assert [entry["name"] for entry in document["formats"] if not entry["what"]] == []
    unpacked = {"fixtures/megatron/checkpoints.tar.xz": CHECKPOINTS, "fixtures/zoo/checkpoints.tar.xz": zoo.CHECKPOINTS}
    for entry in document["formats"]:
        for proof in entry["proofs"]:
            path, _, inside = proof["evidence"].partition("!")
            assert (FIXTURES.parent / path).exists()
            if inside and path not in unpacked:
                unpacked[path] = zoo.extracted(FIXTURES.parent / path)
            evidence = unpacked[path] / inside if inside else FIXTURES.parent / path
            if proof["direction"] == "reads" and not path.endswith(".py"):
                with open_checkpoint(evidence) as checkpoint:
                    assert (proof["evidence"], checkpoint.format) == (proof["evidence"], entry["name"])
