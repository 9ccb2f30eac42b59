"""Checkpoints of formats that have one or two each: ``fixtures/zoo/checkpoints.tar.xz``, unpacked for the tests.

``<name>/ckpt`` is what the library wrote, ``<name>/truth.safetensors`` holds the same tensors whole.
"""

from __future__ import annotations

import atexit
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.formats.conformance import FIXTURES, Case, truth_of

ARCHIVE = FIXTURES / "zoo/checkpoints.tar.xz"


def extracted(archive: Path) -> Path:
    """A folder with the files of an archive, which is removed when the tests end."""
    folder = Path(tempfile.mkdtemp(prefix="ckpt-zoo-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder


CHECKPOINTS = extracted(ARCHIVE)


def case(name: str, below: str = "ckpt", rename: Callable[[str], str | None] = str, **limits: Any) -> Case:
    """The checkpoint ``name``; ``rename`` gives our name of a tensor in its truth."""
    return Case(name, CHECKPOINTS / name / below, truth_of(CHECKPOINTS / name, rename), **limits)
