"""Per-rank files of models from before mcore: the same tensors, nested and under other names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckpt_tool.errors import Unsupported
from ckpt_tool.formats.megatron.rank_reader import READER
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import source_of
from tests.formats.megatron.build import legacy_files
from tests.formats.megatron.run import Run
from tests.formats.megatron.test_layouts import changed_model, tensors_of

BEFORE_MCORE = {
    "self_attention.linear_qkv": "{attention}.query_key_value", "self_attention.linear_proj": "{attention}.dense",
    "pre_mlp_layernorm": "post_attention_layernorm", "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}  # fmt: skip


def before_mcore(model: dict[str, Any], encoder: str, attention: str, *, is_copy: bool) -> dict[str, Any]:
    """A state dict as Megatron-LM had it before mcore: nested, under other names."""
    nested: dict[str, Any] = {"embedding": {}, encoder: {}}
    found = {"language_model": nested}
    for name, tensor in model.items():
        if name == "embedding.word_embeddings.weight":
            nested["embedding"] = {"word_embeddings": {"weight": tensor}}
        elif name == "output_layer.weight" and is_copy:
            found["word_embeddings_for_head"] = {"weight": tensor}
        elif name == "output_layer.weight":
            nested["output_layer"] = {"weight": tensor}
        else:
            old = name.removeprefix("decoder.")
            for ours, theirs in BEFORE_MCORE.items():
                old = old.replace(ours, theirs.format(attention=attention))
            nested[encoder][old] = tensor
    return found


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("encoder", "attention"), [("encoder", "self_attention"), ("transformer", "attention")])
def test_models_before_mcore(encoder: str, attention: str, *, is_tied: bool) -> None:
    """Their nested dicts are read under today's names, whatever the ranks and stages, and the optimizer's state too."""
    run = Run(tp=2, is_tied=is_tied, layers=(((0, 1),), ((2,),)))

    def change(root: dict[str, Any]) -> None:
        root["model"] = before_mcore(root["model"], encoder, attention, is_copy=is_tied)
        root["args"].transformer_impl = None

    manifest, tensors = tensors_of(READER, {**legacy_files(run), **changed_model(run, change)})
    assert manifest.info.get("optimizer_undecoded") is None
    assert tensors == run.truth()


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("checkpoint_version", 1.0, "checkpoint version 1.0: queries, keys and values stand in another order"),
        ("checkpoint_version", None, "checkpoint version None"),
        ("glu_activation", "swiglu", "a model of Megatron-LLM, args.glu_activation 'swiglu': its gate stands behind"),
        (
            "model",
            {"language_model": {"pooler": {"dense": torch.ones(2)}}},
            "whose 'language_model.pooler.dense' has no",
        ),
    ],
)
def test_models_before_mcore_that_differ_in_more_than_names(key: str, value: Any, match: str) -> None:
    """Another order of rows, another MLP, a module that is gone: refused with the reason."""

    def change(root: dict[str, Any]) -> None:
        root["model"] = before_mcore(root["model"], "encoder", "self_attention", is_copy=False)
        if key == "glu_activation":
            root["args"].glu_activation = value
        else:
            root[key] = value

    with pytest.raises(Unsupported, match=match):
        READER.read(source_of(MemoryStore(changed_model(Run(), change))))
