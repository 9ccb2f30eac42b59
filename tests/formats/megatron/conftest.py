from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.formats.conformance import FIXTURES


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts that made the bundled checkpoints, in a folder of their own."""
    folder = tmp_path_factory.mktemp("megatron") / "make"
    shutil.copytree(FIXTURES / "megatron/make", folder)
    return folder
