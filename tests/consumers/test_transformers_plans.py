"""Rules and names of families against the transformers that is installed: its plans, and models that it saved.

Needs ``CKPT_PEER_TRANSFORMERS``, the python of an environment with transformers and torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.job.load import load
from ckpt_tool.api.trust.diff import diff
from ckpt_tool.formats._config_checks import KNOWN_TYPES, model_findings
from ckpt_tool.manifest.finding import Severity
from tests.checks.synthetic import make, tensor
from tests.layout.plans import disagreements
from tests.layout.test_plans import KINDS, TABLE

pytestmark = pytest.mark.peer

SCRIPTS = Path(__file__).parent
LAYER = r"(?:layers|h|blocks)\.(\d+)\."
SAVED = (
    "bamba", "bart", "bert", "deepseek_v3", "ernie4_5_moe", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "gptj",
    "granitemoe", "granitemoehybrid", "jamba", "lfm2", "llama4_text", "longcat_flash", "minimax_m2", "mixtral", "mpt",
    "nemotron_h", "olmo2", "olmoe", "phi3", "qwen2_moe", "qwen3_moe", "qwen3_next", "starcoder2", "t5",
)  # fmt: skip
HAVE_EXPERTS = (
    "deepseek_v3", "gpt_oss", "jamba", "llama4_text", "longcat_flash", "minimax_m2", "mixtral", "nemotron_h", "olmoe",
    "qwen3_next",
)  # fmt: skip


def ran(script: str, *words: str | Path) -> str:
    """What a script of this folder prints when the other python runs it."""
    command = [os.environ["CKPT_PEER_TRANSFORMERS"], str(SCRIPTS / script), *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=900).stdout


@pytest.fixture(scope="module")
def plans() -> dict[str, Any]:
    """What the installed library says."""
    found: dict[str, Any] = json.loads(ran("transformers_plans.py"))
    return found


def test_plans(plans: dict[str, Any]) -> None:
    """Every model of the table is covered as the installed library has it, and the table is what its release says."""
    wrong: dict[str, list[str]] = {}
    for model_type, at in TABLE["models"].items():
        now = {name: (len(shape), style) for name, (shape, style) in plans["models"].get(model_type, {}).items()}
        if now and (said := [each for each in disagreements(now) if "_tower" not in each and "vision_" not in each]):
            wrong[model_type] = said
        if plans["version"] == TABLE["version"]:
            assert {KINDS[n][0]: (KINDS[n][1], KINDS[n][2]) for n in at}.items() <= now.items(), model_type
    assert wrong == {}


def test_configs() -> None:
    """What a config asks for, by the types that are known, whole models have; of one layer less it is an error."""
    told = json.loads(ran("transformers_plans.py", *sorted(KNOWN_TYPES)))
    assert told.keys() == KNOWN_TYPES
    for model_type, (config, shapes) in told.items():
        info = {"config": config, "model_type": model_type}
        whole = make([tensor(name, tuple(shape)) for name, shape in shapes.items()], []).replace(info=info)
        assert list(model_findings(whole)) == [], model_type
        last = re.compile(rf"\.{max(int(n) for name in shapes for n in re.findall(LAYER, name))}\.")
        less = make([tensor(name, tuple(s)) for name, s in shapes.items() if not last.search(name)], [])
        found = list(model_findings(less.replace(info=info)))
        assert [each.kind for each in found if each.severity is Severity.ERROR] == ["missing-layer"], model_type


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models, by ``save_pretrained`` and by ``torch.save`` of the state dict, where experts have other names."""
    folder = tmp_path_factory.mktemp("saved")
    ran("transformers_saved.py", folder, *SAVED)
    return folder


@pytest.mark.parametrize("ending", ["", ".pt"])
@pytest.mark.parametrize("model_type", SAVED)
def test_a_saved_model(saved: Path, model_type: str, ending: str, tmp_path: Path) -> None:
    """A model goes to ranks of tensor and pipeline parallelism by its family's rules, and keeps every bit."""
    source = saved / f"{model_type}{ending}"
    reshard(source, tmp_path / "ranks", to="rank-files", tp=2, pp=2)
    found = diff(tmp_path / "ranks", source)
    assert found.is_same
    assert found.counts["same"] > 10


@pytest.mark.parametrize("model_type", [name for name in SAVED if "moe" in name or name in HAVE_EXPERTS])
def test_experts_as_published(saved: Path, model_type: str, tmp_path: Path) -> None:
    """Experts that are one tensor in memory are exported as ``save_pretrained`` writes them, and loaded from there."""
    folder = tmp_path / "memory"
    folder.mkdir()
    shutil.copy(saved / f"{model_type}.pt", folder / "pytorch_model.bin")
    shutil.copy(saved / model_type / "config.json", folder)
    export(folder, tmp_path / "published")
    found = diff(tmp_path / "published", saved / model_type)
    assert found.is_same
    memory = torch.load(saved / f"{model_type}.pt")
    state = {name: torch.zeros_like(tensor) for name, tensor in memory.items()}
    report = load({"model": state}, saved / model_type, strict=False)
    assert set(report.missing) <= {"model.lm_head.weight"}  # tied, and so stored once
    assert report.unexpected == ()
    assert all(state[name].equal(memory[name]) for name in state.keys() - {"lm_head.weight"})
