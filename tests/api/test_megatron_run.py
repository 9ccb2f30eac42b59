"""What an inspection says of a Megatron run, and of what can be made of its checkpoint."""

from __future__ import annotations

import pytest

from ckpt_tool.api.inspect import inspect
from ckpt_tool.api.megatron_run import run_facts
from ckpt_tool.cli.app import main
from tests.formats.conformance import FIXTURES
from tests.formats.megatron.places import CHECKPOINTS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("td_dpr_t2p2d2", {
            "parallel": "TP 2 PP 2 EP 1 ETP 2 CP 1 DP 2", "layers": "stage 0: 0-1; stage 1: 2-3",
            "optimizer": "dp_reshardable",
        }),
        ("legacy_vpp_p2v2", {
            "layers": "stage 0: chunk 0: 0, chunk 1: 2; stage 1: chunk 0: 1, chunk 1: 3", "optimizer": "distrib_optim",
        }),
        ("old012_zarr_t2p1d1", {"layers": "stage 0: 0-3"}),
        ("neg_noextra", {
            "layers": "4; which stage has which is not known, as the ranks that saved them do not tell",
        }),
        ("legacy_etp1_t2e2", {"parallel": "TP 2 PP 1 EP 2 ETP 1 CP 1 DP 1", "optimizer": "distrib_optim"}),
        ("moe_dpr_e2", {"experts": "4; EP rank 0: 0-1; EP rank 1: 2-3"}),
        ("td_nodist_t2", {
            "optimizer": "not distributed",
            "reshards": "weights and optimizer to any TP, PP, VPP, EP, ETP and DP (--to megatron-dist, "
            "megatron-legacy)",
        }),
    ],
)  # fmt: skip
def test_the_run_is_described(name: str, expected: dict[str, str]) -> None:
    """Sizes, layers by stage, experts by rank, the optimizer's form."""
    facts = dict(inspect(CHECKPOINTS / name / "ckpt").run_facts)
    assert {label: facts.get(label) for label in expected} == expected


def test_missing_facts_are_named() -> None:
    """State that could not be decoded, arguments that were not saved: the line says which reshard lacks which fact."""
    manifest = inspect(CHECKPOINTS / "td_dpr_t2p2d2/ckpt").manifest
    info = {key: value for key, value in manifest.info.items() if key != "args"}
    facts = dict(run_facts(manifest.replace(info=info)))
    assert facts["parallel"] == "not known: no args of the run were saved"
    assert "to any TP" in facts["reshards"]
    without = [blob for blob in manifest.blobs if blob.fqn != "args"]
    facts = dict(run_facts(manifest.replace(info=info, blobs=tuple(without))))
    assert facts["reshards"].endswith("they need --arg num_attention_heads=N --arg swiglu=true/false")
    undecoded = {**manifest.info, "optimizer_undecoded": "the bucket size is not known"}
    facts = dict(run_facts(manifest.replace(info=undecoded)))
    assert facts["reshards"].endswith("the optimizer's state to none: the bucket size is not known")


def test_the_command_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    """In the header, aligned; other formats have no such lines."""
    assert main(["inspect", str(CHECKPOINTS / "moe_seq_e2/ckpt")]) == 0
    shown = capsys.readouterr().out
    assert "\n  experts    4; EP rank 0: 0-1; EP rank 1: 2-3\n" in shown
    assert "\n  tensors    " in shown
    assert main(["inspect", str(FIXTURES / "torch/dcp_ddp_dedup/ckpt")]) == 0
    assert "reshards" not in capsys.readouterr().out
