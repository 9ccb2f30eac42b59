"""What holds for every test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import settings

if TYPE_CHECKING:
    from pathlib import Path

# A deadline would make a law fail where the machine is busy.
settings.register_profile("ckpt", deadline=None)
settings.load_profile("ckpt")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """True for Python files below tests/ that are not tests: doctest collection would import workers and scripts."""
    is_support = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_support else None
