"""Options about what tensors are called in a target: a flag means the same in every command that has it."""

from __future__ import annotations

from typing import Annotated

from ckpt_tool.cli.options import NAMES, Choice, option

__all__ = ["Facts", "Family", "NamesAs", "NamesOf", "NamingFile", "TrueVocab"]


class NamesAs(Choice):
    """What tensors are called in the target."""

    hf = "hf"
    source = "source"


class NamesOf(Choice):
    """What tensors of a reshard are called in the target."""

    hf = "hf"
    megatron_fsdp = "megatron-fsdp"
    source = "source"


Family = Annotated[
    str,
    option(
        "--family", NAMES, "The model family of a Megatron or torchtitan checkpoint: llama, qwen_moe, mixtral ...; "
        "auto finds it by the names, none keeps the names.", "NAME",
    ),
]  # fmt: skip
NamingFile = Annotated[
    str | None, option("--naming", NAMES, "Rules (TOML, JSON) for names, before the family's.", "FILE")
]
Facts = Annotated[
    list[str] | None,
    option(
        "--fact", NAMES, "A number that the names need and the checkpoint does not record: heads=32, kv_heads=8. "
        "Repeatable.", "NAME=N",
    ),
]  # fmt: skip
TrueVocab = Annotated[
    int | None,
    option("--true-vocab", NAMES, "Rows of the vocabulary without its padding.", "N", min=1),
]
