"""Which files a tag folder should have, by what its model states say: those of ranks, layers and experts.

Sources: ``runtime/engine.py`` (``dp_world_size``, ``mp_world_size``, ``num_experts``, ``param_shapes``),
``runtime/pipe/module.py`` (``ckpt_layer_path``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt_tool.formats.base import Source
from ckpt_tool.formats.deepspeed.names import TagFiles
from ckpt_tool.formats.deepspeed.opened import ModelState, number_of, open_models
from ckpt_tool.formats.deepspeed.ranks import tp_world_size_of, world_sizes

__all__ = ["lacks_optimizer", "missing_files", "told_by_few"]

_MAX_LAYERS = 1 << 20
_MAX_EXPERT_LAYERS = 1 << 12


def missing_files(
    files: TagFiles, models: Sequence[ModelState], *, mp_world_size: int, tp_world_size: int, dp_world_size: int
) -> list[str]:
    """Paths of files that should be there.

    A layer of a pipeline whose parameters are all tied, or that has none, has a file whose absence nothing tells.

    Args:
        files: what is there.
        models: model states; of a pipeline those of each stage, of its first tensor-parallel rank at least.
        mp_world_size: model-parallel ranks: stages times tensor-parallel ones.
        tp_world_size: tensor-parallel ranks.
        dp_world_size: data-parallel ranks.
    """
    layers = {number for model in models for number in _layers(model)} if files.layers else ()
    return [
        *files.missing_models(dp_world_size, mp_world_size),
        *files.missing_optims(dp_world_size, mp_world_size),
        *files.missing_layers(layers, tp_world_size),
        *files.missing_experts(_expert_counts(files, models[0])),
    ]


def lacks_optimizer(files: TagFiles, models: Sequence[ModelState]) -> bool:
    """Whether ZeRO had parameters to train, and no part of its optimizer is here."""
    return not files.optims and any(model.groups and any(model.groups) for model in models)


def told_by_few(source: Source, files: TagFiles) -> tuple[list[str], bool]:
    """What ``missing_files`` and ``lacks_optimizer`` tell by one model state, of a pipeline one of each stage.

    Cost: three requests for each.

    Raises:
        NotFound: there is no model state.
        FormatError: one of them is none, or says what cannot be.
    """
    models = open_models(source, files, files.models[:1])
    mp_world_size, dp_world_size = world_sizes(files, models[0].root, models[0].file.path)
    tp_world_size = tp_world_size_of(models[0].root, files, mp_world_size)
    if files.layers:
        first = {file.mp: file for file in reversed(files.models)}
        firsts = range(tp_world_size, mp_world_size, tp_world_size)
        models += open_models(source, files, [first[mp] for mp in firsts if mp in first])
    missing = missing_files(
        files, models, mp_world_size=mp_world_size, tp_world_size=tp_world_size, dp_world_size=dp_world_size
    )
    return missing, lacks_optimizer(files, models)


def _layers(model: ModelState) -> Iterator[int]:
    """Layers of a pipeline that a stage has parameters of: ``2`` of ``2.down.weight``."""
    for name in (name for shapes in (*(model.groups or ()), model.frozen) for name in shapes):
        number = name.partition(".")[0]
        if number.isdecimal() and int(number[:8]) < _MAX_LAYERS:
            yield int(number[:8])


def _expert_counts(files: TagFiles, model: ModelState) -> list[int]:
    """How many experts each layer has in files of their own: at stage 3 none, in a pipeline it is not told."""
    counts = model.root.get("num_experts")
    if files.layers or model.dp is not None or not isinstance(counts, (list, tuple)):
        return []
    return [max(number_of(count) or 0, 0) for count in counts[:_MAX_EXPERT_LAYERS]]
