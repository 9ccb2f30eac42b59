"""python -m tests.hostile.fuzz SEED N [NAME...]: commands on N mutated files of fixtures, in limited processes.

Without a name those are small ones of twenty kinds; ``all`` stands for every fixture, those in archives too. There are
as many processes as processors (``--processes P``), and a seed makes the same files however many there are. ``--only
NUMBER`` repeats one trial in this process.

A line of JSON on stdout for each rule that was broken: an exception that is no answer, a status that is not documented,
a call that took too long, memory beyond the limit, something that a file made run, a process that died or hangs, or a
damage that was called whole. On stderr, every minute and at the end, also where somebody interrupts, what was tried.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.digest import digests
from ckpt_tool.api.manifest_file import read_manifest
from ckpt_tool.api.runs.ls import ls
from ckpt_tool.api.trust.salvage import salvage
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.checks.report import VerifyReport
from ckpt_tool.cli.app import main
from ckpt_tool.errors import CkptError, NotFound
from ckpt_tool.manifest.digest import ContentDigest
from ckpt_tool.storage.local.kernel import die_with_parent, exchange, fallocate, start_writeback
from tests.hostile.mutations import mutated, renamed
from tests.hostile.spread import all_shares

FIXTURES = Path(__file__).parents[2] / "fixtures"
SMALL = (
    "torch/dcp_zstd", "torch/dcp_safetensors", "torch/dcp_old_t2.1.2", "torch/dcp_no_flatten", "torch/hf_single",
    "torch/hf_sharded", "torch/hf_dcp_sharded", "torch/hf_pytorch_bin", "torch/verl_2d", "torch/fsdp1_per_rank_pt_2r",
    "ckpt/rank_files_v1", "torch_checkpointing/own_written", "torch_checkpointing/plain_odd",
    "torch_checkpointing/fsdp2_4r_safetensors", "deepspeed/ds_z0_fp32", "deepspeed/ds_z1_fp32", "deepspeed/ds_z3_sub",
    "deepspeed/peft_lora", "bytecheckpoint/ddp_2r", "torch/dcp_no_collectives",
)  # fmt: skip
ARCHIVES = tuple(sorted(path.parent.name for path in FIXTURES.glob("*/checkpoints.tar.xz")))
"""Folders of fixtures of which the checkpoints lie in one archive."""
SINGLE = "torch/pt_files"
"""A folder of files each of which is a checkpoint."""
_RENAMED = 0.1
MEMORY_BYTES = 2 << 30
"""Address space beside that of the libraries, which builds for GPUs alone fill with gigabytes."""
MAX_S, MAX_WALL_S = 10, 120
"""Of the process's own time, and of the clock's, which runs on while others have the machine."""
MIN_TRIALS = 100
"""That pay for starting a process."""
Say = Callable[[dict[str, Any]], None]
_CHECKED = (".pt", ".bin", ".distcp", ".ckpt", ".pth")
"""Zips, of whose content each byte has a checksum."""
_UNCOVERED = frozenset({"not-covered", "crc-not-recorded"})
"""Findings that say that some bytes have no checksum, though the names of their files are those of zips."""
_NO_CHECKPOINT = frozenset({"torch/pt_files/torchscript.pt"})
"""Fixtures that are refused when they are whole."""
_RUNS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "ctypes.dlopen")


class _TooLongError(Exception):
    pass


@dataclass
class Tried:
    """What one call on a damaged checkpoint came to."""

    broken: list[str] = field(default_factory=list)
    """Rules, and how."""
    answer: str = "none"
    seconds: float = 0.0
    """Of the process's own time."""


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


@dataclass(frozen=True)
class Truth:
    """What is known of a fixture before it is damaged."""

    tensors: dict[str, ContentDigest]
    is_covered: bool
    """Whether checksums cover all of it."""


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


def kinds(report: VerifyReport) -> set[str]:
    """Of its findings."""
    return {finding.kind for finding in report.findings}


def truth_of(name: str, target: Path) -> Truth:
    """Of a fixture that nobody has damaged.

    Raises:
        SystemExit: nothing in it can be read, so that whatever is damaged nothing would be found.
    """
    if name in _NO_CHECKPOINT:
        return Truth({}, is_covered=False)
    tensors = contents(target)
    if not tensors:
        raise SystemExit(f"{name} does not read though it is whole")
    return Truth(tensors, is_covered=not kinds(verify(target, level="full")) & _UNCOVERED)


def trial(target: Path, path: Path, truth: Truth, watch: Watch, command: str) -> Tried:
    """One call on a damaged checkpoint."""
    tried = Tried()
    broken = tried.broken
    started = time.process_time()
    watch.seen.clear()
    out, talk = io.StringIO(), io.StringIO()
    try:
        with limited(watch), contextlib.redirect_stdout(out), contextlib.redirect_stderr(talk):
            if command == "whole":
                broken += _false_whole(target, path, truth)
                tried.answer = "looked at"
            elif command == "salvage":
                broken += _false_salvage(target, path, truth)
                tried.answer = "salvaged"
            else:
                words = [word.replace("OUT", f"{target}-out") for word in command.split()]
                status = main([words[0], str(target), *words[1:]])
                tried.answer = f"status {status}"
                if status not in (0, 1, 2, 3, 4):
                    broken.append(tried.answer)
    except _TooLongError:
        broken.append(f"took more than {MAX_S} s")
    except MemoryError:
        broken.append(f"wanted more than {MEMORY_BYTES:,} bytes\n{traceback.format_exc()[-1500:]}")
    except CkptError:
        tried.answer = "refused"
        if command not in {"whole", "salvage"}:
            broken.append(f"an answer that nobody rendered\n{traceback.format_exc()[-1500:]}")
    except BaseException:  # noqa: BLE001 - that none gets out is what is tested
        broken.append(f"a traceback\n{traceback.format_exc()[-3000:]}")
    if "Traceback" in talk.getvalue():
        broken.append(f"a traceback on stderr\n{talk.getvalue()[-2000:]}")
    if watch.seen:
        broken.append(f"ran {watch.seen[0]}")
    tried.seconds = time.process_time() - started
    if tried.seconds > MAX_S:
        broken.append(f"took {tried.seconds:.1f} s")
    return tried


def _false_whole(target: Path, path: Path, truth: Truth) -> Iterator[str]:
    """Nothing wrong, though a tensor that a checksum covers is another one than it was."""
    report = verify(target, level="full")
    if not report.is_ok or kinds(report) & _UNCOVERED or path.suffix not in _CHECKED:
        return
    found = contents(target)
    changed = [fqn for fqn, digest in found.items() if fqn in truth.tensors and truth.tensors[fqn] != digest]
    if changed:
        yield f"called whole, but {changed[0]} holds something else"


def _false_salvage(target: Path, path: Path, truth: Truth) -> Iterator[str]:
    """Something was saved as whole that is not what it was, though a checksum covers it."""
    done = salvage(target, f"{target}-out", overwrite=True, durable=False, n_workers=1)
    if path.suffix not in _CHECKED or not truth.is_covered:
        return
    found = read_manifest(f"{target}-out.digests.json").tensors
    was = truth.tensors
    alike = [f for f in found if f in was and was[f].shape == found[f].shape and was[f].dtype == found[f].dtype]
    changed = [fqn for fqn in alike if was[fqn] != found[fqn]]
    if changed:
        yield f"saved as whole, but {changed[0]} holds something else ({len(done.lost)} are told as lost)"


COMMANDS = (
    "verify --full", "whole", "inspect", "salvage", "verify", "export OUT --overwrite --no-fsync", "inspect --json",
    "ls", "salvage", "verify --quick --json", "whole", "edit OUT --drop *bias* --overwrite --no-fsync",
)  # fmt: skip


def limit_memory(nbytes: int) -> None:
    """Let this process take so many bytes of address space more than it has."""
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + nbytes, own + nbytes))


def look_up_the_c_library() -> None:
    """What the first target does, and no file brings about."""
    fallocate(-1, 0)
    start_writeback(-1, 0, 0)
    with contextlib.suppress(OSError):
        exchange("", "")


def every() -> tuple[str, ...]:
    """Names of all checkpoints among the fixtures."""
    folders = [str(path.parent.relative_to(FIXTURES)) for path in sorted(FIXTURES.glob("*/*/ckpt")) if path.is_dir()]
    singles = [f"{SINGLE}/{path.name}" for path in sorted((FIXTURES / SINGLE / "ckpt").glob("*.pt"))]
    packed: list[str] = []
    for name in ARCHIVES:
        with tarfile.open(FIXTURES / name / "checkpoints.tar.xz") as archive:
            packed += sorted({f"{name}/{member.name.partition('/')[0]}" for member in archive})
    return (*(name for name in folders if name != SINGLE), *singles, *packed)


def placed(name: str, base: Path) -> Path:
    """A copy of a fixture to be damaged."""
    kind, _, own = name.partition("/")
    if name.startswith(f"{SINGLE}/"):
        (base / SINGLE).mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(FIXTURES / SINGLE / "ckpt" / Path(name).name, base / name))
    if (FIXTURES / name / "ckpt").is_dir():
        return Path(shutil.copytree(FIXTURES / name / "ckpt", base / name))
    if not (base / "packed" / kind).is_dir():
        with tarfile.open(FIXTURES / kind / "checkpoints.tar.xz") as archive:
            archive.extractall(base / "packed" / kind, filter="data")
    return Path(shutil.copytree(base / "packed" / kind / own / "ckpt", base / name))


def checkpoint_in(target: Path) -> Path:
    """The step, where a fixture is a run that has one."""
    try:
        open_checkpoint(target).close()
    except NotFound:
        return target / ls(target).steps[-1].path
    except CkptError:
        pass  # truth_of says more
    return target


@contextlib.contextmanager
def damaged(target: Path, path: Path, rng: random.Random) -> Iterator[None]:
    """A file of a checkpoint with other bytes for a while; one in ten with another number in its name."""
    other = target / renamed(str(path.relative_to(target)), rng)
    if rng.random() < _RENAMED and not other.exists():
        other.parent.mkdir(parents=True, exist_ok=True)
        path.rename(other)
        yield
        other.rename(path)
        for folder in other.parents:
            if folder == target or any(folder.iterdir()):
                break
            folder.rmdir()
    else:
        raw = path.read_bytes()
        path.write_bytes(mutated(raw, rng))
        yield
        path.write_bytes(raw)


def run(seed: int, numbers: range, names: tuple[str, ...], say: Say, heard: Say = lambda line: None) -> int:
    """Try the mutations of these numbers, in turn of all files of these fixtures; how many rules were broken.

    What a number stands for depends on the seed and the names alone.
    """
    look_up_the_c_library()
    watch = Watch()
    n_broken = 0
    with tempfile.TemporaryDirectory(prefix="ckpt-fuzz-") as base:
        places = []
        truths: dict[str, Truth] = {}
        for name in names:
            target = checkpoint_in(placed(name, Path(base)))
            paths = [target] if target.is_file() else sorted(path for path in target.rglob("*") if path.is_file())
            places += [(name, target, path) for path in paths if path.stat().st_size]
        random.Random(seed).shuffle(places)
        for number in numbers:
            name, target, path = places[number % len(places)]
            if name not in truths:
                truths[name] = truth_of(name, target)
            rng = random.Random(f"{seed}-{number}")
            command = rng.choice(COMMANDS)
            told = {"number": number, "seed": seed, "fixture": name, "file": str(path.relative_to(target)),
                    "command": command}  # fmt: skip
            heard(told)
            with damaged(target, path, rng):
                tried = trial(target, path, truths[name], watch, command)
                keep = os.environ.get("CKPT_FUZZ_KEEP")
                if keep and tried.broken:
                    copy = shutil.copy if target.is_file() else shutil.copytree
                    copy(target, Path(keep) / f"{seed}-{number}-{target.name}")
            for what in tried.broken:
                n_broken += 1
                say({**told, "what": what})
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            heard({**told, "answer": tried.answer, "seconds": tried.seconds, "peak_bytes": peak})
    return n_broken


def _line(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def command_line(words: list[str]) -> int:
    """1 when a rule was broken, 130 when somebody interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.fuzz")
    parser.add_argument("seed", type=int)
    parser.add_argument("n", type=int)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--only", type=int, metavar="NUMBER")
    parser.add_argument("--share", type=int, nargs=3, metavar=("FIRST", "STEP", "PARENT"), help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    names = tuple(asked.names) or SMALL
    names = every() if names == ("all",) else names
    if asked.share or asked.only is not None:
        limit_memory(MEMORY_BYTES)
        os.environ["COLUMNS"] = "100"
        if asked.only is not None:
            return 1 if run(asked.seed, range(asked.only, asked.only + 1), names, _line, _line) else 0
        first, step, parent = asked.share
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the first one ends the others
        run(asked.seed, range(first, asked.n, step), names, _line, _line)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    here = [sys.executable, "-X", "faulthandler", "-m", "tests.hostile.fuzz", str(asked.seed), str(asked.n), *names]

    def share(first: int, step: int) -> list[str]:
        return [*here, "--share", str(first), str(step), str(os.getpid())]

    n_processes = asked.processes or min(len(os.sched_getaffinity(0)), asked.n // MIN_TRIALS or 1)
    tally = all_shares(asked.n, n_processes, share, lambda line: print(line, flush=True), hangs_s=2 * MAX_WALL_S)
    print(tally, file=sys.stderr)
    if tally.broken:
        return 1
    return 0 if tally.done == asked.n else 130


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:]))
