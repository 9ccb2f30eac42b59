"""Placing tensors: every family on many meshes, and the layouts that went wrong elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.cover import coverage
from ckpt_tool.layout.family import builtin_families
from ckpt_tool.layout.mesh import Mesh, default_mesh, parse_mesh
from ckpt_tool.layout.place import DataParallelMode, Placed, place
from ckpt_tool.layout.rules import RuleSet, load_rules
from ckpt_tool.layout.stages import StageOptions
from tests import oracle
from tests.layout.models import MODELS, Shapes

FIXTURES = Path(__file__).parents[2] / "fixtures"


def held(placed: Placed, shapes: Shapes, fqn: str) -> dict[int, list[Box]]:
    """Boxes of one tensor by rank."""
    row, ndim = list(shapes).index(fqn), len(shapes[fqn])
    found: dict[int, list[Box]] = {}
    for i in np.flatnonzero(placed.tensor == row):
        box = Box(tuple(placed.offsets[i, :ndim].tolist()), tuple(placed.sizes[i, :ndim].tolist()))
        found.setdefault(int(placed.rank[i]), []).append(box)
    return found


def rows_held(placed: Placed, shapes: Shapes, fqn: str, dim: int = 0) -> dict[int, list[int]]:
    """Indices along one dimension by rank, in the order in which the rank's own tensor holds them."""
    return {
        rank: [i for box in boxes for i in range(box.offsets[dim], box.ends[dim])]
        for rank, boxes in held(placed, shapes, fqn).items()
    }


def place_all(shapes: Shapes, mesh: Mesh, rules: RuleSet | None, **options: object) -> Placed:
    """Place tensors given as a mapping."""
    return place(list(shapes), list(shapes.values()), mesh, rules, **options)  # type: ignore[arg-type]


def assert_lawful(placed: Placed, shapes: Shapes) -> None:
    """Each tensor is covered once by its first copies, copies are numbered, rows are sorted."""
    order = list(zip(placed.tensor.tolist(), placed.rank.tolist(), strict=True))
    assert order == sorted(order)
    for row, (fqn, shape) in enumerate(shapes.items()):
        mine = np.flatnonzero(placed.tensor == row)
        offsets, sizes = placed.offsets[mine, : len(shape)], placed.sizes[mine, : len(shape)]
        assert (placed.offsets[mine, len(shape) :] == 0).all()
        assert (placed.sizes[mine, len(shape) :] == 1).all()
        assert coverage(shape, offsets, sizes).is_exact, fqn
        first = placed.replica[mine] == 0
        alone = coverage(shape, offsets[first], sizes[first])
        assert (alone.is_exact, alone.n_replicas) == (True, 0), fqn
        copies: dict[tuple[int, ...], list[int]] = {}
        for box, replica in zip(np.hstack([offsets, sizes]).tolist(), placed.replica[mine].tolist(), strict=True):
            copies.setdefault(tuple(box), []).append(replica)
        assert all(numbers == list(range(len(numbers))) for numbers in copies.values()), fqn


MESHES: list[tuple[str, DataParallelMode]] = [
    ("tp=2", "shard"),
    ("pp=2,dp=2,tp=3", "shard"),
    ("pp=2,dp=3,tp=2", "flat"),
    ("pp=3,edp=2,ep=2,cp=2,tp=2", "shard"),
    ("ep=3,tp=2", "flat"),
    ("tp=2,dp_replicate=2,dp_shard=3,pp=2", "replicate"),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("mesh", "dp_mode"), MESHES)
def test_every_family_on_every_mesh_is_a_partition(model: str, mesh: str, dp_mode: DataParallelMode) -> None:
    """First copies of the boxes hold each element of each tensor once, whatever the mesh divides."""
    family, shapes = MODELS[model]
    assert_lawful(place_all(shapes, parse_mesh(mesh), builtin_families()[family], dp_mode=dp_mode), shapes)


@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.sampled_from(["column", "row", "fused", "expert_row"]))
@settings(max_examples=60)
def test_any_shape_on_a_mesh_is_a_partition(sizes: list[int], kind: str) -> None:
    """Shapes smaller than the mesh leave ranks without a piece, and no element without a rank."""
    text = f"[[rule]]\nmatch = 'w'\nkind = '{kind}'" + ("\nparts = [1]" if kind == "fused" else "")
    shapes: Shapes = {"w": tuple(sizes)}
    for dp_mode in ("shard", "flat"):
        placed = place_all(shapes, parse_mesh("edp=2,ep=2,tp=3"), load_rules(text), dp_mode=dp_mode)
        assert_lawful(placed, shapes)


def test_tensor_parallel_kinds() -> None:
    """1 to 4 tensor ranks without a model: column cuts rows, row cuts columns, vocab rows, norms nothing."""
    _, shapes = MODELS["llama"]
    placed = place_all(shapes, default_mesh(tp=4), builtin_families()["llama"])
    layer = "model.layers.1"
    assert held(placed, shapes, f"{layer}.mlp.up_proj.weight")[2] == [Box((12, 0), (6, 16))]
    assert held(placed, shapes, f"{layer}.mlp.down_proj.weight")[2] == [Box((0, 12), (16, 6))]
    assert held(placed, shapes, "model.embed_tokens.weight")[3] == [Box((30, 0), (10, 16))]
    assert held(placed, shapes, f"{layer}.input_layernorm.weight") == {r: [Box.whole((16,))] for r in range(4)}


def test_a_name_without_a_rule_is_never_guessed() -> None:
    """The error counts and lists the names, and its hint is a rules file that covers them."""
    shapes: Shapes = {**{f"mamba.layers.{i}.mixer.a-log": (4,) for i in range(12)}, "model.norm.weight": (4,)}
    with pytest.raises(LayoutError, match="no rule of 'llama' covers 12 of 13 tensors") as caught:
        place_all(shapes, default_mesh(tp=2), builtin_families()["llama"])
    assert "mamba.layers.0.mixer.a-log" in caught.value.message
    assert "and 2 more" in caught.value.message
    stanza = (caught.value.hint or "").partition("\n\n")[2]
    rules = load_rules(stanza, base=builtin_families()["llama"])
    placed = place_all(shapes, default_mesh(tp=2, pp=2), rules)
    assert_lawful(placed, shapes)
    assert placed.layouts[3].layer == 3


def test_a_rule_for_half_a_name_is_told() -> None:
    """A rule that matches the beginning of an uncovered name only is named, for a match is of the whole name."""
    rules = load_rules("[[rule]]\nmatch = '(odd|buf_)'\nkind = 'replicated'", base=builtin_families()["llama"])
    with pytest.raises(LayoutError, match=r"'\(odd\|buf_\)' matches only the beginning of 'buf_i64'"):
        place_all({"buf_i64": (4,), "model.norm.weight": (4,)}, default_mesh(tp=2), rules)


def test_a_default_is_said() -> None:
    """With a default, names without a rule are placed, and a note counts them; what cannot be cut needs no rule."""
    shapes: Shapes = {"mystery": (6, 2), "riddle": (4,), "scalar": (), "empty": (0, 3)}
    rules = builtin_families()["llama"]
    cut = place_all(shapes, default_mesh(tp=2), rules, default="shard0")
    assert held(cut, shapes, "mystery") == {0: [Box((0, 0), (3, 2))], 1: [Box((3, 0), (3, 2))]}
    assert cut.notes == ("no rule, by default shard0: 2 tensors, first mystery",)
    whole = place_all(shapes, default_mesh(tp=2), rules, default="replicate")
    assert held(whole, shapes, "mystery") == {rank: [Box.whole((6, 2))] for rank in range(2)}


def test_data_parallelism_alone_needs_no_rules() -> None:
    """6 elements on 4 ranks are 2, 2, 2 and nothing: the empty rank is dropped and said."""
    shapes: Shapes = {"w": (6,)}
    placed = place_all(shapes, Mesh(("dp",), (4,)), None)
    assert rows_held(placed, shapes, "w") == {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    assert placed.notes == ("too small for all its ranks, 1 rank has nothing of it: w",)
    wide = place_all(shapes, Mesh(("dp",), (5,)), None)
    assert rows_held(wide, shapes, "w") == {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    with pytest.raises(LayoutError, match="needs rules"):
        place_all(shapes, Mesh(("tp",), (2,)), None)


def test_a_dimension_smaller_than_the_mesh() -> None:
    """(1, 17) over dp 2 x tp 4 cut by dp: one row of ranks holds it four times, the others hold nothing."""
    shapes: Shapes = {"w": (1, 17)}
    rules = load_rules("[[rule]]\nmatch = 'w'\nkind = 'replicated'")
    placed = place_all(shapes, Mesh(("dp", "tp"), (2, 4)), rules)
    assert held(placed, shapes, "w") == {rank: [Box.whole((1, 17))] for rank in range(4)}
    assert placed.replica.tolist() == [0, 1, 2, 3]


def test_fused_rows_are_mapped_by_interval_not_by_head() -> None:
    """8 query and 2 key-value heads fused in groups on 4 tensor ranks: 12 head blocks are 3 per rank, in order."""
    shapes: Shapes = {"qkv": (24, 3)}
    placed = place_all(shapes, default_mesh(tp=4), load_rules("[[rule]]\nmatch = 'qkv'\nkind = 'column'"))
    assert rows_held(placed, shapes, "qkv") == {r: list(range(6 * r, 6 * r + 6)) for r in range(4)}


@pytest.mark.parametrize(("dim", "dp_mode"), [(0, "shard"), (1, "shard"), (0, "replicate")])
def test_unequal_fused_parts_are_cut_one_by_one(dim: int, dp_mode: DataParallelMode) -> None:
    """A new kind of sharding is a rule: parts of 4, 2 and 6 units, each cut by tp, laid end to end, then cut by dp."""
    shape = (24, 5) if dim == 0 else (5, 24)
    shapes: Shapes = {"w": shape}
    rules = load_rules(f"[[rule]]\nmatch = 'w'\nkind = 'fused'\ndim = {dim}\nparts = [4, 2, 6]")
    placed = place_all(shapes, Mesh(("dp", "tp"), (3, 2)), rules, dp_mode=dp_mode)
    positions = oracle.positions(shape)
    for rank, boxes in held(placed, shapes, "w").items():
        dp, tp = divmod(rank, 2)
        parts = np.split(positions, [8, 12], axis=dim)
        local = np.concatenate([np.split(part, 2, axis=dim)[tp] for part in parts], axis=dim)
        rows = oracle.chunk_pieces(local.shape[0], 3)[dp] if dp_mode == "shard" else range(local.shape[0])
        expected = local[list(rows)]
        actual = np.concatenate([positions[box.slices] for box in boxes], axis=dim)
        assert actual.tolist() == expected.tolist()
    assert_lawful(placed, shapes)


def test_layers_over_stages() -> None:
    """Embedding first, norm and head last, layers in between, 3 of them on 2 stages as 2 and 1; the map is a note."""
    _, shapes = MODELS["llama"]
    rules = builtin_families()["llama"]
    placed = place_all(shapes, default_mesh(pp=2, tp=2), rules)

    def ranks(fqn: str) -> list[int]:
        return sorted(held(placed, shapes, fqn))

    assert [ranks(f"model.layers.{i}.input_layernorm.weight") for i in range(3)] == [[0, 1], [0, 1], [2, 3]]
    assert ranks("model.embed_tokens.weight") == [0, 1]
    assert ranks("model.norm.weight") == ranks("lm_head.weight") == [2, 3]
    assert "layers over stages: stage 0: layers 0-1, stage 1: layer 2" in placed.notes
    virtual = place_all(shapes, default_mesh(pp=2), rules, stages=StageOptions(vpp=2))
    assert virtual.stages.stage.tolist() == [0, 1, 0]
    assert virtual.stages.chunk.tolist() == [0, 0, 1]
    assert held(virtual, shapes, "model.layers.2.input_layernorm.weight") == {0: [Box.whole((16,))]}


def test_stages_without_layers_are_said() -> None:
    """Three layers on five stages leave two with nothing to compute."""
    _, shapes = MODELS["llama"]
    placed = place_all(shapes, default_mesh(pp=5), builtin_families()["llama"])
    assert "stages without layers: 3, 4" in placed.notes
    full = place_all(shapes, default_mesh(pp=3), builtin_families()["llama"])
    assert not any(note.startswith("stages without layers") for note in full.notes)


def test_a_missing_layer_is_said() -> None:
    """A layer that is not there leaves the others where they belong, and a note."""
    shapes: Shapes = {fqn: shape for fqn, shape in MODELS["llama"][1].items() if ".1." not in fqn}
    placed = place_all(shapes, default_mesh(pp=3), builtin_families()["llama"])
    assert "1 layer below the highest number is not there: 1" in placed.notes
    assert list(held(placed, shapes, "model.layers.2.input_layernorm.weight")) == [2]


def test_experts_belong_to_ranks() -> None:
    """4 experts on 2 expert ranks are 0-1 and 2-3; their data-parallel ranks are edp, those of the rest edp x ep."""
    _, shapes = MODELS["qwen3_moe"]
    placed = place_all(shapes, default_mesh(dp=4, ep=2), builtin_families()["qwen_moe"])
    for expert in range(4):
        rows = rows_held(placed, shapes, f"model.layers.0.mlp.experts.{expert}.up_proj.weight")
        ep = expert // 2
        assert rows == {ep: list(range(12)), 2 + ep: list(range(12, 24))}
    rows = rows_held(placed, shapes, "model.layers.0.mlp.gate.weight")
    assert rows == {0: [0], 1: [1], 2: [2], 3: [3]}
    stacked = MODELS["qwen3_moe_stacked"][1]
    boxes = held(
        place_all(stacked, default_mesh(dp=2, ep=2), builtin_families()["qwen_moe"]),
        stacked,
        "model.layers.0.mlp.experts.down_proj",
    )
    assert boxes == {0: [Box((0, 0, 0), (2, 16, 24))], 1: [Box((2, 0, 0), (2, 16, 24))]}


def test_experts_that_do_not_divide_are_said() -> None:
    """4 experts on 3 ranks are 2, 2 and none, and a note says so."""
    _, shapes = MODELS["qwen3_moe"]
    placed = place_all(shapes, default_mesh(dp=3, ep=3), builtin_families()["qwen_moe"])
    assert list(held(placed, shapes, "model.layers.0.mlp.experts.3.up_proj.weight")) == [1]
    assert "experts do not divide by ep=3, the last ranks hold fewer: 4" in placed.notes


def test_optimizer_state_follows_its_parameter() -> None:
    """State of the parameter's shape lies as it does, named or numbered; other shapes are whole on its stage."""
    fqn = "model.layers.2.mlp.down_proj.weight"
    shapes: Shapes = {
        fqn: (16, 24),
        f"optim.state.{fqn}.exp_avg": (16, 24),
        "optimizer.state.5.exp_avg_sq": (16, 24),
        f"optim.state.{fqn}.step": (),
        f"optim.state.{fqn}.exp_avg_sq_row": (16,),
        "optim.state.model.layers.0.mlp.down_proj.weight.exp_avg": (16, 24),
        "lr_scheduler.last": (2,),
    }
    placed = place_all(shapes, default_mesh(pp=3, tp=2), builtin_families()["llama"], numbered={5: fqn})
    parameter = held(placed, shapes, fqn)
    assert parameter == {4: [Box((0, 0), (16, 12))], 5: [Box((0, 12), (16, 12))]}
    assert held(placed, shapes, f"optim.state.{fqn}.exp_avg") == parameter
    assert held(placed, shapes, "optimizer.state.5.exp_avg_sq") == parameter
    assert held(placed, shapes, f"optim.state.{fqn}.step") == {4: [Box((), ())], 5: [Box((), ())]}
    assert held(placed, shapes, f"optim.state.{fqn}.exp_avg_sq_row") == {rank: [Box.whole((16,))] for rank in (4, 5)}
    assert list(held(placed, shapes, "lr_scheduler.last")) == list(range(6))
    assert f"optimizer state of another shape than its parameter, replicated: optim.state.{fqn}.exp_avg_sq_row" in (
        placed.notes
    )


def test_what_was_stripped_is_said() -> None:
    """Prefixes are taken off only where no rule fits with them."""
    shapes: Shapes = {"model.norm.weight": (4,), "module.model.layers.0.input_layernorm.weight": (4,)}
    placed = place_all(shapes, default_mesh(tp=2), builtin_families()["llama"])
    assert placed.notes == ("read without 'module.': module.model.layers.0.input_layernorm.weight",)


def test_adapters_of_peft() -> None:
    """Adapters saved by PEFT are cut like the layers that they adapt."""
    shapes: Shapes = {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (3, 48),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (48, 3),
        "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight": (3, 48),
        "base_model.model.lm_head.weight": (131, 48),
    }
    placed = place_all(shapes, default_mesh(tp=2), builtin_families()["llama"])
    assert [held(placed, shapes, fqn)[1] for fqn in shapes] == [
        [Box.whole((3, 48))],
        [Box((24, 0), (24, 3))],
        [Box((0, 24), (3, 24))],
        [Box((66, 0), (65, 48))],
    ]


def test_a_tensor_without_elements_keeps_one_piece() -> None:
    """An empty tensor lies on one rank, so that it does not vanish."""
    shapes: Shapes = {"empty": (0, 5), "w": (2, 2)}
    placed = place_all(shapes, Mesh(("dp",), (2,)), None)
    assert held(placed, shapes, "empty") == {0: [Box.whole((0, 5))]}


def test_boxes_are_those_that_fsdp2_over_tp_saved() -> None:
    """A checkpoint of FSDP2 over tensor parallelism, written by torch, has just the boxes that the rules give."""
    metadata = FileSystemReader(FIXTURES / "torch/dcp_fsdp2_tp_2x2/ckpt").read_metadata().state_dict_metadata
    saved = {
        fqn: (tuple(meta.size), {Box(tuple(c.offsets), tuple(c.sizes)) for c in meta.chunks})
        for fqn, meta in metadata.items()
        if hasattr(meta, "chunks") and ".buf_" not in fqn
    }
    whole = load_rules(  # that job cut neither the embedding nor the head by tp
        "[[rule]]\nmatch = 'model.embed_tokens.weight|lm_head.weight'\nkind = 'replicated'",
        base=builtin_families()["llama"],
    )
    shapes: Shapes = {fqn: shape for fqn, (shape, _) in saved.items()}
    placed = place_all(shapes, Mesh(("dp", "tp"), (2, 2)), whole)
    for fqn, (_, boxes) in saved.items():
        assert {box for found in held(placed, shapes, fqn).values() for box in found} == boxes, fqn
    assert len(saved) == 48


def test_boxes_are_those_that_fsdp2_saved() -> None:
    """A checkpoint of FSDP2 on 4 ranks has just the boxes that a data-parallel mesh gives."""
    metadata = FileSystemReader(FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt").read_metadata().state_dict_metadata
    saved = {
        fqn: (tuple(meta.size), {Box(tuple(c.offsets), tuple(c.sizes)) for c in meta.chunks if 0 not in c.sizes})
        for fqn, meta in metadata.items()
        if hasattr(meta, "chunks") and ".buf_" not in fqn and not fqn.startswith("extra")
    }
    shapes: Shapes = {fqn: shape for fqn, (shape, _) in saved.items()}
    placed = place_all(shapes, Mesh(("dp",), (4,)), None)
    for fqn, (_, boxes) in saved.items():
        assert {box for found in held(placed, shapes, fqn).values() for box in found} == boxes, fqn


def test_an_axis_must_mean_something() -> None:
    """A mesh axis of an unknown name is refused, not ignored."""
    with pytest.raises(LayoutError, match="has an axis 'sp'"):
        place_all({"w": (4,)}, Mesh(("sp",), (2,)), None)


def test_a_rule_that_does_not_fit_names_the_tensor() -> None:
    """The error of a rule is told with the tensor that it failed on."""
    with pytest.raises(LayoutError, match=r"^w: rule 'w' cuts dimension 3"):
        place_all({"w": (4, 4)}, Mesh(("tp",), (2,)), load_rules("[[rule]]\nmatch = 'w'\nkind = 'column'\ndim = 3"))


def test_405b_on_8960_ranks_is_quick() -> None:
    """3,411 tensors of a 405B model on 8,960 ranks are 1.9 million boxes."""
    per_layer = {
        "self_attn.q_proj": (16384, 16384), "self_attn.k_proj": (1024, 16384), "self_attn.v_proj": (1024, 16384),
        "self_attn.o_proj": (16384, 16384), "mlp.gate_proj": (53248, 16384), "mlp.up_proj": (53248, 16384),
        "mlp.down_proj": (16384, 53248), "input_layernorm": (16384,), "post_attention_layernorm": (16384,),
    }  # fmt: skip
    model: Shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(126) for name, shape in per_layer.items()}
    model |= {
        "model.embed_tokens.weight": (128256, 16384),
        "model.norm.weight": (16384,),
        "lm_head.weight": (128256, 16384),
    }
    moments: Shapes = {
        f"optim.state.{fqn}.{slot}": shape for fqn, shape in model.items() for slot in ("exp_avg", "exp_avg_sq")
    }
    placed = place_all(model | moments, default_mesh(tp=8, pp=16, dp=70), builtin_families()["llama"])
    assert len(placed) == 1_870_848
