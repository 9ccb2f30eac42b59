"""The reader of one file that torch.save wrote, whatever object is in it.

Names are the keys that lead to a tensor, joined by dots; a key path keeps them apart, with integer keys as integers.
Two entries of one joined name (``{"a.b": ..., "a": {"b": ...}}``) both stay reachable: the later one is called
``a.b#2``. Values that are no tensors are blobs of kind ``value``, grouped as torch itself groups them when it flattens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any

from ckpt_tool.errors import CkptError, NotFound
from ckpt_tool.formats._companions import config_findings, read_companions, tied_note
from ckpt_tool.formats._hf_index import variant_notes
from ckpt_tool.formats._split_names import unlike
from ckpt_tool.formats._torch_file.archive import HEAD_NBYTES, is_torch_head, open_torch_file, zip_directory
from ckpt_tool.formats._torch_file.assemble import assemble
from ckpt_tool.formats._torch_file.described import manifest_of, part_of, section_by_root
from ckpt_tool.formats._torch_file.entries import entries_of
from ckpt_tool.formats._torch_file.findings import archive_findings, shared_bytes_findings
from ckpt_tool.formats._torch_file.rank_names import find_sets, rank_file
from ckpt_tool.formats._torch_file.reading import TorchFilesReader
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.sizes import counted

__all__ = ["READER", "TorchSaveReader"]

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")
_NUMBERED = re.compile(r"(?:.*/)?[^/]*-\d+-of-(\d+)\.[a-z]+")  # pytorch_model-00001-of-00003.bin
# Of transformers, of accelerate where FSDP gathers all weights (FULL_STATE_DICT), of diffusers.
_MODEL_NAMES = ("pytorch_model.bin", "pytorch_model_fsdp.bin", "diffusion_pytorch_model.bin")
_HF_MODEL = re.compile(r"(?:(?:diffusion_)?pytorch_model|pytorch_model_fsdp|adapter_model)(?:-\d+-of-\d+)?\.bin")
_OTHER_FORMATS = (".metadata", ".distcp", ".safetensors", ".index.json", ".zarray")
_MAX_PROBED = 8


class TorchSaveReader(TorchFilesReader):
    """One torch.save file.

    Requests: ``read`` makes three (head, directory, ``data.pkl``), a legacy stream three, one more for a directory
    beyond 64 KiB, for each compressed storage, and for each companion of a Hugging Face model. ``resolve`` makes one
    for the directory and reads the local headers of the rows asked for, neighbours together; a file of at most 64 KiB
    has nothing left to resolve.
    """

    name = "torch-save"

    def probe(self, source: Source) -> Probe:
        """By the first bytes of the file named, or of the only such file in the folder: one request per candidate."""
        entry = source.listing.entry
        if entry is not None:
            return self._probe_file(source, entry)
        likely = _candidates(source)
        if not likely or len(likely) > _MAX_PROBED:
            return Probe(0.0, f"{counted(len(likely), 'file')} that could be torch.save's; it takes one, name it")
        others = next((path for path in source.listing.paths if path.endswith(_OTHER_FORMATS)), None)
        if others is not None:
            return Probe(0.2, f"{others} says that this is another format")
        if len(likely) > 1 and any(len(found.files) > 1 for found in find_sets(likely)):
            return Probe(0.2, "several files that differ in a rank number")
        found = [path for path in likely if _is_torch_file(source, path)]
        if len(found) == 1:
            return Probe(0.7, f"{found[0]} is the only torch.save file here")
        if not found:
            return Probe(0.0, "no file here begins as torch.save's do")
        return Probe(0.3, f"{len(found):,} torch.save files ({', '.join(found[:3])} ...): name one")

    def _probe_file(self, source: Source, path: str) -> Probe:
        if not _is_torch_file(source, path):
            return Probe(0.0, f"{path} does not begin as torch.save's files do")
        if path.endswith(".distcp"):  # items of DCP are torch.save files, one after the other
            return Probe(0.4, f"{path} is one file of a DCP checkpoint")
        named = rank_file(path)
        if named is not None:
            siblings = [p for p in source.listing.sizes if (other := rank_file(p)) and other.family == named.family]
            if len(siblings) > 1:
                return Probe(0.4, f"{path} is one of {counted(len(siblings), 'rank file')}")
        return Probe(0.9, f"{path} begins as torch.save's files do")

    def read(self, source: Source) -> Manifest:
        """See the class for its cost."""
        path = _chosen(source)
        file = open_torch_file(source, path)
        entries = entries_of(file.root)
        named = rank_file(path)
        rank = None if named is None else named.rank
        found = assemble([part_of(file, entries, rank)], section_by_root([file.root]))
        if found.mesh is not None or found.n_claiming_ranks:
            world_size = max(found.n_claiming_ranks, prod(found.mesh.sizes) if found.mesh is not None else 0)
            found.notes.append(f"one rank's file of {world_size:,}: tensors have only the boxes of that rank")
        numbered = _NUMBERED.fullmatch(path)
        if numbered is not None and int(numbered[1]) > 1:
            found.notes.append(f"{path} is one of {counted(int(numbered[1]), 'file')}: open the folder for all of them")
        if file.directory is not None and file.directory.is_torchscript:
            found.notes.append(
                f"{path} is a TorchScript program: tensors of its modules are read, no constants of its code"
            )
        found.notes += _folders_note(source)
        info: dict[str, Any] = {"container": file.kind}
        if not _is_hf_model(path):
            return manifest_of(self.name, source.listing.url, [file], [entries], found, info)
        companions, notes = read_companions(source)
        others = unlike([path], (other for other in source.listing.paths if "/" not in other and other != path))
        found.notes += [*variant_notes(others), *notes]
        info = {**info, **({"left_out": list(others)} if others else {}), **companions}
        manifest = manifest_of(self.name, source.listing.url, [file], [entries], found, info)
        return manifest.replace(notes=(*manifest.notes, *tied_note(companions, manifest.tensors.index)))

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Missing checksums, and tensors that share bytes; one request for the directory."""
        yield from archive_findings(source, manifest)
        yield from shared_bytes_findings(manifest)
        if any(map(_is_hf_model, manifest.files.paths)):
            yield from config_findings(source, manifest)


def _folders_note(source: Source) -> list[str]:
    """Folders beside the file at the top that hold tensors too, as in runs that keep a state above their steps."""
    below = (path for path in source.listing.paths if "/" in path and path.endswith((*_SUFFIXES, *_OTHER_FORMATS)))
    folders = sorted({path.partition("/")[0] for path in below})
    shown = ", ".join(folders[:3]) + (" ..." if len(folders) > 3 else "")
    return [f"left out, to be given by themselves: files in the folders {shown}"] if folders else []


def _is_hf_model(path: str) -> bool:
    """Whether a file is called as transformers and PEFT call theirs, whose settings lie beside it."""
    return _HF_MODEL.fullmatch(path) is not None


def _candidates(source: Source) -> list[str]:
    """Files at the top that may be torch.save's; one called as Hugging Face's is the model, what lies beside it not.

    Random states and such of each rank are not, where there is anything else.
    """
    model = next((name for name in _MODEL_NAMES if name in source.listing), None)
    if model is not None:
        return [model]
    top = [path for path in source.listing.paths if "/" not in path and not path.startswith(".")]
    likely = [path for path in top if path.endswith(_SUFFIXES)] or top
    return [path for path in likely if (named := rank_file(path)) is None or named.kind != "extra_state"] or likely


def _chosen(source: Source) -> str:
    """The file to read.

    Raises:
        NotFound: there is none.
    """
    if source.listing.entry is not None:
        return source.listing.entry
    likely = _candidates(source)
    if not likely:
        raise NotFound("no torch.save file", where=source.listing.url)
    return next((path for path in likely if _is_torch_file(source, path)), likely[0])


def _is_torch_file(source: Source, path: str) -> bool:
    """By content: a zip whose first member is another than torch's is opened as far as its directory."""
    if source.listing.nbytes(path) == 0:
        return False
    head = source.head(path, HEAD_NBYTES)
    if is_torch_head(head):
        return True
    if not head.startswith(b"PK\x03\x04"):
        return False
    try:
        zip_directory(source, path)
    except CkptError:
        return False
    return True


READER = TorchSaveReader()
