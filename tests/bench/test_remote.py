"""S3 on this machine (SeaweedFS): resharding to it and within it beside a plain copy by s3fs; range reads by client.

``CKPT_BENCH_REMOTE_GB`` sets the size (0.5). Needs ``weed``, s3fs and obstore.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_tool.storage.s3.client import S3Client
from tests.bench.measure import Row, interleaved, report
from tests.storage.real_servers import seaweedfs
from tests.storage.s3_server import BUCKET, s3_environment

pytestmark = pytest.mark.bench

GIGABYTES = float(os.environ.get("CKPT_BENCH_REMOTE_GB", "0.5"))
ROUNDS = int(os.environ.get("CKPT_BENCH_ROUNDS", "5"))
HERE = Path(__file__).parent
RESHARD = [sys.executable, "-m", "ckpt_tool", "reshard"]
COPY = [sys.executable, str(HERE / "copy_with_s3fs.py")]
OPTIONS = ["--tp", "4", "--to", "rank-files", "--overwrite", "--no-digest"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of four ranks in ``source``."""
    base = tmp_path_factory.mktemp("remote")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    subprocess.run(
        [*launch, str(HERE / "make_dcp.py"), str(base / "source"), str(GIGABYTES)], check=True, capture_output=True
    )
    return base


@pytest.fixture(scope="module")
def environment(folder: Path) -> Iterator[dict[str, str]]:
    """Of commands that talk to a server with the checkpoint under ``source``."""
    with pytest.MonkeyPatch.context() as patch, seaweedfs(folder / "weed") as endpoint:
        found = {**s3_environment(endpoint), "PYTHONPATH": os.pathsep.join(sys.path)}
        for name, value in found.items():
            patch.setenv(name, value)
        subprocess.run([*COPY, str(folder / "source"), f"s3://{BUCKET}/source"], check=True)
        S3Client(BUCKET).put("object", bytes(140 << 20))
        yield found


def test_reshard_beside_a_copy(folder: Path, environment: dict[str, str]) -> None:
    """The same bytes; ours are cut anew on the way."""
    local, remote = str(folder / "source"), f"s3://{BUCKET}/source"
    out = f"s3://{BUCKET}/out"
    rows = [
        Row("s3fs put, local to S3", [*COPY, local, f"{out}/1"], environment=environment),
        Row("ckpt reshard, local to S3", [*RESHARD, local, f"{out}/2", *OPTIONS], environment=environment),
        Row("s3fs cat and pipe, S3 to S3", [*COPY, remote, f"{out}/3"], environment=environment),
        Row("ckpt reshard, S3 to S3", [*RESHARD, remote, f"{out}/4", *OPTIONS], environment=environment),
    ]
    report(f"remote: {GIGABYTES} GB, SeaweedFS", interleaved(rows, n_rounds=ROUNDS), peer="s3fs put, local to S3")


@pytest.mark.parametrize(("length", "n"), [(64 << 10, 1000), (8 << 20, 16)], ids=["small", "large"])
def test_range_reads(environment: dict[str, str], length: int, n: int) -> None:
    """One object, start-up included."""
    script = str(HERE / "read_ranges.py")
    rows = [
        Row(
            client,
            [sys.executable, script, client, f"s3://{BUCKET}/object", str(length), str(n)],
            environment=environment,
        )
        for client in ("obstore", "ours", "s3fs")
    ]
    title = f"ranges-{length >> 10}k: {n} x {length >> 10} KiB, SeaweedFS"
    report(title, interleaved(rows, n_rounds=ROUNDS), peer="obstore")
