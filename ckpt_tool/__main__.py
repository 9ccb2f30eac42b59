"""``python -m ckpt_tool`` is ``ckpt``. Knows nothing else."""

from __future__ import annotations

from ckpt_tool.cli.app import run

if __name__ == "__main__":
    run()
