"""veScale 0.0.1 loads what was written here, into other ranks than saved it.

``CKPT_PEER_VESCALE`` names the python of an environment as the script that made the fixtures describes it; run with
``-m peer``. The script compares every weight, master and moment of every rank.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from ckpt_tool.api.convert.reshard import reshard
from tests.formats.conformance import FIXTURES
from tests.formats.zoo import extracted

pytestmark = pytest.mark.peer

SCRIPT = FIXTURES / "vescale/make/vescale_make.py"
REAL = extracted(FIXTURES / "vescale/checkpoints.tar.xz")


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 2), (3, 1)])
@pytest.mark.parametrize("way", ["vescale", "dcp"])
def test_vescale_loads_it(way: str, dp: int, tp: int, tmp_path: Path) -> None:
    """Cut over three ranks, also after a stay in DCP."""
    source = REAL / "dp2_tp2/ckpt"
    if way == "dcp":
        reshard(source, tmp_path / "dcp", to="dcp", default="replicate", digest=None)
        source = tmp_path / "dcp"
    reshard(source, tmp_path / "ckpt", to="vescale", dp=3, default="shard0", digest=None)
    command = [os.environ["CKPT_PEER_VESCALE"], "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={dp * tp}", str(SCRIPT), "load", str(tmp_path), "1", str(dp), str(tp)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    said = re.search(r"LOAD \(\d, \d\) seen (\d+) bad (\d+)", run.stdout)
    assert said, run.stderr[-3000:]
    assert int(said[1]) > 150
    assert int(said[2]) == 0
