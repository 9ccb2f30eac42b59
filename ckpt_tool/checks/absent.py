"""What is known to have been there: files that others tell of, weights that have a name and no elements, anything.

ZeRO-3 leaves a tensor of shape [0] in place of each parameter that it has shared out; a state dict taken without
gathering them, of a whole model or of an adapter, holds nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.sizes import counted

__all__ = ["absent_findings", "missing_file_findings", "telling"]

_LEAVES = ("weight", "bias")
_SHOWN = 3


def missing_file_findings(manifest: Manifest, told: Iterable[Finding]) -> Iterator[Finding]:
    """An error for each file that the reader found to be missing, but for those that ``told`` says already."""
    errors = [finding for finding in told if finding.severity is Severity.ERROR]
    is_said = telling(finding.message for finding in errors)
    named = {finding.where.path for finding in errors if finding.where is not None}
    for path in map(str, manifest.info.get("missing_files") or ()):
        if path not in named and not is_said(path):
            message = f"{path} is missing or cannot be read: what it held is not here"
            yield Finding("missing-file", Severity.ERROR, message, where=FileRange(path, 0, 0))


def telling(sentences: Iterable[str]) -> Callable[[str], bool]:
    """Whether some of the sentences name a file; of many files and sentences each word is looked at once.

    >>> telling(["a.pt, b.pt are missing"])("a.pt")
    True
    """
    said = " ".join(sentences)
    words = {word.strip(",;:.'\"()") for word in said.split()}
    return lambda path: path in words or (" " in path and path in said)


def absent_findings(manifest: Manifest) -> Iterator[Finding]:
    """One finding about weights of shape [0]: an error where the model has no others, as then nothing was saved.

    Another about a checkpoint that holds nothing at all.
    """
    tensors = manifest.tensors
    if not len(tensors) and not manifest.blobs:
        said = "neither a tensor nor an object is in it: what was saved was empty, as on a rank that holds nothing"
        yield Finding("nothing-saved", Severity.ERROR, said)
    elif not len(tensors):
        said = f"no tensor is in it, only {counted(len(manifest.blobs), 'other object')}"
        yield Finding("no-tensors", Severity.INFO, said)
    of_model = tensors.section == SECTIONS.index("model")
    rows = np.flatnonzero(of_model & (tensors.ndim == 1) & (tensors.numel == 0)).tolist()
    empty = [
        tensors.fqns[row]
        for row in rows
        if tensors.dtypes[row].kind == "float" and tensors.fqns[row].rpartition(".")[2] in _LEAVES
    ]
    if not empty:
        return
    is_all = not (of_model & (tensors.numel > 0)).any()
    shown = ", ".join(empty[:_SHOWN]) + (" ..." if len(empty) > _SHOWN else "")
    yield Finding(
        "absent-weight",
        Severity.ERROR if is_all else Severity.WARNING,
        f"weight data absent: {counted(len(empty), 'weight', 'have')} the shape [0], as ZeRO-3 leaves parameters that "
        f"are not gathered before they are saved: {shown}",
        fqn=empty[0],
    )
