"""The common state is what is the same on all ranks: arguments, counters, hyperparameters of optimizer and scheduler.

``common.pt`` until mcore 0.16, the object ``common_state/shard_0_1`` from 0.19; what it holds is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._torch_file import headers
from ckpt_tool.formats._torch_file.archive import TorchFile, open_torch_file
from ckpt_tool.formats._torch_file.assemble import Assembly, Part, assemble
from ckpt_tool.formats._torch_file.entries import Entry, entries_of
from ckpt_tool.formats.base import Checksum, Source
from ckpt_tool.formats.megatron.facts import Facts, facts_of
from ckpt_tool.formats.megatron.items import open_item
from ckpt_tool.formats.megatron.location import other_iteration
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Blob, FileRange, Manifest
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = [
    "COMMON_FILE", "COMMON_OBJECT", "Common", "common_checksums", "common_findings", "common_of", "iteration_findings",
    "rank_state_note", "read_common",
]  # fmt: skip

COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"


@dataclass(frozen=True)
class Common:
    """The common state, taken apart."""

    where: str
    """The file or object that it was read from, empty when there is none."""
    root: Mapping[str, Any]
    assembly: Assembly
    int_keyed: tuple[str, ...]
    """Dotted names of dicts in it whose keys are numbers."""

    @property
    def facts(self) -> Facts:
        """The run's arguments."""
        return facts_of(self.root.get("args"))

    @property
    def iteration(self) -> int | None:
        """Steps that were done; Lightning, below NeMo, calls them ``global_step``."""
        value = self.root.get("iteration", self.root.get("global_step"))
        return value if type(value) is int and value.bit_length() < 64 else None

    def notes(self, url: str, folder: str) -> Iterator[str]:
        """What a person should know, of a common state that lies in ``folder`` of what ``url`` names."""
        if said := other_iteration(url, folder, self.iteration):
            yield said
        if not self.where:
            yield (
                f"no {COMMON_FILE} and no {COMMON_OBJECT}: the run's arguments, iteration and schedules are not known"
            )
        yield from rank_state_note(self.root)
        yield from self.assembly.notes

    @property
    def sharding_type(self) -> str | None:
        """What the optimizer says of its own form."""
        content = self.root.get("content_metadata")
        optimizer = self.root.get("optimizer")
        stated = content.get("distrib_optim_sharding_type") if isinstance(content, Mapping) else None
        if not isinstance(stated, str) and isinstance(optimizer, Mapping):
            stated = optimizer.get("param_state_sharding_type")
        return stated if isinstance(stated, str) else None


def read_common(source: Source, blobs: Sequence[Blob]) -> Common:
    """The common state of a distributed checkpoint, by Megatron's own rule: the file if it is there, else the object.

    Costs the three requests of a torch file, or one for the object; none when there is neither. To be salvaged, tensors
    are read also where the object's file is missing or cut.
    """
    if COMMON_FILE in source.listing:
        return common_of(open_torch_file(source, COMMON_FILE), COMMON_FILE)
    for blob in blobs:
        if blob.fqn == COMMON_OBJECT and blob.where is not None:
            try:
                return common_of(open_item(source, blob.where, blob.fqn), COMMON_OBJECT)
            except (FormatError, NotFound):
                if not source.is_salvage:
                    raise
    return Common("", {}, Assembly(), ())


def iteration_findings(manifest: Manifest) -> Iterator[Finding]:
    """A warning where the folder's number is another one than the state's."""
    said = other_iteration(manifest.root, manifest.info.get("folder") or "", manifest.info.get("step"))
    if said is not None:
        yield Finding("other-iteration", Severity.WARNING, said)


def common_findings(manifest: Manifest) -> Iterator[Finding]:
    """An error where a distributed checkpoint has no common state: every version of mcore writes and wants one.

    And what `iteration_findings` finds.
    """
    yield from iteration_findings(manifest)
    info = manifest.info
    if not info.get("common_state"):
        path = "/".join(filter(None, (info.get("folder"), COMMON_FILE)))
        said = (
            f"{path} is missing, and there is no {COMMON_OBJECT} in its place: Megatron loads no checkpoint without "
            "the run's arguments, iteration and hyperparameters"
        )
        yield Finding("missing-file", Severity.ERROR, said, where=FileRange(path, 0, 0))


def common_of(file: TorchFile, where: str, leave_out: Sequence[str] = ()) -> Common:
    """The common state in an opened file or item, without the top-level keys ``leave_out``.

    Raises:
        FormatError: it is no dict.
    """
    if not isinstance(file.root, dict):
        raise FormatError(f"the common state is {type(file.root).__name__}, expected a dict", where=where)
    root = {key: value for key, value in file.root.items() if key not in leave_out}
    entries = entries_of(root)
    items: list[Entry] = entries.items if root else []
    part = Part(file.path, None, items, file.storages, file.big_endian)
    return Common(where, root, assemble([part], section_of), tuple(entries.int_keyed))


def common_checksums(source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
    """What the zip records that the common state is in, where it is in a file of its own."""
    folder = manifest.info.get("folder")
    path = f"{folder}/{COMMON_FILE}" if folder else COMMON_FILE
    return headers.checksums(source, headers.only_zips(source, manifest, [path]))


def rank_state_note(root: Mapping[str, Any]) -> Iterator[str]:
    """A line on a ``param_state`` list in the common state: the list is rank 0's alone, its length is too."""
    optimizers = root.get("optimizer")
    for name, value in optimizers.items() if isinstance(optimizers, Mapping) else ():
        states = [value] if name == "param_state" else []
        if isinstance(value, Mapping) and "param_state" in value:
            states.append(value["param_state"])
        for state in states:
            if isinstance(state, (list, Mapping)):
                yield (
                    f"the common state holds param_state of rank 0 only ({counted(len(state), 'entry')}): a rank with "
                    "another "
                    'number of parameters fails in Megatron with "Cannot merge two lists with different lengths"; the '
                    "optimizer's tensors have keys of their own and are read from those"
                )
