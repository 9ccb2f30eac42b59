"""The package keeps its layers, and the checker that says so can say no."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layer_rules import LAYERS, MAX_LINES, Violation, violations

REPOSITORY = Path(__file__).parent.parent
TOP_LEVEL = {
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "ckpt_tool",
    "docs",
    "fixtures",
    "pyproject.toml",
    "tests",
}
# Made by tools where they run, in the repository of nobody.
MADE_BY_TOOLS = {"build", "dist", "bench-results"}

# What `ckpt --help` must not wait for.
HEAVY = ("fsspec", "numpy", "pyarrow", "torch")


def read_sources(folder: str) -> dict[str, str]:
    """Source text of every Python file below ``folder``, by dotted module name."""
    files = sorted((REPOSITORY / folder).rglob("*.py"))
    return {".".join(file.relative_to(REPOSITORY).with_suffix("").parts): file.read_text("utf-8") for file in files}


def top_level_entries() -> set[str]:
    """Names at the top of the repository that are not dot-files: what git tracks, or what lies there without git."""
    listing = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        names = {line.strip('"').split("/")[0] for line in listing.stdout.splitlines()}
    else:
        names = {entry.name for entry in REPOSITORY.iterdir()} - MADE_BY_TOOLS
    return {name for name in names if not name.startswith(".")}


def modules_loaded_by(module: str) -> set[str]:
    """Top-level names in ``sys.modules`` of a new interpreter after it imported ``module``."""
    program = f"import sys, {module}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def complaints(sources: dict[str, str]) -> list[str]:
    """What the checker says of a made-up package; ``plan/overlap`` stands for ``ckpt_tool.plan.overlap``."""
    named = {f"ckpt_tool.{name.replace('/', '.')}": text for name, text in sources.items()}
    return [violation.what for violation in violations(named)]


def test_package_keeps_its_layers() -> None:
    """No module of the package breaks a rule."""
    assert violations(read_sources("ckpt_tool")) == []


def test_data_classes_are_quick_to_define() -> None:
    """They come from ``records``, because commands wait for their definition; the standard library's are made there."""
    pattern = re.compile(r"^\s*from dataclasses import .*\bdataclass\b|@dataclasses\.dataclass", re.MULTILINE)
    assert [name for name, text in read_sources("ckpt_tool").items() if pattern.search(text)] == ["ckpt_tool.records"]


def test_test_files_are_short_and_named() -> None:
    """Length and naming rules hold for tests too."""
    assert violations(read_sources("tests")) == []


def test_every_part_has_a_layer() -> None:
    """Each module and folder of the package, also one that imports nothing, stands in LAYERS."""
    placed = {name for row in LAYERS for name in row}
    parts = {name.split(".")[1] for name in read_sources("ckpt_tool")}
    assert parts - placed == set()


def test_top_level_is_exact() -> None:
    """Beside dot-files, the repository's top level holds these entries and no others."""
    assert top_level_entries() == TOP_LEVEL


@pytest.mark.parametrize("module", ["ckpt_tool", "ckpt_tool.cli.commands"])
def test_start_up_is_light(module: str) -> None:
    """The package root and the command line load none of the heavy packages."""
    assert modules_loaded_by(module) & set(HEAVY) == set()


def test_heavy_import_is_seen() -> None:
    """The start-up check sees a heavy package where one is loaded."""
    assert "numpy" in modules_loaded_by("numpy")


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        pytest.param(
            {"geometry/box": "from ckpt_tool.manifest.model import Manifest"},
            ["imports manifest, which lies above geometry"],
            id="upward",
        ),
        pytest.param(
            {"errors": "import ckpt_tool.sizes"},
            ["imports sizes, which lies above errors"],
            id="upward-inside-the-lowest-layer",
        ),
        pytest.param(
            {"api": "def f():\n    from ckpt_tool.cli.app import main"},
            ["imports cli, which lies above api"],
            id="upward-in-a-function",
        ),
        pytest.param(
            {"plan/model": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ckpt_tool.api"},
            ["imports api, which lies above plan"],
            id="upward-for-types-only",
        ),
        pytest.param(
            {"layout/mesh": "from ..storage import store"},
            ["imports storage, a sibling of layout"],
            id="sibling-relative",
        ),
        pytest.param(
            {"compare/tiles": "import importlib\nimportlib.import_module('ckpt_tool.engine.local')"},
            ["imports engine, a sibling of compare"],
            id="sibling-by-name",
        ),
        pytest.param(
            {"plan/batch": "from ckpt_tool.storage.store import Store"},
            ["imports storage, which plan does without"],
            id="kept-apart",
        ),
        pytest.param(
            {"formats/dcp": "from ckpt_tool.formats.torch_save import read", "formats/torch_save": ""},
            ["format dcp imports torch_save; formats share only _modules and base, edited, joint"],
            id="format-imports-format",
        ),
        pytest.param(
            {"formats/_zip": "from ckpt_tool.formats import dcp", "formats/dcp": ""},
            ["format _zip imports dcp; formats share only _modules and base, edited, joint"],
            id="shared-imports-format",
        ),
        pytest.param(
            {"formats/dcp/reader": "from ckpt_tool.formats.registry import READERS"},
            ["format dcp imports registry; formats share only _modules and base, edited, joint"],
            id="format-imports-registry",
        ),
        pytest.param({"api": "import ckpt_tool"}, ["imports the package root"], id="root"),
        pytest.param(
            {"api": "from ckpt_tool import sizes", "sizes": "", "__init__": ""},
            ["imports the package root"],
            id="root-for-a-module",
        ),
        pytest.param({"api": "from . import errors"}, ["imports the package root"], id="root-relative"),
        pytest.param(
            {"plan/a": "import torch.distributed"},
            ["imports torch, which belongs to engine.distributed, engine.save, frameworks"],
            id="torch",
        ),
        pytest.param(
            {"formats/megatron/reader": "from megatron.core import dist_checkpointing"},
            ["imports megatron, which belongs to nobody"],
            id="R65-programs-whose-files-are-read",
        ),
        pytest.param({"api": "from rich.table import Table"}, ["imports rich, which belongs to cli"], id="rich"),
        pytest.param({"formats/dcp": "import fsspec"}, ["imports fsspec, which belongs to storage"], id="fsspec"),
        pytest.param(
            {"plan/a": "import ckpt_tool.plan.b", "plan/b": "from .c import x", "plan/c": "from . import a"},
            ["import cycle: ckpt_tool.plan.a -> ckpt_tool.plan.b -> ckpt_tool.plan.c -> ckpt_tool.plan.a"],
            id="cycle",
        ),
        pytest.param(
            {"plan/__init__": "from ckpt_tool.plan.a import x", "plan/a": "from ckpt_tool.plan import x"},
            ["import cycle: ckpt_tool.plan.__init__ -> ckpt_tool.plan.a -> ckpt_tool.plan.__init__"],
            id="cycle-through-a-package",
        ),
        pytest.param({"bits": "import ckpt_tool.errors"}, ["bits has no place in LAYERS"], id="unknown-part"),
        pytest.param({"plan/utils": ""}, ["named 'utils', which says nothing"], id="name"),
        pytest.param({"plan/_helpers/a": ""}, ["named '_helpers', which says nothing"], id="folder-name"),
        pytest.param({"plan/a": "\n" * 401}, ["401 lines, the limit is 400"], id="long"),
    ],
)
def test_broken_rule_is_reported(sources: dict[str, str], expected: list[str]) -> None:
    """Each rule is broken by a small made-up source, and the checker names it."""
    assert complaints(sources) == expected


@pytest.mark.parametrize(
    "sources",
    [
        pytest.param({"api": "from ckpt_tool.plan.model import Plan\nimport numpy, json"}, id="downward"),
        pytest.param({"dtypes": "from ckpt_tool.errors import FormatError"}, id="lowest"),
        pytest.param({"__init__": "def __getattr__(name):\n    import ckpt_tool.api"}, id="root-imports-api"),
        pytest.param({"engine/distributed_load": "import torch", "frameworks/fsdp": "import torch"}, id="torch"),
        pytest.param({"cli/app": "import typer, rich, click", "storage/store": "import fsspec"}, id="confined"),
        pytest.param(
            {
                "formats/dcp/reader": "from ckpt_tool.formats.dcp import y\nfrom ckpt_tool.formats._zip import x",
                "formats/registry": "from ckpt_tool.formats.dcp import reader",
                "formats/base": "from ckpt_tool.storage.store import Store",
            },
            id="formats",
        ),
        pytest.param(
            {"plan/a": "import ckpt_tool.plan.b", "plan/b": "def f():\n    import ckpt_tool.plan.a"},
            id="cycle-broken-by-a-lazy-import",
        ),
        pytest.param({"plan/a": "\n" * MAX_LINES}, id="long-enough"),
    ],
)
def test_kept_rules_are_quiet(sources: dict[str, str]) -> None:
    """What the rules allow is not reported."""
    assert complaints(sources) == []


def test_violation_names_the_line() -> None:
    """A violation points at the import statement."""
    source = "'''Doc.'''\n\nimport json\nimport rich\n"
    assert violations({"ckpt_tool.api": source}) == [
        Violation("ckpt_tool.api", 4, "imports rich, which belongs to cli")
    ]
