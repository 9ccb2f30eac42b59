"""``metadata.json`` of mcore: which backend wrote a distributed checkpoint; it is written last."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpt_tool.formats.base import Source

__all__ = ["CONFIG_NAME", "sharded_config"]

CONFIG_NAME = "metadata.json"
_MAX_NBYTES = 4 << 10


def sharded_config(source: Source) -> Mapping[str, Any]:
    """Its content, empty when it is no such file: one request, cached."""
    if CONFIG_NAME not in source.listing or source.listing.nbytes(CONFIG_NAME) > _MAX_NBYTES:
        return {}
    try:
        config = json.loads(source.head(CONFIG_NAME, _MAX_NBYTES))
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
