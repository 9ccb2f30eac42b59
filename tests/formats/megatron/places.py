"""Where the checkpoints of these tests lie, and what must come out of them.

``fixtures/megatron/checkpoints.tar.xz`` holds all, written by real Megatron: they share most of their bytes, which the
archive stores once. The folder ``megatron`` below ``$CKPT_EXTRA_FIXTURES``, where there is one, adds others:
``<name>/ckpt`` with ``<name>/truth.safetensors``.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from tests.formats.conformance import FIXTURES, Truth, truth_of

ARCHIVE = FIXTURES / "megatron/checkpoints.tar.xz"
_EXTRA = os.environ.get("CKPT_EXTRA_FIXTURES")
EXTRA = Path(_EXTRA) / "megatron" if _EXTRA else None
SLOTS = ("param", "exp_avg", "exp_avg_sq")
VOCAB_ROWS = 128
"""Rows of embedding and output layer that truth is made with; checkpoints have the first ones."""


def _extracted() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="ckpt-megatron-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


CHECKPOINTS = _extracted()


def dense_shapes(n_layers: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Weights of the dense model: hidden 32, 4 heads, 2 KV groups of 8, gated MLP of 48."""
    layer = "decoder.layers."
    return {
        "embedding.word_embeddings.weight": (vocab, 32),
        f"{layer}self_attention.linear_qkv.layer_norm_weight": (n_layers, 32),
        f"{layer}self_attention.linear_qkv.weight": (n_layers, 64, 32),
        f"{layer}self_attention.linear_proj.weight": (n_layers, 32, 32),
        f"{layer}mlp.linear_fc1.layer_norm_weight": (n_layers, 32),
        f"{layer}mlp.linear_fc1.weight": (n_layers, 96, 32),
        f"{layer}mlp.linear_fc2.weight": (n_layers, 32, 48),
        "decoder.final_layernorm.weight": (32,),
        "output_layer.weight": (vocab, 32),
    }


def expert_shapes(n_layers: int, vocab: int, n_experts: int) -> dict[str, tuple[int, ...]]:
    """Weights of the model with experts."""
    shapes = dense_shapes(n_layers, vocab)
    dense = [key for key in shapes if ".mlp.linear_fc" in key and not key.endswith("layer_norm_weight")]
    for key in dense:
        _, rows, columns = shapes.pop(key)
        shapes[key.replace(".mlp.", ".mlp.experts.experts.")] = (n_layers, n_experts, rows, columns)
    shapes["decoder.layers.mlp.router.weight"] = (n_layers, n_experts, 32)
    return shapes


def by_layer(truth: Callable[[], dict[str, Truth]]) -> Callable[[], dict[str, Truth]]:
    """The same values where layers are not stacked, and gate and up are tensors of their own (``_w`` and ``_v``)."""

    def made() -> dict[str, Truth]:
        found = {}
        for fqn, one in truth().items():
            if ".layers." not in fqn:
                found[fqn] = one
                continue
            n_layers, *shape = one.shape
            nbytes = len(one.data) // n_layers
            for layer in range(n_layers):
                name = fqn.replace(".layers.", f".layers.{layer}.")
                data = one.data[layer * nbytes : (layer + 1) * nbytes]
                if not name.endswith("linear_fc1.weight"):
                    found[name] = Truth(one.dtype, tuple(shape), data)
                    continue
                for suffix, half in (("_w", data[: nbytes // 2]), ("_v", data[nbytes // 2 :])):
                    found[name + suffix] = Truth(one.dtype, (shape[0] // 2, *shape[1:]), half)
        return found

    return made


def truth_from_seed(shapes: dict[str, tuple[int, ...]]) -> Callable[[], dict[str, Truth]]:
    """The values that the checkpoints were made with: a function of slot, key and shape (``make/mk_body.py``)."""

    def made() -> dict[str, Truth]:
        found = {}
        for key, shape in shapes.items():
            for slot in SLOTS:
                values = _values(slot, key, shape)
                found[f"optimizer.state.{slot}.{key}"] = Truth("float32", shape, _bytes(values))
                if slot == "param":
                    found[f"model.{key}"] = Truth("bfloat16", shape, _bytes(values.to(torch.bfloat16)))
        return found

    return made


def _values(slot: str, key: str, shape: tuple[int, ...]) -> torch.Tensor:
    has_vocab = key.endswith(("word_embeddings.weight", "output_layer.weight"))
    rows = VOCAB_ROWS if has_vocab else shape[0]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{slot}:{key}".encode()))
    values = torch.randn((rows, *shape[1:]), generator=generator)
    values = values.abs() if slot == "exp_avg_sq" else values
    return values[: shape[0]]


def _bytes(values: torch.Tensor) -> bytes:
    raw: bytes = values.contiguous().view(torch.uint8).numpy().tobytes()
    return raw


def padded_for(truth: dict[str, Truth], tp: int) -> dict[str, Truth]:
    """The same with a vocabulary of 100 padded for ``tp`` ranks (8 rows each, or more): cut off, or filled."""
    rows = -(-100 // (8 * tp)) * 8 * tp
    found = dict(truth)
    for fqn, one in truth.items():
        if fqn.endswith(("word_embeddings.weight", "output_layer.weight")):
            nbytes = len(one.data) // one.shape[0] * rows
            found[fqn] = Truth(one.dtype, (rows, *one.shape[1:]), one.data[:nbytes].ljust(nbytes, b"\0"))
    return found


def renamed(name: str) -> str:
    """Our name of a tensor in a ``truth.safetensors``: ``model/<key>``, ``optimizer.state.param/<key>``."""
    return name.replace("/", ".", 1)


def extra_folders(marker: str) -> list[Path]:
    """Further checkpoints that have a file like ``marker``, with truth beside them."""
    if EXTRA is None:
        return []
    known = {path.name for path in CHECKPOINTS.iterdir()}
    folders = [path.parent for path in sorted(EXTRA.glob("*/truth.safetensors")) if path.parent.name not in known]
    return [folder for folder in folders if any(folder.glob(marker))]


def extra_truth(folder: Path) -> Callable[[], dict[str, Truth]]:
    """What ``truth.safetensors`` of an extra checkpoint says."""
    return truth_of(folder, renamed)
