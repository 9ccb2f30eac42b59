"""Real Megatron loads what was written, and compares it with the truth."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np

__all__ = ["assert_loads"]


def assert_loads(launcher: Path, root: Path, mesh: Mapping[str, int], run: str) -> None:
    """Real Megatron on as many ranks as the mesh has."""
    n_ranks = int(np.prod([size for axis, size in mesh.items() if axis in {"tp", "pp", "dp"}]))
    command = [os.environ["CKPT_PEER_MEGATRON"], "launch.py", str(n_ranks), "mk.py", "load", str(root)]
    environment = {**os.environ, "MCORE": "0.19.2"}
    done = subprocess.run(
        [*command, *run.split()], cwd=launcher, env=environment, capture_output=True, text=True, check=False
    )
    assert "LOAD OK" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
