"""Real checkpoints of torch-checkpointing: the bundled ones, and those of a folder that the environment names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.load import load_pickle
from tests.formats.conformance import FIXTURES, Case, stored_bytes, truth_of

FAMILY = FIXTURES / "torch_checkpointing"
METADATA = "metadata.pkl"


def case(folder: Path) -> Case:
    """A folder with its truth, where ``name@3`` is rank 3's own."""
    n_files = sum(path.is_file() for path in (folder / "ckpt").rglob("*"))
    return Case(
        folder.name,
        folder / "ckpt",
        truth_of(folder, lambda key: key.replace("@", "@rank")),
        max_read_requests=1 + 2 * n_files,
        max_resolve_requests=0,
    )


def cases() -> tuple[Case, ...]:
    """The bundled checkpoints, and more where the environment names a folder."""
    more = Path(os.environ.get("CKPT_EXTRA_FIXTURES", FAMILY.parent)) / "torch_checkpointing"
    found = [path for root in (more, FAMILY) for path in sorted(root.iterdir()) if (path / "ckpt").is_dir()]
    folders = {path.name: path for path in found}
    return tuple(map(case, folders.values()))


def files_of(name: str) -> dict[str, bytes]:
    """All files of a bundled checkpoint."""
    return stored_bytes(FAMILY / name / "ckpt")


def edited(files: dict[str, bytes], edit: Callable[[dict[str, Any]], None]) -> dict[str, bytes]:
    """The files with ``metadata.pkl`` changed by ``edit``."""
    root = load_pickle(files[METADATA], where=METADATA)
    edit(root)
    return {**files, METADATA: dump_pickle(root, protocol=4)}


def to_version_1(root: dict[str, Any]) -> None:
    """Metadata 2.0 as 1.0 keeps it: one table of tensors, one of files by rank."""
    items = root["metadata"]
    root["rank_to_layout_info_mappings"] = {
        rank: {name: item["rank_to_layout_info"][rank] for name, item in items.items()}
        for rank in range(root["world_size"])
    }
    root["metadata"] = {
        f'["{name}",{path[1:]}': groups
        for name, item in items.items()
        for path, groups in item["nested_path_to_metadata"].items()
    }
    root["version"] = "1.0"
