"""Arguments in, api call out: what a command line asks for is what the api is asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ckpt_tool.cli.app import main
from ckpt_tool.engine.team import Share
from ckpt_tool.errors import UsageError

GIB = 1 << 30

RESHARD = {
    "mesh": None, "tp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": None, "vpp": 1, "first_stage_layers": None,
    "last_stage_layers": None, "to": "dcp", "zero_stage": None, "rules": None, "default": None, "dp_mode": "shard",
    "replicas": "auto", "dtype": None, "include": (), "exclude": (), "rank_state": None, "unequal": None, "flat": None,
    "optim_style": None,
    "memory_budget_bytes": GIB, "n_workers": None,
}  # fmt: skip
MEGATRON: dict[str, Any] = {"config": None, "arguments": {}, "mcore_version": None}
NAMES: dict[str, Any] = {"names": "source", "family": "auto", "naming": None, "facts": {}, "true_vocab": None}
RUN = {"overwrite": False, "resume": False, "durable": True, "digest": "beside"}
EXPORT: dict[str, Any] = {
    "to": None, "everything": False, "names": "hf", "family": "auto", "naming": None, "facts": {},
    "true_vocab": None, "include": (), "exclude": (), "dtype": None, "masters": False,
    "tied": "auto", "unequal": None, "flat": None, "max_shard_nbytes": None, "share_blocks": False,
    "memory_budget_bytes": GIB, "n_workers": None,
}  # fmt: skip


class Recorder:
    """Stands in for an api function: keeps its arguments and ends the command."""

    def __init__(self) -> None:
        self.args: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Record, and refuse."""
        self.args, self.options = args, options
        raise UsageError("recorded")


@pytest.mark.parametrize(
    ("argv", "args", "options"),
    [
        ("A B", ("A", "B"), {}),
        ("A B --tp 4 --pp 2 --dp 8 --ep 4 --etp 2", ("A", "B"), {"tp": 4, "pp": 2, "dp": 8, "ep": 4, "etp": 2}),
        ("A B --pp 2 --vpp 2 --first-stage-layers 3 --last-stage-layers 1", ("A", "B"),
         {"pp": 2, "vpp": 2, "first_stage_layers": 3, "last_stage_layers": 1}),
        ("A B --mesh pp=2,dp=4,tp=2", ("A", "B"), {"mesh": "pp=2,dp=4,tp=2"}),
        ("A B --to rank-files --dp-mode replicate", ("A", "B"), {"to": "rank-files", "dp_mode": "replicate"}),
        ("A B --rules r.toml --default shard0", ("A", "B"), {"rules": "r.toml", "default": "shard0"}),
        ("A B --replicas all --rank-state drop", ("A", "B"), {"replicas": "all", "rank_state": "drop"}),
        ("A B --to deepspeed --zero-stage 3", ("A", "B"), {"to": "deepspeed", "zero_stage": 3}),
        ("A B --to megatron-dist --mcore-version 0.12 --rng emit --config c.json --arg n=8 --arg a=b", ("A", "B"),
         {"to": "megatron-dist", "mcore_version": "0.12", "rank_state": "emit", "config": "c.json",
          "arguments": {"n": 8, "a": "b"}}),
        ("A B --optim-style fqn-flat", ("A", "B"), {"optim_style": "fqn-flat"}),
        ("A B --names hf --family llama --naming f.toml --fact heads=4 --true-vocab 9", ("A", "B"),
         {"names": "hf", "family": "llama", "naming": "f.toml", "facts": {"heads": 4}, "true_vocab": 9}),
        ("A B --unequal first", ("A", "B"), {"unequal": ["first"]}),
        ("A B --dtype bf16 --include a.* --exclude b --tensor c", ("A", "B"),
         {"dtype": "bf16", "include": ["a.*", "c"], "exclude": ["b"]}),
        ("A B --memory 64MiB --workers 3", ("A", "B"), {"memory_budget_bytes": 64 << 20, "n_workers": 3}),
        ("A B --overwrite --no-fsync", ("A", "B"), {"overwrite": True, "durable": False}),
        ("A B --resume --no-digest", ("A", "B"), {"resume": True, "digest": None}),
        ("A B --write-manifest m.json", ("A", "B"), {"digest": "m.json"}),
        ("A B --no-sidecar", ("A", "B"), {"sidecar": False}),
        ("A B --split 0/1", ("A", "B"), {}),
        ("A B --split 1/4 --workers 2", ("A", "B"), {"share": Share(1, 4), "n_workers": 2}),
    ],
)  # fmt: skip
def test_reshard(argv: str, args: tuple[str, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """``ckpt reshard`` hands every option on, and the defaults of those that are not given."""
    recorder = Recorder()
    monkeypatch.setattr("ckpt_tool.api.convert.reshard.prepare_reshard", recorder)
    assert main(["reshard", *argv.split()]) == 2
    named = dict(zip(("source", "target"), args, strict=True))
    assert recorder.options == {**RESHARD, **NAMES, **MEGATRON, **RUN, "sidecar": None, **named, **options}


def test_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ckpt plan`` is a reshard without a target or a run."""
    recorder = Recorder()
    monkeypatch.setattr("ckpt_tool.api.convert.reshard.prepare_reshard", recorder)
    assert main(["plan", "A", "--tp", "2", "--memory", "1GB"]) == 2
    named = {"source": "A", "target": "memory://plan", "tp": 2, "memory_budget_bytes": 10**9}
    assert recorder.options == {**RESHARD, **NAMES, **MEGATRON, **RUN, "sidecar": None, **named}


def test_plan_has_the_options_of_reshard(capsys: pytest.CaptureFixture[str]) -> None:
    """But not those of writing."""
    listed = {}
    for command in ("plan", "reshard"):
        assert main([command, "--help"]) == 0
        listed[command] = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    only_reshard = listed["reshard"] - listed["plan"]
    assert listed["plan"] < listed["reshard"]
    assert {"--overwrite", "--resume", "--processes", "--dry-run"} <= only_reshard
    assert not only_reshard & {"--tp", "--names", "--family", "--arg", "--optim-style", "--memory", "--plan-json"}


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        ("", {}),
        ("--all --names source --to dcp", {"everything": True, "names": "source", "to": "dcp"}),
        ("--max-shard-size 5GB --tied keep --unequal first --share-blocks",
         {"max_shard_nbytes": 5 * 10**9, "tied": "keep", "unequal": ["first"], "share_blocks": True}),
        ("--family llama --naming f.toml --fact heads=4 --fact kv_heads=2 --true-vocab 100",
         {"family": "llama", "naming": "f.toml", "facts": {"heads": 4, "kv_heads": 2}, "true_vocab": 100}),
        ("--include a --exclude b --dtype fp32", {"include": ["a"], "exclude": ["b"], "dtype": "fp32"}),
        ("--memory 2GiB --workers 1 --overwrite --resume --no-fsync",
         {"memory_budget_bytes": 2 * GIB, "n_workers": 1, "overwrite": True, "resume": True, "durable": False}),
    ],
)  # fmt: skip
def test_export(argv: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """``ckpt export`` hands every option on, and the defaults of those that are not given."""
    recorder = Recorder()
    monkeypatch.setattr("ckpt_tool.api.convert.export.prepare_export", recorder)
    assert main(["export", "A", "B", *argv.split()]) == 2
    assert recorder.options == {"source": "A", "target": "B", **EXPORT, **RUN, **options}


@pytest.mark.parametrize(
    ("argv", "level", "n_workers"),
    [("", "default", None), ("--quick", "quick", None), ("--full --workers 2", "full", 2)],
)
def test_verify(argv: str, level: str, n_workers: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ckpt verify`` names one of three levels."""
    recorder = Recorder()
    monkeypatch.setattr("ckpt_tool.api.trust.verify.verify", recorder)
    assert main(["verify", "A", *argv.split()]) == 2
    assert recorder.args == ("A",)
    against = {"manifest": None, "strip_prefixes": (), "require_all": False, "against": None}
    options = {"level": level, "memory_budget_bytes": GIB, "n_workers": n_workers, "progress": None}
    assert recorder.options == {**options, **against}


def test_verify_against_a_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are mapped and completeness is asked for only where there is a manifest."""
    recorder = Recorder()
    monkeypatch.setattr("ckpt_tool.api.trust.verify.verify", recorder)
    argv = ["--manifest", "m", "--strip-prefix", "a.", "--strip-prefix", "b.", "--require-all"]
    assert main(["verify", "A", *argv]) == 2
    options = {key: recorder.options[key] for key in ("manifest", "strip_prefixes", "require_all")}
    assert options == {"manifest": "m", "strip_prefixes": ["a.", "b."], "require_all": True}


def test_cat(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ckpt cat`` hands the slice on as it was typed."""
    recorder = Recorder()
    monkeypatch.setattr("ckpt_tool.api.cat.cat", recorder)
    assert main(["cat", "A", "w[0:2, :]", "--memory", "64MiB"]) == 2
    assert (recorder.args, recorder.options) == (("A", "w[0:2, :]"), {"memory_budget_bytes": 64 << 20})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nonsense"], "no such command"),
        (["inspect"], "missing argument"),
        (["inspect", "A", "--nonsense"], "no such option: --nonsense"),
        (["inspect", "A", "--by", "colour"], "--by: expected tensor, file or rank, got 'colour'"),
        (["inspect", "A", "--json", "--quiet"], "--json and --quiet exclude each other"),
        (["inspect", "A", "--tree", "--sort", "size"], "--sort orders a flat list"),
        (["verify", "A", "--quick", "--full"], "--quick and --full exclude each other"),
        (["inspect", "A", "--verion"], "no such option: --verion"),
        (["inspect", "A", "--include"], "--include: expected a value, got none"),
        (["inspect", "A", "B", "C"], "expected nothing behind the last argument, got b c"),
        (["inspect", "A", "--by", "rank", "--sort", "size"], "--by rank lists ranks, not tensors, so --sort"),
        (["inspect", "A", "--map", "w", "--objects"], "--map draws one tensor, so --objects has no use here"),
        (["inspect", "A", "--flat", "--depth", "2"], "--depth is about the tree, so --flat has no use here"),
        (["inspect", "A", "--shards"], "--shards is for --json, --parquet and --map"),
        (["cat", "A", "w", "--overwrite"], "--overwrite is for --out"),
        (["reshard", "A", "B", "--tp", "0"], "--tp: expected 1 or more, got 0"),
        (["reshard", "A", "B", "--zero-stage", "4"], "--zero-stage: expected 1 to 3, got 4"),
        (["reshard", "A", "B", "--tp", "two"], "--tp: expected a whole number, got 'two'"),
        (["reshard", "A", "B", "--engine", "ray"], "--engine ray starts the --processes, and there is one"),
        (["reshard", "A", "B", "--no-digest", "--write-manifest", "m"], "--no-digest takes no digests"),
        (["export", "A", "B", "--no-digest", "--write-manifest", "m"], "--no-digest takes no digests"),
        (["reshard", "A", "B", "--rng", "keep"], "--rng is for targets of Megatron, and dcp is none"),
        (["reshard", "A", "B", "--to", "megatron", "--rng", "keep", "--rank-state", "keep"], "both say"),
        (["reshard", "A", "B", "--arg", "a=1"], "dcp keeps no arguments of a Megatron run"),
        (["reshard", "A", "B", "--mcore-version", "0.12"], "dcp is not written for a version of megatron-core"),
        (["reshard", "A", "B", "--config", "c.json", "--to", "orbax"], "orbax takes no config.json of a model"),
        (["reshard", "A", "B", "--sidecar", "--to", "rank-files"], "rank-files has no metadata as Arrow columns"),
        (["reshard", "A", "B", "--zero-stage", "2"], "dcp has no stages of ZeRO"),
        (["reshard", "A", "B", "--vpp", "2"], "--vpp is about pipeline stages, and there is one"),
        (["plan", "A", "--tp", "2", "--first-stage-layers", "2"], "--first-stage-layers is about pipeline stages"),
        (["reshard", "A", "B", "--dp", "2", "--to", "deepspeed-universal"], "not the parts of 2 ranks"),
        (["reshard", "A", "B", "--memory", "much"], "--memory: 'much' is not a size in bytes"),
        (["reshard", "A", "B", "--mesh", "tp=2", "--tp", "2"], "--mesh already names"),
        (["reshard", "A", "B", "--mesh", "tp=2,foo=3"], "has an axis 'foo'"),
        (["reshard", "A", "B", "--mesh", "tp 2"], "is not an axis with its size"),
        (["export", "A", "B", "--max-shard-size", "0"], "--max-shard-size: a size of 0 is not above zero bytes"),
        (["export", "A", "B", "--to", "dcp", "--share-blocks"], "dcp has no header that can be padded"),
        (["reshard", "A", "B", "--ep", "2"], "ep must divide dp; got ep=2, dp=1"),
        (["reshard", "A", "B", "--to", "megatron", "--ep", "2", "--etp", "2"], "experts need a multiple of 4"),
    ],
)
def test_wrong_usage(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage is one line that says what is wrong, one that says what to do, and status 2; stdout stays empty."""
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    first, *others = printed.err.splitlines()
    if first.startswith("{"):
        assert message in first
        return
    assert first.lower().startswith("error: ")
    assert message.lower() in first.lower()
    assert [line.split(":")[0] for line in others] == ["hint"]
