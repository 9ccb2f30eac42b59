"""Which rules hold for the tensors of a checkpoint: the user's file, the family that the names fit, or both."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpt_tool.api.arguments import read_option_file
from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.family import detect_family
from ckpt_tool.layout.rules import RuleSet, load_rules

__all__ = ["rules_for"]


def rules_for(
    fqns: Sequence[str], path: str | os.PathLike[str] | None, *, is_optional: bool
) -> tuple[RuleSet, tuple[str, ...]]:
    """The user's rules in front of those of the family that the names fit, and how the family was told."""
    text = "" if path is None else read_option_file(path, "rules")
    source = "rules" if path is None else os.fspath(path)
    try:
        detection = detect_family(fqns)
    except LayoutError:
        if path is None and not is_optional:
            raise
        return load_rules(text, source=source), ()
    evidence = tuple(f"family {sentence}" for sentence in detection.evidence)
    return (detection.family if path is None else load_rules(text, source=source, base=detection.family)), evidence
