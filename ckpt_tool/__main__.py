"""``python -m ckpt_tool`` is ``ckpt``. Knows nothing else."""

from __future__ import annotations

import sys

from ckpt_tool.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
