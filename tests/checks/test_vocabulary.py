"""Tied copies are compared to their last byte, and padding of a vocabulary is looked at, where the files say so."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.checks.vocabulary import padding_findings, tied_findings
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.vocabulary import embedding_and_head
from tests.checks.synthetic import checkpoint_of, chunk, make, stored, tensor
from tests.formats.megatron.places import CHECKPOINTS

FIXTURES = Path(__file__).parents[2] / "fixtures"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = {"tie_word_embeddings": True}
WEIGHT = np.random.default_rng(0).standard_normal((400, 64), dtype=np.float32)  # 100 KiB


def changed(*places: tuple[int, int]) -> npt.NDArray[np.float32]:
    """``WEIGHT`` with other values there."""
    other = WEIGHT.copy()
    for place in places:
        other[place] += 1
    return other


def about(kind: str, report: Any) -> list[tuple[str, Severity, str | None, str]]:
    """Findings whose kind begins so."""
    return [(f.kind, f.severity, f.fqn, f.message) for f in report.findings if f.kind.startswith(kind)]


def model(folder: Path, config: dict[str, Any], tensors: dict[str, npt.NDArray[Any]], n_files: int = 1) -> Path:
    """A folder as transformers makes it, each tensor in a file of its own where there are two."""
    (folder / "config.json").write_text(json.dumps(config))
    if n_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = {fqn: f"model-{n:05}-of-{len(tensors):05}.safetensors" for n, fqn in enumerate(tensors, start=1)}
    for fqn, path in names.items():
        save_file({fqn: tensors[fqn]}, folder / path)
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("n_files", [1, 2])
def test_tied_copies_differ_behind_the_first_64_kib(tmp_path: Path, n_files: int) -> None:
    """The default level sees the beginning only; the full one gives the one verdict, with count and first index."""
    tensors = {EMBEDDING: WEIGHT, HEAD: changed((399, 5), (311, 63))}
    folder = model(tmp_path, TIED, tensors, n_files)
    [(kind, severity, fqn, said)] = about("tied", verify(folder, level="full"))
    assert (kind, severity, fqn) == ("tied-but-different", Severity.WARNING, HEAD)
    assert "differ in 2 of 25,600 elements, first at index [311, 63]" in said
    assert [kind for kind, *_ in about("tied", verify(folder))] == ["tied-stored-twice"]


def test_equal_tied_copies_are_a_remark_about_all_bytes(tmp_path: Path) -> None:
    """The remark of the full level names all bytes and replaces the default one's; both copies are counted."""
    folder = model(tmp_path, TIED, {EMBEDDING: WEIGHT, HEAD: WEIGHT})
    report = verify(folder, level="full")
    [(kind, severity, _, said)] = about("tied", report)
    assert (kind, severity) == ("tied-stored-twice", Severity.INFO)
    assert said.endswith("all their 102,400 bytes are equal")
    untied = verify(model(tmp_path, {}, {EMBEDDING: WEIGHT, HEAD: WEIGHT}), level="full")
    assert about("tied", untied) == []
    assert report.checked_nbytes - untied.checked_nbytes == 2 * WEIGHT.nbytes


@pytest.mark.parametrize(
    "info", [{"config": TIED}, {"args": {"untie_embeddings_and_output_weights": False}}, {"config": {}}]
)
def test_tied_copies_that_are_cut_differently(info: dict[str, Any]) -> None:
    """One by rows in three files, one by columns in two: the first index is that of the tensor."""
    embedding, files = stored({"embedding.word_embeddings.weight": WEIGHT}, 3)
    halves = np.split(changed((207, 40), (399, 0)), 2, axis=1)
    files |= {f"half_{i}.bin": np.ascontiguousarray(half).tobytes() for i, half in enumerate(halves)}
    records = [embedding.chunks.record(row, embedding.tensors, embedding.files) for row in range(3)]
    records += [
        chunk("output_layer.weight", Box((0, 32 * i), (400, 32)), FileRange(f"half_{i}.bin", 0, 400 * 32 * 4))
        for i in range(2)
    ]
    tensors = [*embedding.tensors, tensor("output_layer.weight", (400, 64))]
    report = verify(checkpoint_of(make(tensors, records, info=info), files), level="full", memory_budget_bytes=1 << 20)
    found = [said.partition("first at index ")[2].partition(";")[0] for *_, said in about("tied-but", report)]
    assert found == ([] if info == {"config": {}} else ["[207, 40]"])


def recorded(values: dict[str, npt.NDArray[Any]], info: dict[str, Any]) -> tuple[Manifest, Any, list[tuple[str, Box]]]:
    """A manifest of arrays, a reader of their boxes, and the list of what it read."""
    manifest, _ = stored(values)
    boxes: list[tuple[str, Box]] = []

    def read(fqn: str, box: Box) -> npt.NDArray[Any]:
        boxes.append((fqn, box))
        return values[fqn][tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]

    return manifest.replace(info=info), read, boxes


def test_memory_is_that_of_slabs() -> None:
    """No box that is read is larger than its share of the budget, and together they are the tensor."""
    manifest, read, boxes = recorded({EMBEDDING: WEIGHT, HEAD: WEIGHT}, {"config": TIED})
    found, nbytes = tied_findings(manifest, read, memory_budget_bytes=1 << 17, n_workers=2)
    assert ([f.kind for f in found], nbytes) == (["tied-stored-twice"], 2 * WEIGHT.nbytes)
    assert max(prod(box.sizes) * 4 for _, box in boxes) <= (1 << 17) // 16
    assert sum(prod(box.sizes) * 4 for _, box in boxes) == nbytes


def table(*used: int) -> npt.NDArray[np.float32]:
    """112 rows of which 100 have values, and ``used`` besides, in all columns but the first."""
    values = WEIGHT[:112].copy()
    values[[row for row in range(100, 112) if row not in used]] = 0
    values[list(used), 0] = 0
    return values


CONFIG = {"config": {"vocab_size": 100}}
ARGS = {"vocab_size": 100, "padded_vocab_size": 112, "make_vocab_size_divisible_by": 8, "tensor_model_parallel_size": 2}
UNSAID = {key: value for key, value in ARGS.items() if key != "padded_vocab_size"}
OUTPUT = "model.output_layer.weight"


@pytest.mark.parametrize(
    ("fqn", "info", "used", "severity", "said"),
    [
        (EMBEDDING, CONFIG, (), None, ""),
        (EMBEDDING, CONFIG, range(100, 112), Severity.INFO, "756 of their elements, in 12 rows, are not zero"),
        (EMBEDDING, CONFIG, (100, 101), Severity.INFO, "in 2 rows, are not zero, the first at index [100, 1]"),
        (EMBEDDING, CONFIG, (103, 105), Severity.WARNING, "126 of their elements, in 2 rows, are not zero, the first"),
        (EMBEDDING, CONFIG, (103,), Severity.WARNING, "the first at index [103, 1]"),
        (OUTPUT, {"args": ARGS}, (100,), None, ""),
        (OUTPUT, {"args": ARGS}, (101,), Severity.INFO, "are padding (args.vocab_size is 100, padded to 112)"),
        (OUTPUT, {"args": UNSAID}, (111,), Severity.WARNING, "padded to a multiple of 8 times 2 ranks"),
    ],
)  # fmt: skip
def test_values_in_padding(
    fqn: str, info: dict[str, Any], used: tuple[int, ...], severity: Severity | None, said: str
) -> None:
    """Values up to some row are an initialisation's, with zeros between they are not; Megatron's first row is open."""
    embedding = "model.embedding.word_embeddings.weight"
    values = {fqn: table(*used)} | ({} if fqn == EMBEDDING else {embedding: table()})
    manifest, read, boxes = recorded(values, info)
    found, nbytes = padding_findings(manifest, read, memory_budget_bytes=8 * 1024)
    expected = [] if severity is None else [("padding-not-zero", severity, fqn)]
    assert [(f.kind, f.severity, f.fqn) for f in found] == expected
    assert all(said in finding.message for finding in found)
    assert len(boxes) > len(values)  # several slabs of each, and no row of a token
    assert min(box.offsets[0] for _, box in boxes) == (100 if fqn == EMBEDDING else 101)
    assert nbytes == sum(4 * prod(box.sizes) for _, box in boxes)


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"config": {"vocab_size": 112}},
        {"config": {"vocab_size": 120}},
        {"config": {"vocab_size": "100"}},
        {"args": {"padded_vocab_size": 112}},
        {"args": {**ARGS, "padded_vocab_size": 128, "make_vocab_size_divisible_by": 64}},
        {"args": {"vocab_size": 100}},
    ],
)
def test_what_no_file_says_is_not_judged(info: dict[str, Any]) -> None:
    """No size, one that leaves no padding, or arguments that do not explain the rows: nothing is read."""
    for names in ((EMBEDDING,), ("embedding.word_embeddings.weight", "output_layer.weight")):
        manifest, read, boxes = recorded(dict.fromkeys(names, WEIGHT[:112]), info)
        assert (padding_findings(manifest, read, memory_budget_bytes=1 << 20), boxes) == (([], 0), [])


@pytest.mark.parametrize("name", ["td_full_t2p2d2", "legacy_t2p2", "dpr_uneven_p2", "td_full_t4p1"])
def test_padding_that_megatron_wrote(name: str) -> None:
    """Counts and first places are those of the rows as they are read; Megatron initialises padding like other rows."""
    path = CHECKPOINTS / name / "ckpt"
    expected = {}
    with open_checkpoint(path) as checkpoint:
        for fqn in ("model.embedding.word_embeddings.weight", "model.output_layer.weight"):
            rows = np.asarray(checkpoint[fqn][101:]).view(np.uint16).astype(bool)
            if rows.any():
                row, column = np.argwhere(rows)[0].tolist()
                expected[fqn] = (
                    f"but {rows.sum():,} of their elements, in {rows.any(axis=1).sum()} rows, are not zero, "
                )
                expected[fqn] += f"the first at index [{row + 101}, {column}]"
    found = about("padding", verify(path, level="full"))
    assert {fqn: severity for _, severity, fqn, _ in found} == dict.fromkeys(expected, Severity.INFO)
    assert all(expected[fqn or ""] in said for _, _, fqn, said in found)
    assert expected


def test_padding_of_a_real_model(tmp_path: Path) -> None:
    """A model that transformers saved has the rows that its config says; with three tokens less, three are padding."""
    folder = tmp_path / "ckpt"
    shutil.copytree(FIXTURES / "deepspeed/hf_st_tied/ckpt", folder)
    assert about("padding", verify(folder, level="full")) == []
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 128}))
    [(_, severity, fqn, said)] = about("padding", verify(folder, level="full"))
    assert (severity, fqn) == (Severity.INFO, EMBEDDING)
    assert (
        "rows 128 to 130 of 'model.embed_tokens.weight' are padding (config.json's vocab_size is 128), but 144 of"
        in said
    )
    assert about("padding", verify(folder)) == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["t.word_embeddings.weight", "lm_head.weight"], ("t.word_embeddings.weight", "lm_head.weight")),
        (["e.word_embeddings.weight", "output_layer.weight"], ("e.word_embeddings.weight", "output_layer.weight")),
        (["a.wte.weight", "b.wte.weight", "lm_head.weight"], (None, None)),
        (["layers.0.attention.output.weight"], (None, None)),
    ],
)
def test_names(names: list[str], expected: tuple[str | None, str | None]) -> None:
    """The pair that has a head comes before one that has none; what two tensors could be is neither."""
    assert embedding_and_head(names) == expected
