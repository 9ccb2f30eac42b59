"""Names of formats to write: those there are, and what to say of other programs' folders."""

from __future__ import annotations

import pytest

from ckpt_tool.errors import UsageError
from ckpt_tool.formats.registry import writer, writer_names


def test_every_name_is_a_writer_of_that_name() -> None:
    """Also where one writer has a short name."""
    assert [writer(name).name for name in writer_names()] == list(writer_names())
    assert writer("torch").name == "torch-save"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nothing", "one of: dcp safetensors"),
        ("megtron", "did you mean megatron"),
        ("safetensor", "did you mean safetensors"),
        ("Trainer", "a Trainer numbers the states of its optimizer"),
        ("hf", "--to safetensors writes weights as transformers loads them"),
        ("accelerate", "pytorch_model_fsdp_0 and optimizer_0"),
    ],
)
def test_names_that_are_none(name: str, hint: str) -> None:
    """The hint is what to type."""
    with pytest.raises(UsageError, match=f"'{name}' is no format that can be written") as caught:
        writer(name)
    assert hint in str(caught.value.hint)
