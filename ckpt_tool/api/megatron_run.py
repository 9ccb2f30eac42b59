"""What the run behind a Megatron checkpoint was like, in lines for people.

Who had which layers and experts, in which form the optimizer's state is, and what can be made of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.errors import LayoutError
from ckpt_tool.manifest.model import Manifest

__all__ = ["run_facts"]

_SIZES = (
    ("TP", "tensor_model_parallel_size"), ("PP", "pipeline_model_parallel_size"),
    ("VPP", "virtual_pipeline_model_parallel_size"), ("EP", "expert_model_parallel_size"),
    ("ETP", "expert_tensor_parallel_size"), ("CP", "context_parallel_size"), ("DP", "data_parallel_size"),
)  # fmt: skip

_ANYWHERE = "to any TP, PP, VPP, EP, ETP and DP (--to megatron-dist, megatron-legacy)"
_MAX_OWNERS = 8
_LAYER = re.compile(r"\bdecoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.linear_fc[12]\.weight(\d+)")


def run_facts(manifest: Manifest) -> list[tuple[str, str]]:
    """Label and text of each line; none for checkpoints that are not Megatron's.

    A fact that the checkpoint does not tell is named as such.
    """
    if manifest.format == "dcp" and _is_of_fsdp(manifest):
        return list(_fsdp_facts(manifest))
    return list(_facts(manifest)) if manifest.format.startswith("megatron") else []


def _is_of_fsdp(manifest: Manifest) -> bool:
    """Whether a checkpoint in DCP has what Megatron-FSDP saves: see ``convert.megatron_fsdp``."""
    is_wrapped = any(
        path[0] == "model" and str(path[-1]).startswith("module.") for path in manifest.tensors.paths or ()
    )
    return is_wrapped and any(blob.fqn == "args" for blob in manifest.blobs)


def _fsdp_facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What names tell; sizes of the run stand in an object, whose bytes an inspection does not read."""
    yield "program", "Megatron-FSDP (fsdp_dtensor), names of wrapped modules"
    names = [str(path[-1]) for path in manifest.tensors.paths or () if path[0] == "model"]
    layers = {int(found[1]) for name in names if (found := _LAYER.search(name))}
    if layers:
        yield "layers", f"{_ranges(sorted(layers))}, each under names of its own, which do not tell a stage"
    experts = {int(found[1]) for name in names if (found := _EXPERT.search(name))}
    if experts:
        yield "experts", f"{len(experts):,}, numbered {_ranges(sorted(experts))} whatever rank has them"
    has_state = any(path[:2] == ("optimizer", "state") for path in manifest.tensors.paths or ())
    yield "optimizer", "fsdp_dtensor, by parameter" if has_state else "no state"
    yield "reshards", f"{'weights and optimizer' if has_state else 'weights'} {_ANYWHERE}"


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    info = manifest.info
    args = info.get("args")
    args = args if isinstance(args, Mapping) else {}
    sizes = [f"{label} {args[name]}" for label, name in _SIZES if args.get(name)]
    yield "parallel", " ".join(sizes) if sizes else "not known: no args of the run were saved"
    layers = _layers(info, args)
    if layers:
        yield "layers", layers
    experts = args.get("num_experts")
    if isinstance(experts, int) and experts:
        yield "experts", f"{experts:,}; {_owners(experts, args.get('expert_model_parallel_size') or 1)}"
    yield "optimizer", _optimizer(info)
    yield "reshards", _reshards(manifest)


def _owners(n_experts: int, n_ranks: int) -> str:
    """Which expert-parallel rank has which experts; of many ranks the first ones and the last.

    >>> _owners(256, 64)
    'EP rank 0: 0-3; EP rank 1: 4-7; ... EP rank 63: 252-255'
    """
    size, rest = divmod(n_experts, n_ranks)
    if rest:
        return f"which are no equal share for {n_ranks:,} EP ranks"
    owned = [f"EP rank {rank}: {_ranges(range(rank * size, (rank + 1) * size))}" for rank in range(n_ranks)]
    return "; ".join(owned if n_ranks <= _MAX_OWNERS else [*owned[:2], f"... {owned[-1]}"])


def _layers(info: Mapping[str, Any], args: Mapping[str, Any]) -> str:
    """Which stage, and which of its model chunks, has which layers; empty where not even their number is known."""
    stages: Sequence[Sequence[int]] = info.get("layer_stages") or []
    told: Sequence[Sequence[Sequence[int]]] = info.get("layer_chunks") or []
    n_layers, n_chunks = args.get("num_layers"), args.get("virtual_pipeline_model_parallel_size") or 1
    if not stages and isinstance(n_layers, int) and args.get("pipeline_model_parallel_size") == 1:
        stages = [range(n_layers)]
    ahead = args.get("mtp_num_layers")
    more = f"; {ahead} for multi-token prediction behind them" if isinstance(ahead, int) and ahead else ""
    if stages:
        held = told or [_chunks_of(own, n_chunks) for own in stages]
        return "; ".join(f"stage {number}: {_of_stage(own)}" for number, own in enumerate(held)) + more
    if not isinstance(n_layers, int):
        return ""
    return f"{n_layers:,}{more}; which stage has which is not known, as the ranks that saved them do not tell"


def _chunks_of(layers: Sequence[int], n_chunks: int) -> Sequence[Sequence[int]]:
    """A stage's layers by model chunk, all in one where runs of them do not tell."""
    from ckpt_tool.formats.megatron.stages import chunk_layers  # 5 ms of every inspect

    try:
        return chunk_layers(layers, n_chunks)
    except LayoutError:
        return [layers]


def _of_stage(chunks: Sequence[Sequence[int]]) -> str:
    if len(chunks) == 1:
        return _ranges(chunks[0])
    return ", ".join(f"chunk {number}: {_ranges(own)}" for number, own in enumerate(chunks))


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers with runs drawn together.

    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "none"


def _optimizer(info: Mapping[str, Any]) -> str:
    form = info.get("optimizer_form")
    if form is None:
        return "no state"
    return f"{form}, in the form of its buffers" if info.get("optimizer_undecoded") else str(form)


def _reshards(manifest: Manifest) -> str:
    """What can be written, and the fact that is missing where not all can."""
    info = manifest.info
    missing = info.get("missing_files")
    if missing:
        return f"none before these files are there: {', '.join(map(str, missing[:3]))}"
    undecoded = info.get("optimizer_undecoded")
    if undecoded:
        return f"weights {_ANYWHERE}; the optimizer's state to none: {undecoded}"
    what = "weights" if info.get("optimizer_form") is None else "weights and optimizer"
    possible = f"{what} {_ANYWHERE}"
    if any(blob.fqn.partition(".")[0] == "args" for blob in manifest.blobs):
        return possible
    from ckpt_tool.api.convert.megatron_settings import missing_arguments  # few checkpoints need it

    missing = missing_arguments(manifest, {})
    return f"{possible}; no args were saved, so they need {' '.join(missing)}" if missing else possible
