"""An adapter beside its base: one folder and index, each tensor's bytes and name as they were, payload linked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.api.convert.edit import NameChanges, edit
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.cli.app import main
from ckpt_tool.errors import CkptError, LayoutError, Unsupported, UsageError
from tests.reports.made import as_bytes

FIXTURES = Path(__file__).parents[2] / "fixtures"
ADAPTER = FIXTURES / "deepspeed/peft_lora/ckpt"
"""What PEFT saved for a Llama of hidden size 48, with q_proj and v_proj adapted and lm_head saved whole."""


def base(folder: Path, *, hidden: int = 48, layers: int = 2, files: int = 2) -> Path:
    """The model that the adapter is for, as far as it matters."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(1)
    sizes = {"model.embed_tokens.weight": (131, hidden), "lm_head.weight": (131, hidden)}
    for layer in range(layers):
        attention = f"model.layers.{layer}.self_attn"
        sizes |= {f"{attention}.q_proj.weight": (48, hidden), f"{attention}.v_proj.weight": (24, hidden)}
    tensors = {fqn: rng.random(shape, dtype=np.float32) for fqn, shape in sizes.items()}
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names = [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
        parts = {name: dict(list(tensors.items())[number::files]) for number, name in enumerate(names)}
        for name, part in parts.items():
            save_file(part, folder / name)
        weight_map = {fqn: name for name, part in parts.items() for fqn in part}
        total = sum(array.nbytes for array in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "README.md").write_text("the base")
    return folder


@pytest.mark.parametrize("files", [1, 2])
def test_one_listing(tmp_path: Path, files: int) -> None:
    """All of both is there, linked; the index names every tensor; the adapter's config is kept byte for byte."""
    source = base(tmp_path / "base", files=files)
    done = edit(source, tmp_path / "out", adapter=ADAPTER, link="hard", durable=False)
    assert as_bytes(tmp_path / "out") == as_bytes(source) | as_bytes(ADAPTER)
    assert done.taken_over.copied_nbytes == 0
    assert (tmp_path / "out/adapter_config.json").read_bytes() == (ADAPTER / "adapter_config.json").read_bytes()
    assert (tmp_path / "out/README.md").read_text() == "the base"
    assert any("README.md of the adapter: left out" in note for note in done.notes)
    assert any("8 factors of weights and 1 weight in their place; nothing is added up" in note for note in done.notes)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    everything = load_file(ADAPTER / "adapter_model.safetensors")
    assert {fqn for fqn, file in index["weight_map"].items() if file == "adapter_model.safetensors"} == set(everything)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in as_bytes(tmp_path / "out").values())
    report = verify(tmp_path / "out", level="full")
    assert [f.kind for f in report.findings if f.severity > 0] == []


def test_other_changes_go_with_it(tmp_path: Path) -> None:
    """Names are changed and tensors dropped on both sides; without its weights the base's come back as they were."""
    source = base(tmp_path / "base")
    changes = NameChanges(rename=[(r"^base_model\.model\.", "adapter.")], drop=["*lm_head*"])
    edit(source, tmp_path / "out", adapter=ADAPTER, changes=changes, durable=False)
    names = set(as_bytes(tmp_path / "out"))
    assert "adapter.model.layers.1.self_attn.v_proj.lora_B.weight" in names
    assert not any("lm_head" in name for name in names)
    edit(tmp_path / "out", tmp_path / "back", changes=NameChanges(drop=["adapter.*"]), durable=False)
    expected = {fqn: value for fqn, value in as_bytes(source).items() if fqn != "lm_head.weight"}
    assert as_bytes(tmp_path / "back") == expected


def test_refused(tmp_path: Path) -> None:
    """An adapter of another model, no adapter, names that both have, formats without headers of their own."""
    whole = base(tmp_path / "base")
    other = base(tmp_path / "other", layers=1)
    wide = base(tmp_path / "wide", hidden=64)
    named = tmp_path / "named"
    shutil.copytree(ADAPTER, named)
    save_file({"lm_head.weight": np.ones((131, 48), "f4")}, named / "adapter_model.safetensors")
    dcp = FIXTURES / "torch/dcp_zstd/ckpt"
    cases: list[tuple[Path, Path, type[CkptError], str]] = [
        (other, ADAPTER, LayoutError, "adapts a weight that .* does not have"),
        (wide, ADAPTER, LayoutError, r"in place of 'lm_head.weight'|no side of it is 48"),
        (whole, other, UsageError, "no adapter"),
        (whole, named, UsageError, "both have a tensor 'lm_head.weight'"),
        (dcp, ADAPTER, Unsupported, "SRC is dcp, expected a folder of safetensors files"),
        (base(tmp_path / "one", files=1) / "model.safetensors", ADAPTER, UsageError, "SRC is a single file"),
    ]
    for source, adapter, error, said in cases:
        with pytest.raises(error, match=said):
            edit(source, tmp_path / "out", adapter=adapter, durable=False)
    assert not (tmp_path / "out").exists()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line."""
    source = base(tmp_path / "base")
    status = main(["edit", str(source), str(tmp_path / "out"), "--adapter", str(ADAPTER), "--no-fsync"])
    assert status == 0
    assert "nothing is added up" in " ".join(capsys.readouterr().out.split())
    assert set(as_bytes(tmp_path / "out")) == set(as_bytes(source)) | set(as_bytes(ADAPTER))
