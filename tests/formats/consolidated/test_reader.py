"""Meta's consolidated files: parts join as the sizes prove, and not otherwise."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import CkptError, FormatError, LayoutError, NotFound
from ckpt_tool.formats.consolidated.reader import READER
from ckpt_tool.formats.consolidated.sizes import Cut, Sizes, cuts_of, sizes_of
from tests.formats.conformance import ReaderTests
from tests.formats.zoo import CHECKPOINTS, case
from tests.reports.made import as_bytes


class TestConsolidated(ReaderTests):
    """Both ways of cutting an embedding, with grouped queries and without."""

    reader = READER
    reader_import = "ckpt_tool.formats.consolidated.reader:READER"
    cases = (case("consolidated_llama2", max_read_requests=8), case("consolidated_llama3", max_read_requests=8))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"dim": 4096, "n_heads": 32, "multiple_of": 256}, 11_008),  # Llama 2 7B
        ({"dim": 5120, "n_heads": 40, "multiple_of": 256}, 13_824),  # 13B
        ({"dim": 8192, "n_heads": 64, "n_kv_heads": 8, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}, 28_672),  # 70B
        ({"dim": 4096, "n_heads": 32, "n_kv_heads": 8, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}, 14_336),  # 3 8B
        ({"dim": 16384, "n_heads": 128, "multiple_of": 4096, "ffn_dim_multiplier": 1.2}, 53_248),  # 3.1 405B
        ({"dim": 4096, "n_heads": 32, "hidden_dim": 14336}, 14_336),  # Mistral 7B
    ],
)
def test_inner_sizes_of_real_models(params: dict[str, Any], expected: int) -> None:
    """The inner size of the feed-forward follows from the others, as Meta computes it."""
    assert sizes_of(params, None).known["ffn"] == expected


def test_one_way_fits_where_sizes_are_known() -> None:
    """Squares are told by which side is whole; an unknown size leaves two ways."""
    sizes = Sizes({"dim": 8, "heads": 8}, "")
    assert cuts_of(("heads", "dim"), (4, 8), 2, sizes) == [Cut(0, (8, 8))]
    assert cuts_of(("dim", "heads"), (8, 4), 2, sizes) == [Cut(1, (8, 8))]
    assert cuts_of(("dim", "heads"), (8, 8), 2, sizes) == [Cut(None, (8, 8))]
    assert cuts_of(("vocab", "dim"), (5, 8), 2, sizes) == [Cut(None, (5, 8)), Cut(0, (10, 8))]
    assert cuts_of(("vocab", "dim"), (5, 3), 2, sizes) == []
    assert cuts_of(("dim",), (4, 4), 2, sizes) == []


def made(folder: Path, change: Callable[[int, dict[str, torch.Tensor]], None], **params: Any) -> Path:
    """The second checkpoint with another state per rank, and other parameters; None removes one."""
    target = shutil.copytree(CHECKPOINTS / "consolidated_llama3/ckpt", folder / "ckpt")
    for rank in range(2):
        path = target / f"consolidated.{rank:02d}.pth"
        state = torch.load(path)
        change(rank, state)
        torch.save(state, path)
    said = {**json.loads((target / "params.json").read_text()), **params}
    (target / "params.json").write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    return target


def test_without_params_the_norm_tells(tmp_path: Path) -> None:
    """Only the hidden size is known then; checksums decide the rest."""
    folder = made(tmp_path, lambda rank, state: None)
    (folder / "params.json").unlink()
    assert as_bytes(folder) == as_bytes(CHECKPOINTS / "consolidated_llama3/ckpt")


def test_params_below_a_key_of_their_own(tmp_path: Path) -> None:
    """Some files of Llama 3 have the sizes under ``model``."""
    folder = made(tmp_path, lambda rank, state: None)
    path = folder / "params.json"
    path.write_text(json.dumps({"model": json.loads(path.read_text())}))
    with open_checkpoint(folder) as checkpoint:
        assert "vocab 26" in checkpoint.manifest.notes[-1]


def test_params_of_another_model_are_refused(tmp_path: Path) -> None:
    """Sizes that fit no way name the weight and both numbers."""
    folder = made(tmp_path, lambda rank, state: None, dim=64)
    with pytest.raises(LayoutError, match=r"2 parts \[13, 32\] of vocab x dim fit no whole.*dim 64"):
        open_checkpoint(folder)


def test_replicas_that_differ_are_found(tmp_path: Path) -> None:
    """A norm is whole in each file by its size; its copies are compared."""

    def change(rank: int, state: dict[str, torch.Tensor]) -> None:
        state["norm.weight"][0] += rank

    report = verify(made(tmp_path, change))
    assert [(f.kind, f.fqn) for f in report.findings if f.severity.name == "ERROR"] == [
        ("different-replicas", "norm.weight")
    ]


def test_names_without_a_rule(tmp_path: Path) -> None:
    """A weight that nobody knows is compared, and an export asks how its parts join."""

    def change(rank: int, state: dict[str, torch.Tensor]) -> None:
        state["lora.weight"] = torch.full((2, 3), float(rank))
        state["odd.weight"] = torch.zeros(2 + rank, 3)
        state["same.weight"] = torch.ones(2)

    folder = made(tmp_path, change)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.manifest.info["replicated_by_assumption"] == ["lora.weight", "same.weight"]
        assert {"odd.weight@rank0", "odd.weight@rank1"} <= set(checkpoint)
    kinds = {(f.kind, f.fqn) for f in verify(folder).findings if f.severity.name == "ERROR"}
    assert kinds == {("different-replicas", "lora.weight"), ("different-shapes", "odd.weight")}
    with pytest.raises(CkptError, match=r"lora\.weight"):
        export(folder, tmp_path / "m.safetensors", exclude=["odd*"], names="source")


def test_a_missing_file(tmp_path: Path) -> None:
    """A gap among the numbers is told; one file of several is no model."""
    folder = made(tmp_path, lambda rank, state: None)
    shutil.copy(folder / "consolidated.01.pth", folder / "consolidated.03.pth")
    with pytest.raises(NotFound, match=r"consolidated\.02\.pth missing beside 3 files"):
        READER.read(_source(folder))


def _source(folder: Path) -> Any:
    from ckpt_tool.formats.base import Source
    from ckpt_tool.storage.open import open_store

    return Source(*open_store(folder))


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"[" * 200_000])
def test_damaged_params(text: bytes, tmp_path: Path) -> None:
    """Settings that are none are an error, not a guess."""
    folder = made(tmp_path, lambda rank, state: None)
    (folder / "params.json").write_bytes(text)
    with pytest.raises(FormatError, match=r"params\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["consolidated_llama2", "consolidated_llama3"])
def test_the_export_is_what_transformers_makes_of_it(name: str, tmp_path: Path) -> None:
    """Names and bytes of every tensor are those of transformers' own converter of Meta's files (4.46.3)."""
    export(CHECKPOINTS / name / "ckpt", tmp_path / "m.safetensors", durable=False)
    expected = json.loads((CHECKPOINTS / name / "hf.json").read_text())
    ours = as_bytes(tmp_path / "m.safetensors")
    assert {fqn: hashlib.sha256(data).hexdigest() for fqn, (_, _, data) in ours.items()} == expected


def test_export_has_the_names_of_transformers(tmp_path: Path) -> None:
    """Rotary pairs become halves by the heads that params.json tells; the tables of the vocabulary keep their rows."""
    source = CHECKPOINTS / "consolidated_llama3/ckpt"
    export(source, tmp_path / "m.safetensors", exclude=["rope.freqs"], durable=False)
    ours = as_bytes(tmp_path / "m.safetensors")
    truth = as_bytes(source)
    assert ours["model.embed_tokens.weight"] == truth["tok_embeddings.weight"]
    for theirs, mine, heads in (("wq", "q_proj", 4), ("wk", "k_proj", 2)):
        kind, shape, data = truth[f"layers.0.attention.{theirs}.weight"]
        pairs = np.frombuffer(data, np.uint16).reshape(heads, shape[0] // heads // 2, 2, shape[1])
        halves = np.ascontiguousarray(pairs.swapaxes(1, 2)).tobytes()
        assert ours[f"model.layers.0.self_attn.{mine}.weight"] == (kind, shape, halves)


@pytest.mark.parametrize("gone", ["consolidated.00.pth", "consolidated.01.pth"])
@pytest.mark.parametrize("how", ["missing", "empty", "cut", "another file"])
def test_one_part_of_two_is_not_whole(tmp_path: Path, gone: str, how: str) -> None:
    """Sizes of params.json, or the first number, tell that another part was there; nothing is exported."""
    shutil.copytree(CHECKPOINTS / "consolidated_llama2/ckpt", tmp_path / "c")
    path = tmp_path / "c" / gone
    raw = path.read_bytes()
    path.unlink()
    if how != "missing":
        path.write_bytes({"empty": b"", "cut": raw[: len(raw) // 2], "another file": b"?" + raw[1:]}[how])
    try:
        report = verify(tmp_path / "c")
    except CkptError as error:
        assert "consolidated.0" in str(error)  # noqa: PT017 - a report that is not good will do as well
    else:
        assert not report.is_ok
    with pytest.raises(CkptError):
        export(tmp_path / "c", tmp_path / "out", durable=False)
