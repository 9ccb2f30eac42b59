"""The DCP reader on real checkpoints of torch 2.1.2 and 2.13, accelerate and torchtitan."""

from __future__ import annotations

from ckpt_tool.formats.dcp.reader import READER
from tests.formats.conformance import FIXTURES, Case, ReaderTests, truth_of

TORCH = FIXTURES / "torch"
ACCELERATE = FIXTURES / "deepspeed/accelerate_fsdp2"
TITAN = FIXTURES / "deepspeed/torchtitan_dp2tp2"
PER_FILE_KINDS = ("exp_avg", "exp_avg_sq")


def torch_case(name: str, *, max_read_requests: int = 1, max_resolve_requests: int = 8) -> Case:
    """A checkpoint whose truth has the names of the checkpoint itself."""
    return Case(
        name,
        TORCH / name / "ckpt",
        truth_of(TORCH / name),
        max_read_requests=max_read_requests,
        max_resolve_requests=max_resolve_requests,
    )


def renamed(patterns: dict[str, str], fqn: str) -> str | None:
    """``param/w`` by the pattern of its kind: ``{"param": "model.{}"}`` gives ``model.w``."""
    kind, _, rest = fqn.partition("/")
    return patterns[kind].format(rest) if kind in patterns else None


OPTIMIZER = {kind: "optimizer.state.{}." + kind for kind in PER_FILE_KINDS}
CASES = (
    torch_case("dcp_fsdp2_4r_fp32"),
    torch_case("dcp_fsdp2_tp_2x2"),
    torch_case("dcp_fsdp1_flat_2r"),
    torch_case("dcp_ddp_dedup"),
    torch_case("dcp_threads2"),
    torch_case("dcp_no_flatten"),
    torch_case("dcp_no_collectives", max_read_requests=4),
    torch_case("dcp_safetensors"),
    torch_case("dcp_old_t2.1.2"),
    Case(
        "accelerate_model",
        ACCELERATE / "ckpt/pytorch_model_fsdp_0",
        truth_of(ACCELERATE, lambda fqn: renamed({"param": "model.{}"}, fqn)),
        max_read_requests=1,
        max_resolve_requests=4,
    ),
    Case(
        "accelerate_optimizer",
        ACCELERATE / "ckpt/optimizer_0",
        truth_of(ACCELERATE, lambda fqn: renamed(OPTIMIZER, fqn)),
        without_truth=("*.step",),
        max_read_requests=1,
        max_resolve_requests=4,
    ),
    Case(
        "torchtitan",
        TITAN / "ckpt/checkpoint/step-3",
        truth_of(TITAN, lambda fqn: renamed({"param": "{}", **OPTIMIZER}, fqn)),
        without_truth=("optimizer.*.step", "train_state.*"),
        max_read_requests=1,
        max_resolve_requests=4,
    ),
)


class TestDcp(ReaderTests):
    """The contract of readers."""

    reader = READER
    reader_import = "ckpt_tool.formats.dcp.reader:READER"
    cases = CASES
