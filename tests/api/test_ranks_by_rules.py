"""Parts that tensor-parallel ranks saved under one name are put together as rules say, and only where all fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpt_tool
from ckpt_tool.errors import IntegrityError, LayoutError, UsageError

HIDDEN, INNER, ROWS = 8, 12, 20


def whole() -> dict[str, torch.Tensor]:
    """A Llama of two layers with biases on the query, as its library names it."""
    made = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made)

    model = {"model.embed_tokens.weight": tensor(ROWS, HIDDEN), "model.norm.weight": tensor(HIDDEN)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        model |= {f"{prefix}.self_attn.{name}_proj.weight": tensor(HIDDEN, HIDDEN) for name in "qkvo"}
        model |= {f"{prefix}.self_attn.q_proj.bias": tensor(HIDDEN)}
        model |= {f"{prefix}.mlp.{name}_proj.weight": tensor(INNER, HIDDEN) for name in ("gate", "up")}
        model |= {f"{prefix}.mlp.down_proj.weight": tensor(HIDDEN, INNER)}
        model |= {f"{prefix}.{name}_layernorm.weight": tensor(HIDDEN) for name in ("input", "post_attention")}
    return model | {"lm_head.weight": tensor(ROWS, HIDDEN)}


def part(fqn: str, value: torch.Tensor, rank: int, n_ranks: int) -> torch.Tensor:
    """What a tensor-parallel rank has: columns of the last layer of a block, rows of the others, all of a norm."""
    if "norm" in fqn:
        return value
    return value.chunk(n_ranks, dim=int("o_proj" in fqn or "down_proj" in fqn))[rank].contiguous()


def ranks(folder: Path, n_files: int, state: Callable[[int], dict[str, torch.Tensor]]) -> Path:
    """A file for each rank."""
    folder.mkdir()
    for rank in range(n_files):
        torch.save(state(rank), folder / f"model_rank_{rank}.pt")
    return folder


def exported(source: Path, target: Path, *rules: str) -> dict[str, torch.Tensor]:
    """What an export by these rules holds."""
    ckpt_tool.export(source, target, unequal=rules or ("rules",), names="source")
    with ckpt_tool.open(target) as checkpoint:
        return {fqn: view.torch() for fqn, view in checkpoint.items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, in the same order, with the same values."""
    assert list(found) == list(expected)
    for fqn, value in expected.items():
        assert torch.equal(found[fqn], value), fqn


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_parts_of_a_family(tmp_path: Path, n_ranks: int) -> None:
    """Rows, columns, vocabulary and biases of a family are told by names; norms are one."""
    model = whole()
    source = ranks(tmp_path / "a", n_ranks, lambda r: {fqn: part(fqn, v, r, n_ranks) for fqn, v in model.items()})
    assert_equal(exported(source, tmp_path / "b"), model)


def test_copies_are_told_by_content(tmp_path: Path) -> None:
    """Of four ranks each two hold the same: two tensor-parallel ranks, two copies."""
    model = whole()
    source = ranks(tmp_path / "a", 4, lambda r: {fqn: part(fqn, v, r % 2, 2) for fqn, v in model.items()})
    assert_equal(exported(source, tmp_path / "b"), model)
    plan = ckpt_tool.plan_export(source, tmp_path / "c", unequal="rules")
    assert any("2 tensor-parallel ranks (0, 1), 2 copies of each" in note for note in plan.notes)


@pytest.mark.parametrize("is_slow", [False, True])
def test_pipeline_stages(tmp_path: Path, is_slow: bool) -> None:
    """Stages have tensors of their own, and share the embedding: which two ranks have parts is told for each tensor."""
    model = whole()

    def state(rank: int) -> dict[str, torch.Tensor]:
        stage, tp = (rank % 2, rank // 2) if is_slow else (rank // 2, rank % 2)
        of_stage = {fqn for fqn in model if f".layers.{1 - stage}." not in fqn and (fqn != "norm.weight" or stage)}
        return {fqn: part(fqn, v, tp, 2) for fqn, v in model.items() if fqn in of_stage}

    source = ranks(tmp_path / "a", 4, state)
    found = exported(source, tmp_path / "b")
    assert_equal({fqn: found[fqn] for fqn in model}, model)
    plan = ckpt_tool.plan_export(source, tmp_path / "c", unequal="rules")
    assert any("2 tensor-parallel ranks, of 4 with other stages and copies" in note for note in plan.notes)


def test_parts_of_different_sizes(tmp_path: Path) -> None:
    """Twenty rows over three ranks are 7, 7 and 6: torch.chunk's cut, which the rules know too."""
    model = {fqn: v for fqn, v in whole().items() if "embed" in fqn or "norm" in fqn}
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nmatch = ".*norm.*"\nkind = "replicated"\n[[rule]]\nmatch = ".*"\nkind = "vocab"\n')
    source = ranks(tmp_path / "a", 3, lambda r: {fqn: part(fqn, v, r, 3) for fqn, v in model.items()})
    assert_equal(exported(source, tmp_path / "b", f"rules:{rules}"), model)


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_fused_parts_of_ones_own_rules(tmp_path: Path, n_ranks: int) -> None:
    """Each part of a fused tensor is cut by itself, so ranks' pieces interleave; also in the second dimension."""
    model = {"x.weight": torch.arange(48.0 * 3).reshape(48, 3), "y.weight": torch.arange(5.0 * 16).reshape(5, 16)}
    rules = tmp_path / "rules.toml"
    rules.write_text(
        "[[rule]]\nmatch = 'x\\.weight'\nkind = \"fused\"\nparts = [4, 2, 6]\n"
        "[[rule]]\nmatch = 'y\\.weight'\nkind = \"fused\"\nparts = [1, 1]\ndim = 1\n"
    )

    def state(rank: int) -> dict[str, torch.Tensor]:
        rows = torch.cat([p.chunk(n_ranks)[rank] for p in model["x.weight"].split([16, 8, 24])])
        columns = torch.cat([p.chunk(n_ranks, dim=1)[rank] for p in model["y.weight"].split([8, 8], dim=1)], dim=1)
        return {"x.weight": rows, "y.weight": columns}

    assert_equal(exported(ranks(tmp_path / "a", n_ranks, state), tmp_path / "b", f"rules:{rules}"), model)


def test_an_optimizer_along_with_its_model(tmp_path: Path) -> None:
    """Moments, numbered as torch does it, are joined as their parameters are; a reshard keeps all of it."""
    model = whole()
    moments = {fqn: v + 100 for fqn, v in model.items()}

    def state(rank: int) -> dict[str, object]:
        own = {fqn: part(fqn, v, rank, 2) for fqn, v in model.items()}
        held = {i: {"exp_avg": part(fqn, v, rank, 2)} for i, (fqn, v) in enumerate(moments.items())}
        groups = [{"lr": 0.5, "params": list(range(len(model))), "param_names": list(model)}]
        return {"model": own, "optimizer": {"state": held, "param_groups": groups}}

    source = ranks(tmp_path / "a", 2, state)
    ckpt_tool.reshard(source, tmp_path / "b", tp=2, unequal="rules")
    with ckpt_tool.open(tmp_path / "b") as checkpoint:
        for number, (fqn, value) in enumerate(model.items()):
            assert torch.equal(checkpoint[f"model.{fqn}"].torch(), value)
            moment = checkpoint[f"optimizer.state.{number}.exp_avg"].torch()
            assert torch.equal(moment, moments[fqn])


def changed(rank: int, fqn: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """One rank's part of the model, with another tensor in it."""
    return {**{name: part(name, v, rank, 2) for name, v in whole().items()}, fqn: value}


@pytest.mark.parametrize(
    ("fqn", "value", "error", "said"),
    [
        (
            "model.norm.weight", lambda rank: torch.full((HIDDEN,), float(rank)), LayoutError,
            "'model.norm.weight' differs between ranks, which have (8,), (8,) of it, and the rules of llama do not cut",
        ),
        (
            "lm_head.weight", lambda rank: torch.zeros(ROWS // 2, HIDDEN), IntegrityError,
            "1 tensor is the same on all ranks, and the rules of llama say that ranks hold parts (lm_head.weight)",
        ),
        (
            "model.layers.0.self_attn.o_proj.weight", lambda rank: torch.ones(HIDDEN, 3 + rank), LayoutError,
            "o_proj.weight': a rank has 3 along dimension 1, not 4, as the rules of llama cut [8, 7]",
        ),
        (
            "odd.weight", lambda rank: torch.full((2, 2), float(rank)), LayoutError,
            "no rule of 'llama' covers 1 of 1 tensor:",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_not_joined(
    tmp_path: Path, fqn: str, value: Callable[[int], torch.Tensor], error: type[Exception], said: str
) -> None:
    """Ranks and rules that contradict each other are said; a rule for that tensor alone settles it."""
    source = ranks(tmp_path / "a", 2, lambda rank: changed(rank, fqn, value(rank)))
    with pytest.raises(error, match=re.escape(said)):
        ckpt_tool.export(source, tmp_path / "b", unequal="rules")
    settled = exported(source, tmp_path / "c", "rules", f"{fqn}=first")
    assert torch.equal(settled[fqn], value(0))


def test_ranks_that_disagree_about_copies(tmp_path: Path) -> None:
    """Of four ranks one tensor has two values and others have four: what that means is not guessed."""
    model = whole()
    odd = "model.layers.1.self_attn.k_proj.weight"

    def state(rank: int) -> dict[str, torch.Tensor]:
        own = {fqn: part(fqn, v, rank, 4) for fqn, v in model.items()}
        return {**own, odd: part(odd, model[odd], rank // 2, 2)}

    source = ranks(tmp_path / "a", 4, state)
    with pytest.raises(IntegrityError, match=rf"ranks hold 4 parts of .*, and 2 of '{odd}'"):
        ckpt_tool.export(source, tmp_path / "b", unequal="rules")


def test_the_rules_are_offered(tmp_path: Path) -> None:
    """Where the names are those of a family, the refusal says what to type; a rule that is none is refused."""
    source = ranks(tmp_path / "a", 2, lambda r: {fqn: part(fqn, v, r, 2) for fqn, v in whole().items()})
    with pytest.raises(IntegrityError) as refused:
        ckpt_tool.export(source, tmp_path / "b")
    assert "as the rules of llama say with --unequal rules" in str(refused.value.hint)
    for text in ("concat", "first:1", "concat:x", "rule", "x="):
        with pytest.raises(UsageError, match="is no rule"):
            ckpt_tool.export(source, tmp_path / "b", unequal=text)


@pytest.mark.parametrize("level", ["default", "full"])
def test_verify_knows_parts(tmp_path: Path, level: str) -> None:
    """Differences that rules explain are one warning; one that they do not explain leaves them all errors."""
    model = whole()
    source = ranks(tmp_path / "a", 2, lambda r: {fqn: part(fqn, v, r, 2) for fqn, v in model.items()})
    report = ckpt_tool.verify(source, level=level)
    (warning,) = (finding for finding in report.findings if finding.severity > 0)
    assert report.is_ok
    assert warning.kind == "parts-of-ranks"
    assert "as parts of 2 tensor-parallel ranks (0, 1) do by the rules of llama" in warning.message
    other = ranks(tmp_path / "b", 2, lambda r: changed(r, "model.norm.weight", torch.full((HIDDEN,), float(r))))
    kinds = {finding.kind for finding in ckpt_tool.verify(other, level=level).findings if finding.severity > 0}
    assert kinds == {"different-replicas"}
