"""What stands in a target only until it is finished, and what makes it a checkpoint then, by names alone."""

from __future__ import annotations

__all__ = ["COMMIT_NAMES", "JOURNAL_NAME", "MARKER_NAME", "OWN_NAMES", "PROCESS_NAME", "TOGETHER_NAME"]

MARKER_NAME = "CKPT_UNFINISHED"
"""Says that the folder is no checkpoint, and whose it is."""
JOURNAL_NAME = "CKPT_JOURNAL"
"""What is done for good."""
TOGETHER_NAME = "CKPT_TOGETHER"
"""Begins the name by which the first of several processes says that it leads."""
PROCESS_NAME = "CKPT_PROCESS"
"""Begins the names by which the others say how far they are."""
OWN_NAMES = (JOURNAL_NAME, "." + JOURNAL_NAME, MARKER_NAME, PROCESS_NAME, TOGETHER_NAME)
"""Beginnings of names of what only a run needs."""

COMMIT_NAMES = (
    ".metadata", "index.json", "metadata.json", "ckpt_layout.json", "latest", "latest_checkpointed_iteration.txt",
)  # fmt: skip
"""Ends of names of the files that make a folder a checkpoint in one format or another: the first to go."""
