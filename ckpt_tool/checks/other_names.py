"""A finding about a missing file says under which other name it may lie here. Knows names and sizes; reads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.storage.altered_names import under_other_names
from ckpt_tool.storage.store import Listing

__all__ = ["with_other_names"]


def with_other_names(findings: Iterable[Finding], manifest: Manifest, listing: Listing) -> Iterator[Finding]:
    """The findings; the first about a file that is not here ends with the one which may be it, if there is one."""
    told = list(findings)
    coded = {entry.path for entry in manifest.files if entry.part is not None}
    missing = {each.where.path for each in told if each.where is not None} - listing.sizes.keys() - coded
    others = under_other_names(missing, listing.sizes, manifest.files.paths) if missing else {}
    for finding in told:
        other = None if finding.where is None else others.pop(finding.where.path, None)
        yield finding if other is None else replace(finding, message=f"{finding.message}; {other.said}")
