"""Kills resharding processes with SIGKILL at random moments and looks at what they leave.

Usage: ``python killing.py SOURCE TARGET N SEED FORMAT``. A process that has imported everything forks a run, kills it
after a random part of the time that a whole run takes, looks at the target, forks a run with ``resume``, and compares
all bytes with those of a run that nobody killed, until N runs were killed: those that end before are looked at too, and
counted beside them. One line of JSON at the end: how often what was seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_tool.api import checkpoint
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.engine import moving
from ckpt_tool.errors import CkptError, TargetExists
from ckpt_tool.storage.hdfs import place as hdfs_place
from ckpt_tool.storage.hdfs.client import HdfsClient, split_hdfs_url
from ckpt_tool.storage.parts import target as part_target
from ckpt_tool.storage.parts.place import PartLimits
from ckpt_tool.storage.s3 import place
from ckpt_tool.storage.s3.client import S3Client, split_s3_url

PART_BYTES = int(os.environ.get("CKPT_KILLING_PART_BYTES", str(64 << 10)))
MARKER = "CKPT_UNFINISHED"


def make_small() -> None:
    """Many units, journal lines and parts in few bytes."""
    vars(checkpoint)["_TILE_BYTES"] = vars(checkpoint)["_UNIT_BYTES"] = 32 << 10
    vars(moving)["_JOURNAL_BYTES"] = max(128 << 10, PART_BYTES // 4)  # on a real server each line is an object
    vars(hdfs_place)["PART_LIMITS"] = PartLimits(1 << 20, 1 << 20, 10_000, multiple=1 << 20)
    vars(part_target)["HELD_BYTES"] = PART_BYTES  # a last file of payload is sent in parts, as a large one is
    vars(place)["PART_LIMITS"] = PartLimits(PART_BYTES, PART_BYTES, 10_000)


def _digests(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


class LocalPlace:
    """A folder."""

    def __init__(self, url: str) -> None:
        self.root = Path(url)

    def clean(self) -> None:
        """Remove everything."""
        for path in (self.root, self.root.with_name(f"{self.root.name}.partial")):
            shutil.rmtree(path, ignore_errors=True)
        self.root.with_name(f"{self.root.name}.digests.json").unlink(missing_ok=True)

    def files(self) -> dict[str, str]:
        """Digests of what has the final name."""
        return _digests(self.root)

    def unnamed(self) -> dict[str, str]:
        """Digests of what waits for the final name."""
        return _digests(self.root.with_name(f"{self.root.name}.partial"))

    def leftovers(self) -> int:
        """What should not be there after a run."""
        return len(list(self.root.parent.glob("*.partial")))


class S3Place:
    """Objects below a key."""

    def __init__(self, url: str) -> None:
        bucket, self.key = split_s3_url(url)
        self.client = S3Client(bucket)
        self.place = place.S3Place(url, single_file=False)

    def _keys(self) -> list[str]:
        return [o.key for page in self.client.pages(f"{self.key}/") for o in page.objects]

    def clean(self) -> None:
        """Remove everything, uploads under way too."""
        for key in [*self._keys(), f"{self.key}.digests.json"]:
            self.client.delete(key)
        for path, begun in self.place.begun().items():
            self.place.drop(path, begun.token)

    def files(self) -> dict[str, str]:
        """Digests of what has the final name."""
        return {
            key[len(self.key) + 1 :]: hashlib.sha256(self.client.get(key) or b"").hexdigest() for key in self._keys()
        }

    def unnamed(self) -> dict[str, str]:
        """Nothing waits for a name."""
        return {}

    def leftovers(self) -> int:
        """What should not be there after a run."""
        return len(self.place.begun())


class HdfsPlace:
    """Files below a folder of HDFS."""

    def __init__(self, url: str) -> None:
        root, self.path = split_hdfs_url(url)
        self.client = HdfsClient(root)

    def clean(self) -> None:
        """Remove everything."""
        for path in (
            self.path,
            f"{self.path}.partial",
            f"{self.path}.digests.json",
            f"{self.path}.digests.json.partial",
        ):
            self.client.delete(path)

    def files(self) -> dict[str, str]:
        """Digests of what has the final name."""
        return self._digests(self.path)

    def unnamed(self) -> dict[str, str]:
        """Digests of what waits for the final name."""
        return self._digests(f"{self.path}.partial")

    def _digests(self, root: str) -> dict[str, str]:
        return {
            f.path[len(root) + 1 :]: hashlib.sha256(self.client.read(f.path, 0, f.nbytes, where="")).hexdigest()
            for f in self.client.files(root)
            if not f.is_folder
        }

    def leftovers(self) -> int:
        """What should not be there after a run."""
        return int(self.client.info(f"{self.path}.partial") is not None)


def kept_at(url: str) -> Any:
    """What is looked at between runs."""
    if url.startswith("s3://"):
        return S3Place(url)
    return HdfsPlace(url) if url.startswith("hdfs://") else LocalPlace(url)


def apart(call: Callable[[], Any]) -> Any:
    """What it returns, called in a process of its own: the client for HDFS has threads, which a fork does not copy."""
    reading, writing = os.pipe()

    def send() -> None:
        with open(writing, "w", encoding="utf-8") as file:
            json.dump(call(), file)

    pid = forked(send)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        text = file.read()
    if ended(pid):
        raise SystemExit("looking at what is there fails")
    return json.loads(text)


def forked(call: Any) -> int:
    """A process that does it."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
        except CkptError as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(error.exit_code)
        except BaseException:  # noqa: BLE001 - the child must not go on as its parent
            sys.excepthook(*sys.exc_info())
            os._exit(99)
        os._exit(0)
    return pid


def ended(pid: int) -> int:
    """How it ended."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def reads_as_checkpoint(url: str) -> bool:
    """Whether this tool takes it for one."""
    try:
        checkpoint.open_checkpoint(url).close()
    except CkptError:
        return False
    return True


def main(source: str, url: str, n: int, seed: int, to: str) -> Counter[str]:
    """``n`` runs that were killed, and those that were faster."""
    make_small()
    options: dict[str, Any] = {"dp": 3, "to": to, "default": "shard0", "dp_mode": "shard", "n_workers": 2}

    def run(*, resume: bool = False) -> None:
        result = reshard(source, url, **options, resume=resume)
        if resume and result.report.resumed_nbytes:
            os._exit(7)

    with tempfile.TemporaryDirectory() as folder:
        reshard(source, f"{folder}/here", **options)  # imports what a run needs: forks spend their time on bytes
    apart(lambda: kept_at(url).clean())
    started = time.perf_counter()
    if ended(forked(run)):
        raise SystemExit("the run that nobody kills fails")
    whole_s = time.perf_counter() - started
    expected = apart(lambda: kept_at(url).files())
    seen: Counter[str] = Counter()
    dice = random.Random(seed)
    while seen["killed"] < n:
        number = seen["killed"] + seen["finished"]
        apart(lambda: kept_at(url).clean())
        pid = forked(run)
        time.sleep(dice.random() * whole_s * 1.05)
        os.kill(pid, signal.SIGKILL)
        is_killed = ended(pid) < 0
        seen["killed" if is_killed else "finished"] += 1
        # Runs are faster and slower on a machine that others use: about one in six shall get to its end.
        # Where the run that was timed was an outlier, all would, so the first kill is found by halves.
        whole_s *= 1.02 if is_killed else 0.9 if seen["killed"] else 0.5
        found = apart(lambda: kept_at(url).files())
        is_whole = {path: digest for path, digest in found.items() if not path.startswith("CKPT_")} == expected
        if apart(lambda: reads_as_checkpoint(url)) and not is_whole:
            raise SystemExit(f"point {number}: half a checkpoint reads as whole: {sorted(found)}")
        if ".metadata" in found and not is_whole:
            raise SystemExit(f"point {number}: the commit file is there before the others")
        if is_whole and MARKER not in found:
            seen["whole already"] += 1
            continue
        seen["unfinished" if found else "nothing seen"] += 1
        status = ended(forked(lambda: run(resume=True)))
        if status == TargetExists.exit_code and apart(lambda: kept_at(url).unnamed()) == expected:
            seen["whole, without its name"] += 1  # killed between its last two calls, and said so
            continue
        if status not in {0, 7}:
            raise SystemExit(f"point {number}: going on fails with {status}")
        seen["went on from what was there"] += status == 7
        after = apart(lambda: kept_at(url).files())
        if after != expected:
            raise SystemExit(f"point {number}: other bytes: {sorted(set(after) ^ set(expected))}")
        if apart(lambda: kept_at(url).leftovers()):
            raise SystemExit(f"point {number}: leftovers")
        seen["same bytes"] += 1
    apart(lambda: kept_at(url).clean())
    return seen


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])))
