"""An edit changes names and what is there, never a payload byte, and leaves the source alone unless told otherwise."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ckpt_tool.api.convert.edit import EditResult, NameChanges, edit
from ckpt_tool.api.convert.edit_names import parse_rename
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import CoverageError, FormatError, NotFound, TargetExists, Unsupported, UsageError
from tests.reports.made import as_bytes, put, safetensors_bytes

FIXTURES = Path(__file__).parents[2] / "fixtures"
HF = FIXTURES / "torch/hf_sharded/ckpt"
DCP = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"


def changed(source: Path, target: Path | str | None, **options: Any) -> EditResult:
    """An edit, where most options are names."""
    names = {key: options.pop(key) for key in list(options) if key in NameChanges.__dataclass_fields__}
    return edit(source, target, changes=NameChanges(**names), durable=False, **options)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("source", [HF, DCP], ids=["safetensors", "dcp"])
def test_renamed(tmp_path: Path, source: Path) -> None:
    """Other names, the same bytes, types and shapes; files beside the tensors are taken over, the source stays."""
    before, files = as_bytes(source), contents(source)
    result = changed(source, tmp_path / "out", rename=[(r"layers\.(\d+)\.", r"blocks.\1.")])
    expected = {fqn.replace("layers.", "blocks."): value for fqn, value in before.items()}
    assert as_bytes(tmp_path / "out") == expected
    assert len(result.renamed) == sum("layers." in fqn for fqn in before)
    assert contents(source) == files
    assert set(contents(tmp_path / "out")) == set(files)
    assert verify(tmp_path / "out", level="full").is_ok
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_names_loaded_by_torch(tmp_path: Path) -> None:
    """Torch loads a renamed DCP checkpoint; its data files are the old ones, linked or cloned."""
    result = changed(DCP, tmp_path / "out", rename=[("^model", "net")])
    assert result.taken_over.copied_nbytes == 0
    assert result.taken_over.linked_nbytes + result.taken_over.cloned_nbytes > 0
    before = as_bytes(DCP)
    fqn = next(name for name in before if name.startswith("model."))
    state = {fqn.replace("model", "net", 1): torch.empty(before[fqn][1])}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert next(iter(state.values())).numpy().tobytes() == before[fqn][2]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_optimizer_dropped_from_dcp(tmp_path: Path) -> None:
    """Without the optimizer, files hold only what is left, item by item, and torch loads it."""
    before = as_bytes(DCP)
    result = changed(DCP, tmp_path / "out", drop_optimizer=True)
    after = as_bytes(tmp_path / "out")
    assert after == {fqn: value for fqn, value in before.items() if not fqn.startswith("optim")}
    assert {each.why for each in result.dropped} == {"optimizer state"}
    size = sum(map(len, contents(tmp_path / "out").values()))
    assert size < 0.6 * sum(map(len, contents(DCP).values()))
    assert verify(tmp_path / "out", level="full").is_ok
    fqn = next(iter(after))
    state = {fqn: torch.empty(after[fqn][1])}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state[fqn].numpy().tobytes() == after[fqn][2]


def test_names_that_are_meant_otherwise(tmp_path: Path) -> None:
    """A word in front of a dot is no pattern for what is below it, and no prefix without its dot: both are said."""
    with pytest.raises(UsageError, match="nothing matches --drop 'model'") as caught:
        changed(DCP, tmp_path / "out", drop=["model"])
    assert (caught.value.hint or "").startswith("'model.*' fits ")
    with pytest.raises(UsageError, match="with a dot in front") as caught:
        changed(DCP, tmp_path / "out", strip_prefixes=["model"])
    assert caught.value.hint == "take its dot off too: --strip-prefix model."
    assert not (tmp_path / "out").exists()


def test_dropped_from_shards(tmp_path: Path) -> None:
    """Of a shard that loses tensors the header is new, others are linked; index and total_size are right."""
    before = as_bytes(HF)
    result = changed(HF, tmp_path / "out", drop=["*.mlp.*"])
    after = as_bytes(tmp_path / "out")
    assert after == {fqn: value for fqn, value in before.items() if ".mlp." not in fqn}
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(after)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in after.values())
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert {fqn: value.tobytes() for fqn, value in load_file(path).items()} == {
            fqn: after[fqn][2] for fqn, name in index["weight_map"].items() if name == path.name
        }
    assert result.n_tensors == len(after)


@pytest.mark.parametrize("link", ["auto", "hard", "copy"])
def test_links(tmp_path: Path, link: str) -> None:
    """Files that stay as they are get a second name only where that is asked for, or nothing else is cheap."""
    (tmp_path / "s").mkdir()
    save_file({"a.w": np.ones(4)}, tmp_path / "s/model-00001-of-00002.safetensors")
    save_file({"b.w": np.ones(4)}, tmp_path / "s/model-00002-of-00002.safetensors")
    result = changed(tmp_path / "s", tmp_path / "out", rename=[("^a", "c")], link=link)
    same = os.path.samefile(
        tmp_path / "s/model-00002-of-00002.safetensors", tmp_path / "out/model-00002-of-00002.safetensors"
    )
    assert same is (result.taken_over.linked_nbytes > 0)
    assert same is (link == "hard") or link == "auto"
    assert set(as_bytes(tmp_path / "out")) == {"c.w", "b.w"}
    assert (tmp_path / "out/model.safetensors.index.json").exists()


def test_wrappers(tmp_path: Path) -> None:
    """What DDP, FSDP, torch.compile and activation checkpointing insert goes, wherever it stands."""
    names = [
        "module.layers.0._fsdp_wrapped_module._orig_mod.w",
        "module.layers.1._checkpoint_wrapped_module.w",
        "module.module.w",
    ]
    save_file({name: np.full(2, i, "f4") for i, name in enumerate(names)}, tmp_path / "m.safetensors")
    changed(tmp_path / "m.safetensors", tmp_path / "out.safetensors", strip_wrappers=True)
    assert list(load_file(tmp_path / "out.safetensors")) == ["layers.0.w", "layers.1.w", "w"]
    with pytest.raises(UsageError, match="no name has anything that --strip-wrappers takes out"):
        changed(tmp_path / "out.safetensors", tmp_path / "again.safetensors", strip_wrappers=True)
    assert not (tmp_path / "again.safetensors").exists()
    changed(tmp_path / "m.safetensors", tmp_path / "b.safetensors", strip_prefixes=["module.layers.", "module."])
    assert "0._fsdp_wrapped_module._orig_mod.w" in load_file(tmp_path / "b.safetensors")


def test_metadata(tmp_path: Path) -> None:
    """Text of the header is set and removed; payload and names stay."""
    save_file({"w": np.arange(3.0)}, tmp_path / "m.safetensors", metadata={"format": "pt", "old": "1"})
    edit(tmp_path / "m.safetensors", tmp_path / "o.safetensors", metadata={"old": None, "by": "me"}, durable=False)
    with safe_open(tmp_path / "o.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt", "by": "me"}
        assert file.get_tensor("w").tolist() == [0, 1, 2]


def test_torch_file(tmp_path: Path) -> None:
    """A torch.save file is written anew: names, nesting and objects as they were, without the optimizer."""
    model = {"module.w": torch.arange(6.0).reshape(2, 3), "module.b": torch.ones(2, dtype=torch.bfloat16)}
    optimizer = {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"model": model, "optimizer": optimizer, "step": 7}, tmp_path / "a.pt")
    changed(tmp_path / "a.pt", tmp_path / "b.pt", rename=[(r"module\.", "")], drop_optimizer=True)
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert loaded["step"] == 7
    flat = loaded.get("model", loaded)
    found = {key.removeprefix("model."): value for key, value in {**loaded, **flat}.items() if torch.is_tensor(value)}
    assert torch.equal(found["w"], model["module.w"])
    assert torch.equal(found["b"], model["module.b"])
    assert "optimizer" not in loaded


def test_in_place(tmp_path: Path) -> None:
    """Nothing is changed in place unprompted; with the word for it the old one is swapped for the new one at once."""
    shutil.copytree(HF, tmp_path / "hf")
    before = as_bytes(tmp_path / "hf")
    with pytest.raises(UsageError, match="name where the result goes"):
        changed(tmp_path / "hf", None, drop=["lm_head*"])
    with pytest.raises(UsageError, match="a target and --in-place exclude each other"):
        edit(tmp_path / "hf", tmp_path / "other", in_place=True, fix_index=True)
    with pytest.raises(UsageError, match="source and target at once"):
        changed(tmp_path / "hf", tmp_path / "." / "hf", drop=["lm_head*"])
    with pytest.raises(TargetExists):
        changed(HF, tmp_path / "hf", drop=["lm_head*"])
    changed(tmp_path / "hf", None, drop=["lm_head*"], in_place=True)
    assert set(as_bytes(tmp_path / "hf")) == {fqn for fqn in before if not fqn.startswith("lm_head")}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    assert set(contents(tmp_path / "hf")) == set(contents(HF))


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_in_place_keeps_permissions(tmp_path: Path, name: str) -> None:
    """A file that others may not read stays so, also one of a folder, and the folder; a link's other names do not."""
    put(tmp_path, {"d/model.safetensors": safetensors_bytes({"m.w": ("F32", [1], bytes(4))}), "d/config.json": b"{}"})
    torch.save({"m.w": torch.ones(2)}, tmp_path / "a.pt")
    save_file({"m.w": np.ones(2)}, tmp_path / "a.safetensors")
    os.chmod(tmp_path / name, 0o600)
    changed(tmp_path / name, None, rename=[("^m", "n")], in_place=True)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    for path, mode in (("d/model.safetensors", 0o640), ("d/config.json", 0o604), ("d", 0o700)):
        os.chmod(tmp_path / path, mode)
    changed(tmp_path / "d", None, rename=[("^m", "n")], in_place=True)
    modes = [(tmp_path / path).stat().st_mode & 0o777 for path in ("d/model.safetensors", "d/config.json", "d")]
    assert modes == [0o640, 0o604, 0o700]


def test_an_overwritten_link_leaves_the_source_its_permissions(tmp_path: Path) -> None:
    """What is taken over as a hard link is the source's own file too."""
    put(tmp_path / "in", {"model.safetensors": safetensors_bytes({"w": ("F32", [1], bytes(4))}), "notes.md": b"x"})
    put(tmp_path / "out", {"notes.md": b"y"})
    os.chmod(tmp_path / "in/notes.md", 0o644)
    os.chmod(tmp_path / "out/notes.md", 0o600)
    changed(tmp_path / "in", tmp_path / "out", rename=[("w", "v")], link="hard", overwrite=True)
    assert (tmp_path / "in/notes.md").stat().st_mode & 0o777 == 0o644


def test_a_pattern_of_everything_replaces_once(tmp_path: Path) -> None:
    """``.*`` finds nothing more behind the end of a name."""
    source = put(tmp_path / "in", {"model.safetensors": safetensors_bytes({"w": ("F32", [1], bytes(4))})})
    assert changed(source, tmp_path / "out", rename=[(".*", "v")]).renamed == (("w", "v"),)


def test_a_failure_leaves_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit in place that fails on its way changes nothing and leaves nothing."""
    shutil.copytree(HF, tmp_path / "hf")
    before = contents(tmp_path / "hf")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ckpt_tool.storage.local.target.copy_range", full)
    with pytest.raises(Exception, match="no room"):
        changed(tmp_path / "hf", None, drop=["*.mlp.*"], in_place=True)
    assert contents(tmp_path / "hf") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "collision": ({"rename": [(r"\d+", "0")]}, UsageError, "would both be called"),
    "no name": ({"rename": [(".*", "")]}, UsageError, "nothing would be left of the name"),
    "no fit": ({"rename": [("nothing_like_it", "x")]}, UsageError, "no name matches"),
    "no prefix": ({"strip_prefixes": ["nothing_like_it."]}, UsageError, "no name begins with --strip-prefix"),
    "no glob": ({"drop": ["nothing_like_it*"]}, UsageError, "nothing matches --drop"),
    "all": ({"drop": ["*"]}, NotFound, "is left"),
    "no optimizer": ({"drop_optimizer": True}, NotFound, "no optimizer state"),
    "bad pattern": ({"rename": [("(", "x")]}, UsageError, "cannot be mapped"),
    "nothing": ({}, UsageError, "nothing to change"),
    "link": ({"drop": ["lm_head*"], "link": "soft"}, UsageError, "not a way to take files over"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(tmp_path: Path, case: tuple[dict[str, Any], type[Exception], str]) -> None:
    """What would lose or confuse names is refused before anything is written."""
    options, error, said = case
    with pytest.raises(error, match=said):
        changed(HF, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_formats_that_are_not_edited(tmp_path: Path) -> None:
    """A format whose names lie in more than its headers is refused with what to do instead."""
    source = next(iter(sorted((FIXTURES / "bytecheckpoint").glob("*/ckpt"))))
    with pytest.raises(Unsupported, match="is not edited"):
        changed(source, tmp_path / "o", rename=[("w", "v")])


def test_r92_fix_index(tmp_path: Path) -> None:
    """R92: total_size and weight_map are what the headers say; a file that is missing is not papered over."""
    shutil.copytree(HF, tmp_path / "hf")
    path = tmp_path / "hf/model.safetensors.index.json"
    index = json.loads(path.read_text())
    expected = sum(len(data) for _, _, data in as_bytes(HF).values())
    first, second = list(index["weight_map"])[:2]
    index["metadata"]["total_size"] = 1
    index["weight_map"] |= {first: index["weight_map"][second], "ghost": index["weight_map"][second]}
    path.write_text(json.dumps(index))
    assert "total-size" in {finding.kind for finding in verify(tmp_path / "hf").findings}
    edit(tmp_path / "hf", in_place=True, fix_index=True, durable=False)
    fixed = json.loads(path.read_text())
    assert fixed["metadata"]["total_size"] == expected
    assert set(fixed["weight_map"]) == set(as_bytes(HF))
    assert not {f.kind for f in verify(tmp_path / "hf").findings} & {
        "total-size",
        "index-wrong-file",
        "index-ghost-tensor",
    }
    min((tmp_path / "hf").glob("*.safetensors")).unlink()
    with pytest.raises(CoverageError, match="would be lost"):
        edit(tmp_path / "hf", in_place=True, fix_index=True, durable=False)


@pytest.mark.parametrize("how", ["copy", "drop"])
def test_r89_shared_bytes(tmp_path: Path, how: str) -> None:
    """R89: two names with the same offsets are invalid; each gets its own bytes, or one goes, as one says."""
    data = np.arange(4, dtype="<f4").tobytes()
    raw = safetensors_bytes({"a": ("F32", [4], data), "b": ("F32", [4], b"")}, offsets={"a": (0, 16), "b": (0, 16)})
    put(tmp_path, {"m.safetensors": raw})
    assert not verify(tmp_path / "m.safetensors").is_ok
    with pytest.raises(FormatError, match="have the same bytes"):
        changed(tmp_path / "m.safetensors", tmp_path / "o.safetensors", rename=[("a", "x")])
    result = edit(tmp_path / "m.safetensors", tmp_path / "o.safetensors", repair=how, durable=False)
    assert verify(tmp_path / "o.safetensors").is_ok
    loaded = load_file(tmp_path / "o.safetensors")
    assert set(loaded) == ({"a", "b"} if how == "copy" else {"a"})
    assert all(value.tobytes() == data for value in loaded.values())
    assert "same bytes" in " ".join(result.notes)


def test_renaming_text() -> None:
    r"""A pattern may hold ``=`` behind a backslash."""
    assert parse_rename(r"a\=b=c") == ("a=b", "c")
    assert parse_rename("a=") == ("a", "")
    with pytest.raises(UsageError):
        parse_rename("a")


def test_remote(tmp_path: Path) -> None:
    """A target without links is written byte by byte."""
    changed(HF, "memory://edit/hf", rename=[("^model", "net")])
    assert set(as_bytes("memory://edit/hf")) == {
        "net" + fqn.removeprefix("model") if fqn.startswith("model") else fqn for fqn in as_bytes(HF)
    }
