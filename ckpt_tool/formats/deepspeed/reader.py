"""The reader of DeepSpeed's own checkpoints, ZeRO stages 0 to 3, with pipelines, experts and tensor parallelism.

Names are those of ``build``. ``mesh`` has the axes ``pp dp tp``; ``info`` has ``step``, ``zero_stage``,
``deepspeed_version``, ``model_dtype`` and what is missing, absent or could not be joined.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tool.errors import NotFound
from ckpt_tool.formats._disagreeing import DISAGREEING, differing, disagreement_findings
from ckpt_tool.formats._missing import missing_text
from ckpt_tool.formats._replicas import COPIES, MAX_COPY_NBYTES
from ckpt_tool.formats._torch_file.described import manifest_of
from ckpt_tool.formats._torch_file.findings import archive_findings
from ckpt_tool.formats._torch_file.reading import TorchFilesReader
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.formats.deepspeed.build import build
from ckpt_tool.formats.deepspeed.expected import lacks_optimizer, missing_files, told_by_few
from ckpt_tool.formats.deepspeed.facts import add_notes, facts_of, mesh_of, placement_of, values_of_ranks
from ckpt_tool.formats.deepspeed.findings import WITHOUT_OPTIMIZER, checkpoint_findings, copy_findings, parameter_of
from ckpt_tool.formats.deepspeed.locate import Located, locate, refuse_single_file, single_file_text
from ckpt_tool.formats.deepspeed.modules import weights_of
from ckpt_tool.formats.deepspeed.names import LATEST, LATEST_UNIVERSAL, TagFiles, tag_files, tags_below
from ckpt_tool.formats.deepspeed.opened import Checkpoint, open_checkpoint
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.sizes import counted

__all__ = ["READER", "DeepSpeedReader"]


_WEIGHTS_ALONE = (".safetensors", ".bin")


class DeepSpeedReader(TorchFilesReader):
    """A tag folder, or its parent with ``latest``.

    Requests: ``read`` makes three per file and one for ``latest``; ``resolve`` one per file and the local headers of
    the rows asked for.
    """

    name = "deepspeed"

    def probe(self, source: Source) -> Probe:
        """By names alone."""
        text = single_file_text(source)
        if text is not None:
            return Probe(0.95, f"{source.listing.entry} is {text}")
        if source.listing.entry is not None:
            return Probe(0.0, "a single file that DeepSpeed does not name so")
        if any(path.startswith("zero/") for path in source.listing.sizes):
            return Probe(0.3, "a folder zero/, as universal checkpoints have it")
        here = tag_files(source.listing.sizes, "")
        if here.is_any:
            return Probe(
                0.95,
                f"{counted(len(here.models), 'model state')} and {counted(len(here.optims), 'optimizer partition')}",
            )
        if LATEST in source.listing and tags_below(source.listing):
            # surer than a reader of the weights alone that transformers' Trainer puts beside them
            return Probe(0.97, "latest, beside folders with model states and optimizer partitions")
        return Probe(0.0, "no files *mp_rank_*_model_states.pt")

    def read(self, source: Source) -> Manifest:
        """See the class for its cost.

        Raises:
            NotFound: one file of a checkpoint was named, or ``latest`` names a folder that is not here.
            FormatError: files contradict each other or themselves.
            Unsupported: a layout that cannot be read.
        """
        found, located = _opened(source)
        weights = weights_of(found)
        placement = placement_of(found, weights)
        built = build(found, placement, weights)
        built.assembly.mesh = mesh_of(found)
        missing = missing_files(
            found.files,
            found.models,
            mp_world_size=found.mp_world_size,
            tp_world_size=found.tp_world_size,
            dp_world_size=found.dp_world_size,
        )
        has_states = found.first.root.get("optimizer") is not None
        add_notes(found, built, weights, placement, missing, has_states=has_states)
        if LATEST_UNIVERSAL in source.listing:
            built.assembly.notes.append(
                f"{LATEST_UNIVERSAL} names a universal checkpoint beside it; this is the one in {LATEST}"
            )
        weights_alone = [path for path in source.listing.paths if "/" not in path and path.endswith(_WEIGHTS_ALONE)]
        if weights_alone:
            built.assembly.notes.append(
                f"{counted(len(weights_alone), 'file')} beside it hold weights alone, such as {weights_alone[0]}; "
                "give one to read it"
            )
        stage = found.optims[0].stage if found.optims else 3 if weights.is_stage3 else 0
        info = facts_of(found, located, built, weights, placement, missing, stage=stage)
        if lacks_optimizer(found.files, found.models):
            info["optimizer_lost"] = True
        if mixed := differing(values_of_ranks(found)):
            info[DISAGREEING] = mixed
            built.assembly.notes += [finding.message for finding in disagreement_findings(mixed)]
        manifest = manifest_of(self.name, source.listing.url, found.opened, built.entries, built.assembly, info)
        small = (manifest.tensors.nbytes <= MAX_COPY_NBYTES).tolist()
        copies = [fqn for fqn, is_small in zip(manifest.tensors.fqns, small, strict=True)
                  if is_small and parameter_of(fqn) in placement.copies]  # fmt: skip
        if copies:
            manifest = manifest.replace(info={**manifest.info, COPIES: copies})
        return manifest.replace(chunks=built.chunks.joined(manifest.tensors, manifest.chunks))

    def lacking(self, source: Source) -> tuple[str, ...]:
        """What one model state tells, of a pipeline one of each stage: three requests each."""
        missing, is_without = told_by_few(source, _located(source)[0])
        said = [missing_text(missing)] if missing else []
        return (*said, *([WITHOUT_OPTIMIZER] if is_without else ()))

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Missing files, absent weights, and copies that differ: these are read."""
        yield from checkpoint_findings(manifest)
        names = [*manifest.info.get("replicated", ()), *manifest.info.get("unjoined", ())]
        names += [parameter_of(fqn) for fqn in manifest.info.get(COPIES, ())]
        if names:
            found, _ = _opened(source)
            weights = weights_of(found)
            yield from copy_findings(source, found, weights, names, manifest.info)
        yield from archive_findings(source, manifest)


def _located(source: Source) -> tuple[TagFiles, Located]:
    refuse_single_file(source)
    here = tag_files(source.listing.sizes, "")
    located = Located("", None) if here.is_any else locate(source, LATEST)
    files = tag_files(source.listing.sizes, located.folder)
    if not files.is_any:
        raise NotFound("no model states and no optimizer partitions", where=f"{source.listing.url}/{located.folder}")
    return files, located


def _opened(source: Source) -> tuple[Checkpoint, Located]:
    files, located = _located(source)
    return open_checkpoint(source, files), located


READER = DeepSpeedReader()
