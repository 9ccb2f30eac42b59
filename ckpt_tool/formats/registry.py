"""Which formats there are, read and written; modules are imported on first use.

Readers stand in order of specificity: on equal confidence the earlier one is taken. Packages outside this one add
readers through the entry-point group ``ckpt_tool.readers`` (an object with the ``Reader`` methods).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

from ckpt_tool.errors import Unsupported, UsageError
from ckpt_tool.formats.base import Reader, Writer

if TYPE_CHECKING:
    from ckpt_tool.formats.joint import JointWriter

__all__ = ["iter_readers", "joint_writer", "readers", "writer", "writer_names"]

# Module, attribute, and a pattern that some path of such a checkpoint fits (empty where content decides).
_READERS: tuple[tuple[str, str, str], ...] = (
    # before Megatron, whose runs have a tracker of that name
    (
        "ckpt_tool.formats.bytecheckpoint.reader",
        "READER",
        r"(^|/)model/\.metadata$|latest_checkpointed_iteration\.txt$",
    ),
    # before DCP, which the first one is underneath
    ("ckpt_tool.formats.megatron.dist_reader", "READER", r"(^|/)metadata\.json$|latest_checkpointed_iteration\.txt$"),
    ("ckpt_tool.formats.megatron.zarr_reader", "READER", r"/\.zarray$"),
    (
        "ckpt_tool.formats.megatron.rank_reader",
        "READER",
        r"(^|/)(mp_rank_[\d_]+/|^)(model_optim_rng|distrib_optim)\.pt$|(^|/)([mt]p_rank_\w+/|^)model_weights\.ckpt$",
    ),
    (
        "ckpt_tool.formats.orbax.reader",
        "READER",
        r"(^|/)manifest\.ocdbt$|^_CHECKPOINT_METADATA$|^_METADATA$|^[^/]+/(\.zarray|zarr\.json)$",
    ),
    ("ckpt_tool.formats.nanotron.reader", "READER", r"(^|/)checkpoint_metadata\.json$"),
    ("ckpt_tool.formats.torchsnapshot.reader", "READER", r"^\.snapshot_metadata$"),
    ("ckpt_tool.formats.bundle", "ACCELERATE", r"^pytorch_model_fsdp_\d+/"),
    ("ckpt_tool.formats.bundle", "VESCALE", r"^optimizer/pp_\d+/\.metadata$"),
    ("ckpt_tool.formats.torch_checkpointing.reader", "READER", r"^metadata\.pkl$|^[\w-]+_0\.pt$"),
    ("ckpt_tool.formats.dcp.reader", "READER", r"\.metadata$|\.distcp$"),
    ("ckpt_tool.formats.safetensors.rank_files", "READER", r"rank_\d+\.safetensors$|ckpt_layout\.json$"),
    ("ckpt_tool.formats.safetensors.dcp_hf", "READER", r"shard-\d+-.*\.safetensors$"),
    # before safetensors, of which transformers' Trainer puts the weights alone beside them
    ("ckpt_tool.formats.deepspeed.reader", "READER", r"_states\.pt$|(^|/)latest$|(^|/)zero/"),
    ("ckpt_tool.formats.deepspeed.universal", "READER", r"(^|/)zero/|latest_universal$"),
    ("ckpt_tool.formats.safetensors.plain_ranks", "READER", r"rank[._-]?\d+[^/]*\.safetensors$"),
    ("ckpt_tool.formats.safetensors.index_file", "READER", r"\.safetensors(\.index\.json)?$"),
    ("ckpt_tool.formats.safetensors.single", "READER", r"\.safetensors$|^[^/]*$"),
    ("ckpt_tool.formats.torch_save.hf_bin", "READER", r"\.bin(\.index\.json)?$"),
    ("ckpt_tool.formats.consolidated.reader", "READER", r"^consolidated\.\d+\.pth$"),
    ("ckpt_tool.formats.gguf.reader", "READER", r"\.gguf$"),
    ("ckpt_tool.formats.flax.reader", "READER", r"\.msgpack$|^checkpoint(_\d+)?$"),
    ("ckpt_tool.formats.hdf5.reader", "READER", r"\.(h5|hdf5|keras)$"),
    ("ckpt_tool.formats.npz.reader", "READER", r"\.npz$"),
    ("ckpt_tool.formats.rank_pt.reader", "READER", ""),
    ("ckpt_tool.formats.torch_save.reader", "READER", ""),
)
_ALIASES = {"torch": "torch-save", "megatron": "megatron-dist"}
_TOGETHER = {"safetensors": "rank-files"}
"""Which of its formats a library's name means where ranks write together."""
_TO_TRANSFORMERS = "ckpt export SRC DIR --to safetensors writes weights as transformers loads them"
_INSTEAD = {
    "hf": _TO_TRANSFORMERS,
    "huggingface": _TO_TRANSFORMERS,
    "transformers": _TO_TRANSFORMERS,
    "trainer": f"{_TO_TRANSFORMERS}; a Trainer numbers the states of its optimizer in an order that only its run "
    "knows, so they are not written",
    "accelerate": "its folders pytorch_model_fsdp_0 and optimizer_0 are checkpoints each: write them --to dcp",
}
"""What to say of programs whose folders are made of formats that are written."""
_WRITERS = {
    "dcp": ("ckpt_tool.formats.dcp.writer", "WRITER"),
    "safetensors": ("ckpt_tool.formats.safetensors.writer", "WRITER"),
    "bytecheckpoint": ("ckpt_tool.formats.bytecheckpoint.writer", "WRITER"),
    "vescale": ("ckpt_tool.formats.bundle_writer", "WRITER"),
    "torch-checkpointing": ("ckpt_tool.formats.torch_checkpointing.writer", "WRITER"),
    "torchsnapshot": ("ckpt_tool.formats.torchsnapshot.writer", "WRITER"),
    "nanotron": ("ckpt_tool.formats.nanotron.writer", "WRITER"),
    "rank-files": ("ckpt_tool.formats.safetensors.rank_writer", "WRITER"),
    "torch-save": ("ckpt_tool.formats.torch_save.writer", "WRITER"),
    "gguf": ("ckpt_tool.formats.gguf.writer", "WRITER"),
    "lightning": ("ckpt_tool.formats.torch_save.lightning", "WRITER"),
    "torch-ranks": ("ckpt_tool.formats.rank_pt.writer", "WRITER"),
    "npz": ("ckpt_tool.formats.npz.writer", "WRITER"),
    "orbax": ("ckpt_tool.formats.orbax.writer", "WRITER"),
    "consolidated": ("ckpt_tool.formats.consolidated.writer", "WRITER"),
    "deepspeed": ("ckpt_tool.formats.deepspeed.native_writer", "WRITER"),
    "deepspeed-universal": ("ckpt_tool.formats.deepspeed.universal_writer", "WRITER"),
    "megatron-dist": ("ckpt_tool.formats.megatron.dist_writer", "WRITER"),
    "megatron-legacy": ("ckpt_tool.formats.megatron.rank_writer", "WRITER"),
}


def iter_readers(paths: Sequence[str] | None = None) -> Iterator[Reader]:
    """All readers, most specific first, each imported when it is reached; those of other packages last.

    With ``paths`` (relative to a source's root) only those whose files can be called so: importing a format costs up
    to 60 ms.
    """
    for module, attribute, names in _READERS:
        if paths is None or any(map(re.compile(names).search, paths)):
            reader: Reader = getattr(import_module(module), attribute)
            yield reader
    yield from _plugins()


def readers() -> tuple[Reader, ...]:
    """All readers, most specific first."""
    return tuple(iter_readers())


@lru_cache(maxsize=1)
def _plugins() -> tuple[Reader, ...]:
    from importlib import metadata  # costs 20 ms of start-up, and most sources are known before

    return tuple(entry.load() for entry in metadata.entry_points(group="ckpt_tool.readers"))


def writer_names() -> tuple[str, ...]:
    """Names that ``writer`` takes."""
    return tuple(_WRITERS)


def writer(name: str) -> Writer:
    """The writer called ``name``, or by its short name.

    Raises:
        UsageError: no such writer; the message lists them.
    """
    place = _WRITERS.get(_ALIASES.get(name, name))
    if place is None:
        import difflib  # for misspelt names alone

        near = difflib.get_close_matches(name, [*_WRITERS, *_ALIASES], n=2)
        known = f"did you mean {' or '.join(near)}" if near else "one of: " + " ".join(_WRITERS)
        raise UsageError(f"{name!r} is no format that can be written", hint=_INSTEAD.get(name.lower(), known))
    found: Writer = getattr(import_module(place[0]), place[1])
    return found


def joint_writer(name: str) -> JointWriter:
    """The writer called ``name``, which ranks can use together.

    Raises:
        UsageError: no such writer.
        Unsupported: it lays a checkpoint out as a whole only.
    """
    from ckpt_tool.formats.joint import JointWriter  # for jobs alone

    found = writer(_TOGETHER.get(name, name))
    if not isinstance(found, JointWriter):  # a protocol, checked by its methods
        raise Unsupported(f"{name} cannot be written by ranks together", hint='save as "dcp", then run ckpt export')
    return found
