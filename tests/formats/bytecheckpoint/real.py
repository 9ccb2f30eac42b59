"""Real checkpoints of ByteCheckpoint: the bundled ones, and those of a folder that the environment names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.load import load_pickle
from tests.formats.conformance import FIXTURES, Case, stored_bytes, truth_of

FAMILY = FIXTURES / "bytecheckpoint"
MODEL = "global_step_2/model/.metadata"
OPTIMIZER = "global_step_2/optimizer/.metadata"


def fqn_of(key: str) -> str:
    """The name here of a key of the truth."""
    section, name = key.split("/", 1)
    return f"model.{name}" if section == "model" else f"optimizer.state.{name.replace('/', '.')}"


def case(folder: Path) -> Case:
    """A folder with its truth; extra state and counters of FSDP have none."""
    return Case(
        folder.name,
        folder / "ckpt",
        truth_of(folder, fqn_of),
        without_truth=("extra_state.*", "*fsdp_optimizer_requires_grad_numel"),
        max_read_requests=15,
        max_resolve_requests=0,
    )


def cases() -> tuple[Case, ...]:
    """The bundled checkpoints, and more where the environment names a folder."""
    folders = sorted(FAMILY.glob("*_*r"))
    more = Path(os.environ.get("CKPT_EXTRA_FIXTURES", FIXTURES)) / "bytecheckpoint"
    folders += [folder for folder in sorted(more.glob("*[0-9]")) if (folder / "ckpt").is_dir()]
    return tuple(map(case, folders))


def files_of(name: str) -> dict[str, bytes]:
    """All files of a bundled checkpoint."""
    return stored_bytes(FAMILY / name / "ckpt")


def edited(files: dict[str, bytes], path: str, edit: Callable[[dict[str, Any]], None]) -> dict[str, bytes]:
    """The files with the fields of one metadata file changed by ``edit``."""
    root = load_pickle(files[path], where=path)
    edit(root.state)
    return {**files, path: dump_pickle(root, protocol=4)}
