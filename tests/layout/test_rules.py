"""Rules as data: what a rules file may say, and what it says of a shape."""

from __future__ import annotations

import json

import pytest

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.family import builtin_families
from ckpt_tool.layout.naming_rules import load_naming
from ckpt_tool.layout.placement import Replicate, Shard, TensorLayout
from ckpt_tool.layout.rules import RuleSet, load_rules


def layout_of(text: str, fqn: str, shape: tuple[int, ...]) -> TensorLayout:
    """What the rules in a text say of one tensor."""
    match = load_rules(text).match(fqn)
    assert match is not None
    return match.rule.layout(shape, match.layer, match.expert)


@pytest.mark.parametrize(
    ("rule", "shape", "expected"),
    [
        ('kind = "column"', (8, 4), TensorLayout(tp=Shard(0))),
        ('kind = "column"', (8,), TensorLayout(tp=Shard(0))),
        ('kind = "column"\ndim = 1', (8, 4), TensorLayout(tp=Shard(1))),
        ('kind = "column"\ndim = 1', (8,), TensorLayout(tp=Shard(0))),
        ('kind = "row"', (8, 4), TensorLayout(tp=Shard(1))),
        ('kind = "row"', (8,), TensorLayout()),
        ('kind = "row"\ndim = 0', (8, 4), TensorLayout(tp=Shard(0))),
        ('kind = "vocab"\nstage = "first"', (8, 4), TensorLayout(tp=Shard(0), stage="first")),
        ('kind = "replicated"', (8, 4), TensorLayout()),
        ('kind = "fused"\nparts = [4, 2, 6]', (24, 4), TensorLayout(tp=Shard(0), parts=(8, 4, 12))),
        ('kind = "fused"\nparts = ["in", "*", "*"]', (8, 4), TensorLayout(tp=Shard(0), parts=(4, 2, 2))),
        ('kind = "expert"', (6, 8, 4), TensorLayout(ep=Shard(0))),
        ('kind = "expert_column"', (6, 8, 4), TensorLayout(ep=Shard(0), tp=Shard(1))),
        ('kind = "expert_row"', (6, 8, 4), TensorLayout(ep=Shard(0), tp=Shard(2))),
        ('kind = "expert_row"', (6, 8), TensorLayout(ep=Shard(0))),
        ('kind = "expert_column"\ndim = 2', (6, 8, 4), TensorLayout(ep=Shard(0), tp=Shard(2))),
        ('kind = "expert_fused"\nparts = [1, 1]', (6, 8, 4), TensorLayout(ep=Shard(0), tp=Shard(1), parts=(4, 4))),
    ],
)
def test_kinds_say_which_dimension_is_cut(rule: str, shape: tuple[int, ...], expected: TensorLayout) -> None:
    """Each kind cuts its dimension; a bias follows, a row layer's is replicated; stacked experts count from 1."""
    assert layout_of(f"[[rule]]\nmatch = 'w'\n{rule}", "w", shape) == expected


def test_names_give_layers_and_experts() -> None:
    """Groups of the pattern are the layer and the expert; a tensor of one expert is not cut by expert ranks."""
    text = """
    [[rule]]
    match = 'block(?P<layer>\\d+)\\.ex(?P<which>\\d+)\\.w'
    kind = "expert_column"
    expert = "which"
    """
    assert layout_of(text, "block7.ex3.w", (8, 4)) == TensorLayout(tp=Shard(0), expert=3, stage="layer", layer=7)


def test_the_first_rule_wins_and_own_rules_come_before_a_family() -> None:
    """A rules file over a family overrides it for the names it matches, with the family's {layer}."""
    llama = builtin_families()["llama"]
    own = load_rules("[[rule]]\nmatch = '{layer}\\.mlp\\.up_proj\\.weight'\nkind = \"replicated\"", base=llama)
    assert own.name == "rules+llama"
    match = own.match("model.layers.4.mlp.up_proj.weight")
    assert match is not None
    assert (match.rule.kind, match.layer) == ("replicated", 4)
    other = own.match("model.layers.4.mlp.gate_proj.weight")
    assert other is not None
    assert other.rule.kind == "column"
    assert own.match("vision.patch.weight") is None


def test_adapters_are_cut_as_what_they_adapt() -> None:
    """B of a column layer has its rows, A of a row layer its columns; the other one of each is whole everywhere."""
    rules = load_rules(
        """
        [[rule]]
        match = 'column.weight'
        kind = "column"
        [[rule]]
        match = 'row.weight'
        kind = "row"
        [[rule]]
        match = 'fused.weight'
        kind = "fused"
        parts = ["in", "*"]
        """
    )

    def adapter(name: str, side: str, shape: tuple[int, ...]) -> Shard | Replicate:
        match = rules.match(f"{name}.weight")
        assert match is not None
        return match.rule.adapter_layout(side, shape, None, None).tp

    assert [adapter("column", side, shape) for side, shape in (("A", (2, 8)), ("B", (6, 2)))] == [Replicate(), Shard(0)]
    assert [adapter("row", side, shape) for side, shape in (("A", (2, 8)), ("B", (6, 2)))] == [Shard(1), Replicate()]
    assert adapter("fused", "B", (6, 2)) == Replicate()
    assert adapter("column", "other", (6,)) == Replicate()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule]\n", "not valid TOML"),
        ('{"rule": [', "not valid JSON"),
        ("rule:\n- match: x", "not valid TOML"),
        ("[rules]\n", "unknown key 'rules'"),
        ("rule = 3", r"rule is int, expected a list of tables \(\[\[rule\]\]\)"),
        ("rule = [3]", "rule is list, expected a list of tables"),
        ('{"rule": {"match": "x", "kind": "row"}}', "rule is dict, expected a list of tables"),
        ("family = []", r"family is list, expected a table \(\[family\]\)"),
        ("[family]\nnme = 'x'", "unknown key 'nme'"),
        ("[[rule]]\nkind = 'row'", "a rule needs match"),
        ("[[rule]]\nmatch = 'x'\nkind = 'colum'", "unknown kind 'colum'"),
        ("[[rule]]\nmatch = 'x'", "unknown kind 'None'"),
        ("[[rule]]\nmatch = '('\nkind = 'row'", "is no regular expression"),
        ("[[rule]]\nmatch = 'x'\nkind = 'row'\nstage = 'middle'", "unknown stage 'middle'"),
        ("[[rule]]\nmatch = 'x'\nkind = 'row'\nstage = 'layer'", "has no group"),
        ("[[rule]]\nmatch = 'x'\nkind = 'row'\ndim = -1", "dim must be a number from 0"),
        ("[[rule]]\nmatch = 'x'\nkind = 'row'\nparts = [1]", "parts and a fused kind go together"),
        ("[[rule]]\nmatch = 'x'\nkind = 'fused'\nparts = [1, '*']", "parts are all numbers"),
    ],
)
def test_a_wrong_rules_file_is_refused(text: str, message: str) -> None:
    """The error names the file and the number of the rule."""
    with pytest.raises(LayoutError, match=message) as caught:
        load_rules(text, source="my.toml")
    assert str(caught.value).startswith("my.toml")


def test_rules_in_json_are_the_same() -> None:
    """A JSON object says what TOML does, names and numbers alike."""
    toml = "[[rule]]\nmatch = '.*fused'\nkind = 'fused'\nparts = [4, 2, 6]\n[[rule]]\nmatch = 'n'\nkind = 'replicated'"
    rules = [{"match": ".*fused", "kind": "fused", "parts": [4, 2, 6]}, {"match": "n", "kind": "replicated"}]
    assert load_rules(json.dumps({"rule": rules}, indent=1)) == load_rules(toml)
    naming = json.dumps({"rule": [{"match": "a", "to": "b"}]})
    assert load_naming(naming, source="x") == load_naming("[[rule]]\nmatch = 'a'\nto = 'b'", source="x")


@pytest.mark.parametrize(
    ("rule", "shape", "message"),
    [
        ('kind = "row"', (), None),
        ('kind = "column"\ndim = 2', (2, 2), "cuts dimension 2, the tensor has 2"),
        ('kind = "column"', (), "cuts dimension 0, the tensor has 0"),
        (
            'kind = "fused"\nparts = [2, 1]',
            (8, 2),
            r"dimension 0 of shape \(8, 2\) does not divide into parts \[2, 1\]",
        ),
        ('kind = "fused"\nparts = ["in", "*"]', (2, 3), "does not divide into parts"),
        ('kind = "expert"', (), "stacked experts in a tensor without dimensions"),
    ],
)
def test_a_rule_that_does_not_fit_a_shape_is_refused(rule: str, shape: tuple[int, ...], message: str | None) -> None:
    """A missing dimension and parts that do not divide are errors, never a rounded cut."""
    text = f"[[rule]]\nmatch = 'w'\n{rule}"
    if message is None:
        assert layout_of(text, "w", shape) == TensorLayout()
        return
    with pytest.raises(LayoutError, match=message):
        layout_of(text, "w", shape)


def test_rule_sets_are_values() -> None:
    """Two rule sets of the same rules in the same order are equal."""
    assert RuleSet("a", ()) == RuleSet("a", ())
