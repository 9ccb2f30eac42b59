"""Options about what tensors are called in a target: a flag means the same in every command that has it."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_tool.cli.options import Choice

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
    typer.Option(
        "--family",
        metavar="NAME",
        help="Whose names those of Megatron and torchtitan become: llama, qwen_moe, mixtral; auto tells it from "
        "the names, none keeps them.",
    ),
]
NamingFile = Annotated[
    str | None,
    typer.Option("--naming", metavar="FILE", help="Rules (TOML) for names, before the family's.", show_default=False),
]
Facts = Annotated[
    list[str] | None,
    typer.Option(
        "--fact",
        metavar="NAME=N",
        help="A number that names need and the checkpoint does not record: heads=32, kv_heads=8. Repeatable.",
        show_default=False,
    ),
]
TrueVocab = Annotated[
    int | None,
    typer.Option(
        "--true-vocab", min=1, metavar="N", help="Rows of the vocabulary; those behind are padding.", show_default=False
    ),
]
