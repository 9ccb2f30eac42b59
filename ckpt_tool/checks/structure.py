"""Structure is everything that can be judged from the manifest and the listing alone, without a single request."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tool.checks.absent import absent_findings
from ckpt_tool.checks.companions import companion_findings
from ckpt_tool.checks.coverage import coverage_findings
from ckpt_tool.checks.extents import Extents, extent_findings, length_findings, loss_findings
from ckpt_tool.checks.layers import layer_findings
from ckpt_tool.checks.optimizer import optimizer_findings
from ckpt_tool.checks.sharing import sharing_findings
from ckpt_tool.checks.strays import stray_findings
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.storage.store import Listing

__all__ = ["structure_findings"]


def structure_findings(manifest: Manifest, listing: Listing, extents: Extents) -> Iterator[Finding]:
    """Files, extents, coverage, absent weights, shared bytes, layers, optimizer state and companions; reads nothing.

    Args:
        manifest: chunks may be unresolved; their container items are then what is judged.
        listing: what is really there.
        extents: the two compared.
    """
    yield from extent_findings(manifest, listing, extents)
    yield from loss_findings(manifest, extents)
    yield from length_findings(manifest)
    yield from coverage_findings(manifest)
    yield from absent_findings(manifest)
    yield from sharing_findings(manifest, extents.has_chunk)
    yield from stray_findings(manifest, listing)
    yield from companion_findings(manifest, listing)
    yield from layer_findings(manifest)
    yield from optimizer_findings(manifest)
