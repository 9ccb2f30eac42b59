"""torch-checkpointing as the strongest of the other loaders, where it is installed."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_MAKE = Path(__file__).parents[2] / "fixtures/torch_checkpointing/make"


def has_peer() -> bool:
    """Whether torch-checkpointing is installed."""
    return find_spec("torch_checkpointing") is not None


def manager() -> Any:
    """A manager that reshards, on CPUs."""
    sys.path.insert(0, str(_MAKE))
    from _cpu import patch  # type: ignore[import-not-found]
    from torch_checkpointing import CheckpointManager, ItemSpec  # type: ignore[import-not-found]
    from torch_checkpointing.config import SyncCheckpointSaverConfig  # type: ignore[import-not-found]
    from torch_checkpointing.default_resharder import DefaultResharder  # type: ignore[import-not-found]
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig  # type: ignore[import-not-found]

    patch()
    logging.disable(logging.WARNING)
    resharder = DefaultResharder()
    return CheckpointManager(
        CheckpointManager.Config(
            items={"model": ItemSpec(resharder=resharder), "optim": ItemSpec(resharder=resharder)},
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )
