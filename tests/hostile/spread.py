"""Trials of the fuzzer in several processes: what breaks a rule as it is found, every minute how far they are.

A process begins with the trial of a number and takes every so-manyth from there. It says with a line of JSON when it
begins one, what it finds, and when it has ended it. One that dies or hangs is a finding too, and the next goes on
behind that trial.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Share", "Tally", "all_shares"]

EVERY_S = 60.0
"""Between two lines that say how far it is."""
Words = Callable[[int, int], Sequence[str]]
"""The command of a process whose first trial has a number, and that takes every so-manyth from there."""


@dataclass
class Tally:
    """What all have done so far."""

    n: int
    done: int = 0
    broken: int = 0
    files: set[tuple[str, str]] = field(default_factory=set)
    """Fixtures and the files of them that were damaged."""
    answers: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    longest: str = "none"
    peak_bytes: int = 0
    """Resident, of the largest process."""

    def add(self, ended: dict[str, Any]) -> None:
        """One trial."""
        self.done += 1
        self.files.add((ended["fixture"], ended["file"]))
        self.answers[ended["answer"]] += 1
        self.peak_bytes = max(self.peak_bytes, ended["peak_bytes"])
        if ended["seconds"] > self.longest_s:
            self.longest_s = ended["seconds"]
            self.longest = f"{ended['number']}, {ended['command']!r} of {ended['fixture']}/{ended['file']}"

    def __str__(self) -> str:
        fixtures = len({fixture for fixture, _ in self.files})
        answers = ", ".join(f"{answer} {count:,}" for answer, count in sorted(self.answers.items()))
        return (
            f"{self.done:,} of {self.n:,} mutated files ({len(self.files):,} files of {fixtures} fixtures), "
            f"{self.broken:,} findings; {answers or 'no answers'}; longest call {self.longest_s:.1f} s "
            f"({self.longest}); peak memory {self.peak_bytes >> 20:,} MiB"
        )


class Share:
    """The process that takes one share of the trials."""

    def __init__(self, words: Sequence[str], step: int) -> None:
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE)
        self.step = step
        self.trial: dict[str, Any] | None = None
        """What is being tried."""
        self.since = time.monotonic()
        self._rest = b""

    @property
    def pipe(self) -> int:
        """What it says."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def said(self) -> Iterator[dict[str, Any]] | None:
        """Whole lines that have come; None at the end."""
        data = os.read(self.pipe, 1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return (json.loads(line) for line in lines)

    def end(self) -> int:
        """How it ended."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait()


def _begun(words: Words, first: int, step: int, chosen: selectors.BaseSelector) -> Share:
    share = Share(words(first, step), step)
    chosen.register(share.pipe, selectors.EVENT_READ, share)
    return share


def all_shares(n: int, n_processes: int, words: Words, say: Callable[[str], None], *, hangs_s: float) -> Tally:
    """All of ``n`` trials, or as many as there were when somebody interrupted.

    Raises:
        RuntimeError: a process died outside of a trial.
    """
    tally = Tally(n)
    told = time.monotonic()
    chosen = selectors.DefaultSelector()
    shares = {_begun(words, first, n_processes, chosen) for first in range(min(n_processes, n))}
    try:
        while shares:
            for key, _ in chosen.select(timeout=1):
                share = key.data
                lines = share.said()
                if lines is not None:
                    _heard(share, lines, tally, say)
                    continue
                chosen.unregister(share.pipe)
                shares.remove(share)
                status = share.end()
                if status and share.trial is None:
                    raise RuntimeError(f"a process ended with {status} outside of a trial")
                if share.trial is not None:
                    _died(share, status, tally, say)
                    if share.trial["number"] + share.step < n:
                        shares.add(_begun(words, share.trial["number"] + share.step, share.step, chosen))
            for share in shares:
                if share.trial is not None and time.monotonic() - share.since > hangs_s:
                    share.process.kill()
            if shares and time.monotonic() - told > EVERY_S:
                told = time.monotonic()
                print(tally, file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
    finally:
        for share in shares:
            share.process.kill()
            share.end()
        chosen.close()
    return tally


def _heard(share: Share, lines: Iterator[dict[str, Any]], tally: Tally, say: Callable[[str], None]) -> None:
    for line in lines:
        if "what" in line:
            tally.broken += 1
            say(json.dumps(line))
        elif "answer" in line:
            tally.add(line)
            share.trial = None
        else:
            share.trial, share.since = line, time.monotonic()


def _died(share: Share, status: int, tally: Tally, say: Callable[[str], None]) -> None:
    """In a trial, which is a finding."""
    assert share.trial is not None
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    seconds = time.monotonic() - share.since
    tally.broken += 1
    say(json.dumps({**share.trial, "what": f"the process died with {how} after {seconds:.1f} s"}))
    tally.add({**share.trial, "answer": how, "seconds": 0.0, "peak_bytes": 0})
