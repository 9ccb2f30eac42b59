"""python -m tests.hostile.fuzz SEED N [NAME...]: commands on N mutated copies of fixtures, in one limited process.

Without a name those are small ones of twenty kinds; ``all`` stands for every fixture, those in archives too.

A line of JSON for each rule that was broken: an exception that is no answer, a status that is not documented, a call
that took too long, memory beyond the limit, something that a file made run, or a damage that was called whole.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.digest import digests
from ckpt_tool.api.manifest_file import read_manifest
from ckpt_tool.api.trust.salvage import salvage
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.cli.app import main
from ckpt_tool.errors import CkptError
from ckpt_tool.manifest.digest import ContentDigest
from ckpt_tool.storage.kernel import exchange, fallocate, start_writeback
from tests.hostile.mutations import mutated

FIXTURES = Path(__file__).parents[2] / "fixtures"
SMALL = (
    "torch/dcp_zstd", "torch/dcp_safetensors", "torch/dcp_old_t2.1.2", "torch/dcp_no_flatten", "torch/hf_single",
    "torch/hf_sharded", "torch/hf_dcp_sharded", "torch/hf_pytorch_bin", "torch/verl_2d", "torch/fsdp1_per_rank_pt_2r",
    "ckpt/rank_files_v1", "torch_checkpointing/own_written", "torch_checkpointing/plain_odd",
    "torch_checkpointing/fsdp2_4r_safetensors", "deepspeed/ds_z0_fp32", "deepspeed/ds_z1_fp32", "deepspeed/ds_z3_sub",
    "deepspeed/peft_lora", "bytecheckpoint/ddp_2r", "torch/dcp_no_collectives",
)  # fmt: skip
ARCHIVES = ("megatron", "vescale", "zoo")
"""Folders of fixtures of which the checkpoints lie in one archive."""
MEMORY_BYTES = 3 << 30
"""Address space; the interpreter with numpy and pyarrow takes one."""
MAX_S, MAX_WALL_S = 10, 120
"""Of the process's own time, and of the clock's, which runs on while others have the machine."""
_CHECKED = (".pt", ".bin", ".distcp", ".ckpt", ".pth")
"""Zips, of whose content each byte has a checksum."""
_UNCHECKED = ("bytecheckpoint/ddp_2r", "bytecheckpoint/fsdp_dec_4r", "bytecheckpoint/hsdp_4r", "torch/dcp_safetensors")
"""Whose items are bytes alone, or safetensors, though the names of their files are those of zips."""
_RUNS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "ctypes.dlopen")


class _TooLongError(Exception):
    pass


class Watch:
    """Notes what no file may bring about."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.is_on = False
        sys.addaudithook(self._event)

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        is_module = event == "import" and str(args[0]).split(".")[0] in {"posix", "nt", "webbrowser", "pty", "runpy"}
        is_class = event == "pickle.find_class"
        if event.startswith(_RUNS) or (is_module and str(args[0]) not in sys.modules) or is_class:
            self.seen.append(f"{event} {args!r}"[:200])


@contextlib.contextmanager
def limited(watch: Watch) -> Iterator[None]:
    """Little time, watched."""

    def stop(number: int, frame: Any) -> None:
        raise _TooLongError

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGPROF, stop)
    signal.alarm(MAX_WALL_S)
    signal.setitimer(signal.ITIMER_PROF, MAX_S)
    watch.is_on = True
    try:
        yield
    finally:
        watch.is_on = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def contents(url: Path) -> dict[str, ContentDigest]:
    """What each tensor holds, where that can be read."""
    with contextlib.suppress(CkptError), open_checkpoint(url) as checkpoint:
        return digests(checkpoint, n_workers=1).tensors
    return {}


def trial(folder: Path, path: Path, truth: dict[str, ContentDigest], watch: Watch, command: str) -> Iterator[str]:
    """What went wrong in one call on a damaged checkpoint."""
    started = time.process_time()
    watch.seen.clear()
    out, talk = io.StringIO(), io.StringIO()
    status: int | None = None
    said: list[str] = []
    try:
        with limited(watch), contextlib.redirect_stdout(out), contextlib.redirect_stderr(talk):
            if command == "whole":
                status = 0
                said += _false_whole(folder, path, truth)
            elif command == "salvage":
                status = 0
                said += _false_salvage(folder, path, truth)
            else:
                words = [word.replace("OUT", f"{folder}-out") for word in command.split()]
                status = main([words[0], str(folder), *words[1:]])
    except _TooLongError:
        yield f"took more than {MAX_S} s"
    except MemoryError:
        yield f"wanted more than {MEMORY_BYTES:,} bytes\n{traceback.format_exc()[-1500:]}"
    except CkptError:
        if command not in {"whole", "salvage"}:
            yield f"an answer that nobody rendered\n{traceback.format_exc()[-1500:]}"
    except BaseException:  # noqa: BLE001 - that none gets out is what is tested
        yield f"a traceback\n{traceback.format_exc()[-3000:]}"
    yield from said  # not before: what is printed now would go into the command's output
    if "Traceback" in talk.getvalue():
        yield f"a traceback on stderr\n{talk.getvalue()[-2000:]}"
    if status is not None and status not in (0, 1, 2, 3, 4):
        yield f"status {status}"
    if watch.seen:
        yield f"ran {watch.seen[0]}"
    if time.process_time() - started > MAX_S:
        yield f"took {time.process_time() - started:.1f} s"


def _false_whole(folder: Path, path: Path, truth: dict[str, ContentDigest]) -> Iterator[str]:
    """Nothing wrong, though a tensor that a checksum covers is another one than it was."""
    report = verify(folder, level="full")
    uncovered = {finding.kind for finding in report.findings} & {"not-covered", "crc-not-recorded"}
    if not report.is_ok or uncovered or path.suffix not in _CHECKED:
        return
    found = contents(folder)
    changed = [fqn for fqn, digest in found.items() if fqn in truth and truth[fqn] != digest]
    if changed:
        yield f"called whole, but {changed[0]} holds something else"


def _false_salvage(folder: Path, path: Path, truth: dict[str, ContentDigest]) -> Iterator[str]:
    """Something was saved as whole that is not what it was, though a checksum covers it."""
    done = salvage(folder, f"{folder}-out", overwrite=True, durable=False, n_workers=1)
    if path.suffix not in _CHECKED or str(folder).endswith(_UNCHECKED):
        return
    found = read_manifest(f"{folder}-out.digests.json").tensors
    alike = [f for f in found if f in truth and truth[f].shape == found[f].shape and truth[f].dtype == found[f].dtype]
    changed = [fqn for fqn in alike if truth[fqn] != found[fqn]]
    if changed:
        yield f"saved as whole, but {changed[0]} holds something else ({len(done.lost)} are told as lost)"


COMMANDS = (
    "verify --full", "whole", "inspect", "salvage", "verify", "export OUT --overwrite --no-fsync", "inspect --json",
    "ls", "salvage", "verify --quick --json", "whole", "edit OUT --drop *bias* --overwrite --no-fsync",
)  # fmt: skip


def look_up_the_c_library() -> None:
    """What the first target does, and no file brings about."""
    fallocate(-1, 0)
    start_writeback(-1, 0, 0)
    with contextlib.suppress(OSError):
        exchange("", "")


def every() -> tuple[str, ...]:
    """Names of all fixtures that are one checkpoint."""
    folders = [str(path.parent.relative_to(FIXTURES)) for path in sorted(FIXTURES.glob("*/*/ckpt")) if path.is_dir()]
    packed: list[str] = []
    for name in ARCHIVES:
        with tarfile.open(FIXTURES / name / "checkpoints.tar.xz") as archive:
            packed += sorted({f"{name}/{member.name.partition('/')[0]}" for member in archive})
    return (*(name for name in folders if name != "torch/pt_files"), *packed)


def placed(name: str, base: Path) -> Path:
    """A copy of a fixture to be damaged."""
    kind, _, own = name.partition("/")
    if (FIXTURES / name / "ckpt").is_dir():
        return Path(shutil.copytree(FIXTURES / name / "ckpt", base / name))
    if not (base / "packed" / kind).is_dir():
        with tarfile.open(FIXTURES / kind / "checkpoints.tar.xz") as archive:
            archive.extractall(base / "packed" / kind, filter="data")
    return Path(shutil.copytree(base / "packed" / kind / own / "ckpt", base / name))


def run(seed: int, n: int, names: tuple[str, ...], say: Any) -> int:
    """Try ``n`` mutations, in turn of all files of these fixtures; the number of broken rules."""
    rng = random.Random(seed)
    look_up_the_c_library()
    watch = Watch()
    broken = 0
    with tempfile.TemporaryDirectory(prefix="ckpt-fuzz-") as base:
        places = []
        for name in names:
            folder = placed(name, Path(base))
            truth = contents(folder)
            places += [(name, folder, path, truth) for path in sorted(folder.rglob("*")) if path.is_file()]
        rng.shuffle(places)
        for number in range(n):
            name, folder, path, truth = places[number % len(places)]
            raw = path.read_bytes()
            if not raw:
                continue
            data = mutated(raw, rng)
            path.write_bytes(data)
            command = COMMANDS[(number // len(places) + number) % len(COMMANDS)]
            for what in trial(folder, path, truth, watch, command):
                broken += 1
                where = str(path.relative_to(folder))
                say(json.dumps({"number": number, "seed": seed, "fixture": name, "file": where, "command": command,
                                "what": what}))  # fmt: skip
                keep = os.environ.get("CKPT_FUZZ_KEEP")
                if keep:
                    shutil.copytree(folder, Path(keep) / f"{seed}-{number}", dirs_exist_ok=True)
            path.write_bytes(raw)
    return broken


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.environ["COLUMNS"] = "100"
    chosen = tuple(sys.argv[3:]) or SMALL
    chosen = every() if chosen == ("all",) else chosen
    sys.exit(1 if run(int(sys.argv[1]), int(sys.argv[2]), chosen, print) else 0)
