"""Real Megatron loads what was written, and compares it with the truth; and it saves."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np

__all__ = ["assert_loads", "output_of_load", "save"]


def assert_loads(launcher: Path, root: Path, mesh: Mapping[str, int], run: str) -> None:
    """Real Megatron on as many ranks as the mesh has."""
    said = output_of_load(launcher, root, mesh, run)
    assert "LOAD OK" in said, said[-4000:]


def output_of_load(launcher: Path, root: Path, mesh: Mapping[str, int], run: str) -> str:
    """What it prints meanwhile, errors behind the rest."""
    n_ranks = int(np.prod([size for axis, size in mesh.items() if axis in {"tp", "pp", "dp"}]))
    done = _run(launcher, n_ranks, f"load {root} {run}")
    return done.stdout + done.stderr


def save(launcher: Path, root: Path, n_ranks: int, run: str) -> None:
    """A checkpoint of real Megatron, whose values the scripts know."""
    done = _run(launcher, n_ranks, f"save {root} {run}")
    assert "SAVED" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


def _run(launcher: Path, n_ranks: int, words: str) -> subprocess.CompletedProcess[str]:
    command = [os.environ["CKPT_PEER_MEGATRON"], "launch.py", str(n_ranks), "mk.py", *words.split()]
    environment = {**os.environ, "MCORE": "0.19.2"}
    while True:
        done = subprocess.run(command, cwd=launcher, env=environment, capture_output=True, text=True, check=False)
        if "EADDRINUSE" not in done.stderr:  # the launcher's port was free when it chose it
            return done
