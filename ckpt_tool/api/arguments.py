"""Arguments of a training run as a user types them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ckpt_tool.errors import UsageError

__all__ = ["parse_arguments"]


def parse_arguments(texts: Iterable[str]) -> dict[str, Any]:
    """Arguments as they are typed; values are JSON, or else text.

    >>> parse_arguments(["seq_length=4096", "transformer_impl=local", "swiglu=true"])
    {'seq_length': 4096, 'transformer_impl': 'local', 'swiglu': True}

    Raises:
        UsageError: one is not ``NAME=VALUE``.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name.isidentifier() and separator):
            raise UsageError(f"an argument is NAME=VALUE, got {text!r}", hint="for example --arg seq_length=4096")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
