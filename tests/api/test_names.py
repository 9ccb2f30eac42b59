"""Names in the target: what is taken off, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt_tool.api.convert.names import module_names, renamed
from ckpt_tool.api.convert.tied import groups_of_shared_bytes
from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from tests.synthetic import make_source


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("model", "lm_head.weight"), "lm_head.weight"),
        (("app", "model", "w"), "w"),
        (("model", "model.embed_tokens.weight"), "model.embed_tokens.weight"),
        (("state_dict", "module._orig_mod.layers.0.w"), "layers.0.w"),
        (("model", "layers.0._checkpoint_wrapped_module.w"), "layers.0.w"),
        (("model.layers.0.w",), "model.layers.0.w"),
    ],
)
def test_module_names(path: tuple[str, ...], name: str) -> None:
    """The trainer's outer key and wrappers go, the module's own names stay."""
    assert module_names([path]) == [name]


def test_two_tensors_of_one_name_are_refused() -> None:
    """A rename that would drop a tensor stops with both names."""
    manifest = make_source(
        {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}, {"a": [Box((0,), (2,))], "b": [Box((0,), (2,))]}
    ).manifest
    with pytest.raises(LayoutError, match="'a' and 'b' would both be called 'x'"):
        renamed(manifest, {"a": "x", "b": "x"})


def test_tied_means_the_same_bytes() -> None:
    """Tensors over the same bytes are tied; equal copies elsewhere are not."""
    source = make_source(
        {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}, {"a": [Box((0,), (2,))], "b": [Box((0,), (2,))]}
    )
    chunks = source.manifest.chunks
    assert groups_of_shared_bytes(source.manifest) == []
    shared = chunks.replace(file=chunks.file * 0, offset=chunks.offset * 0 + chunks.offset[0])
    assert groups_of_shared_bytes(source.manifest.replace(chunks=shared)) == [("a", "b")]
