"""Several processes of this machine for one conversion: the others are started here, and the caller's is the first."""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from ckpt_tool.api.convert.conversion import Conversion
from ckpt_tool.engine.team import Share
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.storage.traffic import counting, current_traffic

__all__ = ["processes", "run_share"]

_GRACE_S = 10.0


@contextmanager
def processes(prepare: Callable[..., Conversion], options: Mapping[str, Any], count: int) -> Iterator[Share]:
    """Processes 2 to ``count``, at work; yields the share of the caller, which commits.

    ``prepare`` (``prepare_reshard`` or ``prepare_export``) makes the conversion of ``options``, the same for all.

    What they ask of remote storage counts as asked by the caller.

    Raises:
        StorageError: one of them failed; the message is its own.
    """
    context = multiprocessing.get_context("spawn")  # threads may be running, so that a fork would not be safe
    run = secrets.token_hex(8)
    started: list[tuple[BaseProcess, Connection]] = []
    for index in range(1, count):
        receiver, sender = context.Pipe(duplex=False)
        process: BaseProcess = context.Process(
            target=_in_process,
            args=(prepare, dict(options), Share(index, count, run), sender),
            name=f"ckpt-{index}",
            daemon=True,
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
        for process, receiver in started:
            process.join(_GRACE_S if process.exitcode is None else 0)
            if process.is_alive():
                process.terminate()
                process.join()
            _told(receiver)


def run_share(prepare: Callable[..., Conversion], options: Mapping[str, Any], share: Share) -> str | None:
    """What another process than the first does; what went wrong, if something did."""
    try:
        conversion = prepare(**options, share=share)
        with conversion.checkpoint:
            conversion.run()
    except CkptError as error:
        return f"{share}: {error}"
    return None


def _told(receiver: Connection) -> str | None:
    """What a process said of its failure; its requests are counted here when it is heard."""
    with suppress(EOFError, OSError):
        if receiver.poll():
            failure, asked = receiver.recv()
            current_traffic().add(asked)
            return None if failure is None else str(failure)
    return None


def _in_process(prepare: Callable[..., Conversion], options: dict[str, Any], share: Share, sender: Connection) -> None:
    with counting() as asked:
        try:
            failure = run_share(prepare, options, share)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    sender.send((failure, asked.to_json()))
    if failure is not None:
        raise SystemExit(4)
