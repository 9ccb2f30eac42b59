"""nanotron 0.4 saves what is read here, and loads what was written here, into other ranks than saved it.

``CKPT_PEER_NANOTRON`` names the python of an environment as the script that made the fixture describes it; run with
``-m peer``. The script compares every weight of every rank; the library has one release, which needs a GPU only for
its kernels.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from tests.formats.conformance import FIXTURES
from tests.formats.zoo import extracted
from tests.reports.made import as_bytes

pytestmark = pytest.mark.peer

SCRIPT = FIXTURES / "nanotron/make/nanotron_make.py"
REAL = extracted(FIXTURES / "nanotron/checkpoints.tar.xz") / "tp2_pp2_dp3"


def run(mode: str, folder: Path, tp: int, pp: int, dp: int, *, tied: bool) -> str:
    """What the first rank says."""
    command = [os.environ["CKPT_PEER_NANOTRON"], "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={tp * pp * dp}", str(SCRIPT), mode, str(folder)]
    command += [str(number) for number in (tp, pp, dp, int(tied))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def assert_loads(folder: Path, tp: int, pp: int, *, tied: bool) -> None:
    """Every weight of every rank is the one drawn."""
    said = re.search(r"LOAD seen (\d+) bad (\d+)(.*)", run("load", folder, tp, pp, 1, tied=tied))
    assert said is not None
    assert (int(said[1]) > 12, said[2]) == (True, "0"), said[3]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("way", ["nanotron", "dcp"])
def test_nanotron_loads_it(way: str, tp: int, pp: int, tmp_path: Path) -> None:
    """Cut by tensor rank or by stage, its embedding tied; also after a stay in DCP: names tell what is cut."""
    source = REAL / "ckpt"
    if way == "dcp":
        reshard(source, tmp_path / "dcp", to="dcp", dp=2, default="shard0", digest=None)
        source = tmp_path / "dcp"
    export(source, tmp_path / "ckpt", to="nanotron", digest=None)
    assert_loads(tmp_path, tp, pp, tied=True)


def test_what_nanotron_saves(tmp_path: Path) -> None:
    """Weights, masters and moments of ZeRO on two ranks, as it drew them; and back into it."""
    run("save", tmp_path, 1, 1, 2, tied=False)
    found = {fqn: data for fqn, (_, _, data) in as_bytes(tmp_path / "ckpt").items() if not fqn.endswith(".step")}
    assert found == {fqn: data for fqn, (_, _, data) in as_bytes(tmp_path / "truth.safetensors").items()}
    (tmp_path / "back").mkdir()
    export(tmp_path / "ckpt", tmp_path / "back/ckpt", to="nanotron", digest=None)
    assert_loads(tmp_path / "back", 1, 1, tied=False)
