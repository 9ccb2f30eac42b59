"""Look at, check, reshard and export training checkpoints of any framework, without the framework.

The names below are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__: list[str] = ["__version__"]

_EXPORTS: dict[str, str] = {}


def __getattr__(name: str) -> Any:
    """Load an exported name from the module that defines it."""
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    """The exported names."""
    return sorted([*__all__, *_EXPORTS])
