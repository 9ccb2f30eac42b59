"""Readers of safetensors folders on checkpoints that torch, transformers and PEFT wrote."""

from __future__ import annotations

from ckpt_tool.formats.safetensors import dcp_hf, index_file, single
from tests.formats.conformance import FIXTURES, Case, ReaderTests, truth_of

TORCH, DEEPSPEED = FIXTURES / "torch", FIXTURES / "deepspeed"


def _untied(fqn: str) -> str | None:
    """The truth has both ends of a tied pair; the files have the embedding."""
    return None if fqn == "lm_head.weight" else fqn


class TestSafetensors(ReaderTests):
    """One file: transformers' single model, and a PEFT adapter."""

    reader = single.READER
    reader_import = "ckpt_tool.formats.safetensors.single:READER"
    cases = (
        Case(
            "hf_single",
            TORCH / "hf_single/ckpt",
            truth_of(TORCH / "hf_single"),
            max_read_requests=1,
            max_resolve_requests=0,
        ),
        Case(
            "named",
            TORCH / "hf_single/ckpt/model.safetensors",
            truth_of(TORCH / "hf_single"),
            max_read_requests=1,
            max_resolve_requests=0,
        ),
        Case(
            "peft_lora",
            DEEPSPEED / "peft_lora/ckpt",
            truth_of(DEEPSPEED / "peft_lora"),
            max_read_requests=2,
            max_resolve_requests=0,
        ),
    )


class TestSafetensorsIndex(ReaderTests):
    """Several files with an index: transformers', and those that torch consolidated."""

    reader = index_file.READER
    reader_import = "ckpt_tool.formats.safetensors.index_file:READER"
    cases = (
        Case(
            "hf_sharded",
            TORCH / "hf_sharded/ckpt",
            truth_of(TORCH / "hf_sharded"),
            max_read_requests=4,
            max_resolve_requests=0,
        ),
        Case(
            "named",
            TORCH / "hf_sharded/ckpt/model.safetensors.index.json",
            truth_of(TORCH / "hf_sharded"),
            max_read_requests=4,
            max_resolve_requests=0,
        ),
        Case(
            "hf_st_tied",
            DEEPSPEED / "hf_st_tied/ckpt",
            truth_of(DEEPSPEED / "hf_st_tied", _untied),
            max_read_requests=4,
            max_resolve_requests=0,
        ),
        Case(
            "consolidated",
            TORCH / "hf_dcp_consolidated/ckpt",
            truth_of(TORCH / "hf_dcp_consolidated"),
            max_read_requests=3,
            max_resolve_requests=0,
        ),
    )


class TestDcpHf(ReaderTests):
    """Shards of torch's Hugging Face writer, with and without consolidated files above them."""

    reader = dcp_hf.READER
    reader_import = "ckpt_tool.formats.safetensors.dcp_hf:READER"
    cases = (
        Case(
            "hf_dcp_sharded",
            TORCH / "hf_dcp_sharded/ckpt",
            truth_of(TORCH / "hf_dcp_sharded"),
            max_read_requests=4,
            max_resolve_requests=0,
        ),
        Case(
            "sharded",
            TORCH / "hf_dcp_consolidated/ckpt/sharded",
            truth_of(TORCH / "hf_dcp_consolidated"),
            max_read_requests=8,
            max_resolve_requests=0,
        ),
    )
