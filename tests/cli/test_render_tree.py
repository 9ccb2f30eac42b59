from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckpt_tool.api.inspect import TensorRow
from ckpt_tool.cli.render_tree import number_ranges, parts_text, tree_lines
from ckpt_tool.cli.text import width_of
from tests.cli.synthetic import row, text


def llama(n_layers: int) -> Iterator[TensorRow]:
    """Names and shapes of Llama 3.1 405B, with as many layers."""
    yield row("model.embed_tokens.weight", (128256, 16384))
    for layer in range(n_layers):
        prefix = f"model.layers.{layer}."
        for name, shape in (("q", (16384, 16384)), ("k", (1024, 16384)), ("v", (1024, 16384)), ("o", (16384, 16384))):
            yield row(f"{prefix}self_attn.{name}_proj.weight", shape, parts=(8, 1))
        for name, shape in (("gate", (53248, 16384)), ("up", (53248, 16384)), ("down", (16384, 53248))):
            yield row(f"{prefix}mlp.{name}_proj.weight", shape)
        yield row(f"{prefix}input_layernorm.weight", (16384,))
    yield row("lm_head.weight", (128256, 16384))


def test_layers_with_equal_shapes_are_one_line() -> None:
    """Equal layers fold into a range, equal single tensors into braces; sizes below a fold are those of one layer."""
    assert (
        text(tree_lines(list(llama(126)), width=100))
        == """\
                                        type           shape                size  parts
model                                   1,009 tensors                    752 GiB
├─ embed_tokens.weight                  bfloat16       [128256, 16384]  3.91 GiB
└─ layers.0-125 x126                    1,008 tensors                    748 GiB  5.94 GiB each
   ├─ self_attn                         4 tensors                       1.06 GiB
   │  ├─ {q_proj,o_proj}.weight x2      bfloat16       [16384, 16384]   1.00 GiB  8x1
   │  └─ {k_proj,v_proj}.weight x2      bfloat16       [1024, 16384]    64.0 MiB  8x1
   ├─ mlp                               3 tensors                       4.88 GiB
   │  ├─ {gate_proj,up_proj}.weight x2  bfloat16       [53248, 16384]   3.25 GiB
   │  └─ down_proj.weight               bfloat16       [16384, 53248]   1.62 GiB
   └─ input_layernorm.weight            bfloat16       [16384]          32.0 KiB
lm_head.weight                          bfloat16       [128256, 16384]  3.91 GiB"""
    )


def test_405b_with_its_optimizer_fits_a_screen() -> None:
    """1,010 parameters with three optimizer tensors each take no more than 30 lines of 80 columns."""
    model = list(llama(126))
    states = ("exp_avg", "exp_avg_sq", "step")
    optimizer = [row(f"optim.{m.fqn}.{s}", () if s == "step" else m.shape, "float32") for m in model for s in states]
    lines = tree_lines(model + optimizer, width=80)
    assert len(lines) <= 30
    assert max(width_of(found) for found in lines) <= 80


def test_moments_and_step_of_a_parameter_are_one_line() -> None:
    """Tensors of one shape with single numbers beside them are one line that names both shapes."""
    rows = [row("o.w.exp_avg", (2, 3), "float32"), row("o.w.exp_avg_sq", (2, 3), "float32"), row("o.w.step", ())]
    assert (
        text(tree_lines(rows, width=80))
        == """\
                                  type     shape      size
o.w.{exp_avg,exp_avg_sq,step} x3  float32  [2, 3] []  50 B"""
    )


def test_layers_that_differ_are_told_apart() -> None:
    """A layer with another shape, or another tensor, is not folded with the rest."""
    rows = [row(f"layers.{n}.w", (8,)) for n in range(4)] + [row("layers.4.w", (9,)), row("layers.5.b", (8,))]
    assert (
        text(tree_lines(rows, width=80))
        == """\
             type       shape  size
layers       6 tensors         98 B
├─ 0-3.w x4  bfloat16   [8]    64 B
├─ 4.w       bfloat16   [9]    18 B
└─ 5.b       bfloat16   [8]    16 B"""
    )


def test_order_of_tensors_within_layers_does_not_matter() -> None:
    """Layers fold although their tensors stand in another order, as in files of several shards."""
    rows = [row("h.0.a", (1, 2)), row("h.0.b", (3, 4)), row("h.1.b", (3, 4)), row("h.1.a", (1, 2))]
    assert [line.split("  ")[0] for line in text(tree_lines(rows, width=80)).splitlines()[1:]] == [
        "h.0,1 x2",
        "├─ a",
        "└─ b",
    ]


def test_depth_counts_what_it_hides() -> None:
    """With a depth, deeper levels are only counted."""
    assert (
        text(tree_lines(list(llama(2)), width=100, depth=1))
        == """\
                type        shape                size
model           17 tensors                   15.8 GiB
lm_head.weight  bfloat16    [128256, 16384]  3.91 GiB"""
    )


def test_limit_counts_what_it_hides() -> None:
    """With a limit, the last line says how many are missing and how to get them."""
    lines = text(tree_lines(list(llama(2)), width=100, limit=3)).splitlines()
    assert len(lines) == 5
    assert lines[-1] == "… 8 more lines; --limit 0 shows all"


@pytest.mark.parametrize("width", [60, 80, 96, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    """Types are shortened, parts left out and names cut until every line fits."""
    rows = [row(f"model.{'very_' * 12}long_{n}.weight", (n + 1, 4096), parts=(2, 2)) for n in range(3)]
    assert max(width_of(found) for found in tree_lines(rows, width=width)) <= width


def test_a_name_of_many_parts_does_not_exhaust_the_stack() -> None:
    """A hostile name of 100,000 parts is a line like any other."""
    assert len(tree_lines([row(".".join("a" * 100_000), (1,))], width=80)) == 2


def test_many_experts_are_folded_in_time() -> None:
    """45,000 tensors of a mixture of experts become a dozen lines."""
    rows = [
        row(f"layers.{layer}.experts.{expert}.{name}.weight", (2048, 7168))
        for layer in range(58)
        for expert in range(256)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    assert (
        text(tree_lines(rows, width=120)).split()[3] == "layers.0-57.experts.0-255.{gate_proj,up_proj,down_proj}.weight"
    )


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0,1"),
        ([0, 1, 2], "0-2"),
        ([2, 0, 1, 9], "0-2,9"),
        ([1, 3, 5, 7], "1-7:2"),
        ([0, 1, 2, 4, 6, 8], "0-2,4-8:2"),
    ],
)
def test_number_ranges(numbers: list[int], expected: str) -> None:
    """Runs of at least three numbers become ranges, with their step."""
    assert number_ranges(numbers) == expected


@pytest.mark.parametrize(
    ("parts", "n_chunks", "n_copies", "expected"),
    [
        ((1, 1), 1, 1, ""),
        ((4, 1), 4, 1, "4x1"),
        ((2, 2), 8, 2, "2x2, 2 copies"),
        ((1, 1), 4, 4, "4 copies"),
        ((3, 4), 5, 1, "5 boxes"),
        ((1, 1), 0, 0, "not stored"),
    ],
)
def test_parts(parts: tuple[int, ...], n_chunks: int, n_copies: int, expected: str) -> None:
    """A grid is named by its parts, replicas by their number; boxes that are no grid are counted."""
    found = TensorRow("w", "float32", (8, 8), 256, "model", n_chunks, parts, n_copies)
    assert parts_text(found) == expected
