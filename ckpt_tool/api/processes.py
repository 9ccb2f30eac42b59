"""Several processes of this machine for one conversion: the others are started here, and the caller's is the first."""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from ckpt_tool.engine.team import Share
from ckpt_tool.errors import CkptError, StorageError

__all__ = ["processes"]

_GRACE_S = 10.0


@contextmanager
def processes(options: Mapping[str, Any], count: int) -> Iterator[Share]:
    """Processes 2 to ``count`` of a reshard with ``options``, at work; yields the share of the caller, which commits.

    ``options`` are the arguments of ``prepare_reshard``, the same for all.

    Raises:
        StorageError: one of them failed; the message is its own.
    """
    context = multiprocessing.get_context("spawn")  # threads may be running, so that a fork would not be safe
    run = secrets.token_hex(8)
    started: list[tuple[BaseProcess, Connection]] = []
    for index in range(1, count):
        receiver, sender = context.Pipe(duplex=False)
        process: BaseProcess = context.Process(
            target=_run_share, args=(dict(options), Share(index, count, run), sender), name=f"ckpt-{index}", daemon=True
        )
        process.start()
        sender.close()
        started.append((process, receiver))
    try:
        yield Share(0, count, run)
    except CkptError as error:
        told = [text for _, receiver in started if (text := _told(receiver))]
        if told:
            raise StorageError(told[0], hint=error.hint) from error
        raise
    finally:
        for process, _ in started:
            process.join(_GRACE_S if process.exitcode is None else 0)
            if process.is_alive():
                process.terminate()
                process.join()


def _told(receiver: Connection) -> str | None:
    """What a process said of its failure."""
    with suppress(EOFError, OSError):
        if receiver.poll():
            text: str = receiver.recv()
            return text
    return None


def _run_share(options: dict[str, Any], share: Share, sender: Connection) -> None:
    """What the other processes do."""
    from ckpt_tool.api.reshard import prepare_reshard

    try:
        conversion = prepare_reshard(**options, share=share)
        with conversion.checkpoint:
            conversion.run()
    except CkptError as error:
        sender.send(f"{share}: {error}")
        raise SystemExit(4) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
