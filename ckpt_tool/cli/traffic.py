"""What a command asked of remote storage, in a line after its result. Local files are not counted."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckpt_tool.api.traffic import Traffic, counting
from ckpt_tool.cli.output import write_lines
from ckpt_tool.cli.text import Span, line
from ckpt_tool.sizes import format_bytes

__all__ = ["traffic_shown", "traffic_text"]


@contextmanager
def traffic_shown(arguments: Sequence[str]) -> Iterator[None]:
    """A command, however it ends; a program that reads its result finds the figures there instead."""
    with counting() as traffic:
        try:
            yield
        finally:
            if traffic.n_requests and not {"--json", "--quiet", "-q"} & set(arguments):
                sys.stdout.flush()
                write_lines([line(Span("storage: ", "cyan"), traffic_text(traffic))], sys.stderr)


def traffic_text(traffic: Traffic) -> str:
    """Requests and bytes.

    >>> traffic_text(Traffic(n_requests=12, n_listings=1, n_retries=2, received_nbytes=2048))
    '12 requests (1 listing, 2 repeated), 2.00 KiB received'
    """
    kinds = [f"{traffic.n_listings:,} listing{'s' * (traffic.n_listings != 1)}"] if traffic.n_listings else []
    kinds += [f"{traffic.n_retries:,} repeated"] if traffic.n_retries else []
    text = f"{traffic.n_requests:,} request{'s' * (traffic.n_requests != 1)}"
    text += f" ({', '.join(kinds)})" if kinds else ""
    text += f", {format_bytes(traffic.received_nbytes)} received" if traffic.received_nbytes else ""
    return text + (f", {format_bytes(traffic.sent_nbytes)} sent" if traffic.sent_nbytes else "")
