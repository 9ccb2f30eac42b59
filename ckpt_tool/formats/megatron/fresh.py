"""Objects of a Megatron checkpoint whose weights come from elsewhere: arguments, and the extra states of its modules.

Megatron's strict loading asks for the extra state of every linear module, which is None where nothing was in FP8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from ckpt_tool.formats._pickle.nodes import Global
from ckpt_tool.manifest.model import Blob

__all__ = ["fresh_objects"]

_MODULE = re.compile(r"(.*\.(?:linear_\w+|eh_proj))\.weight")
_ATTENTION = re.compile(r"(.*\.self_attention)\.linear_proj\.weight")
_NAMESPACE = ("argparse", "Namespace")
_STARTED = {"checkpoint_version": 3.0, "num_floating_point_operations_so_far": 0}


def fresh_objects(args: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Blob]:
    """Common state and extra states.

    Args:
        args: arguments of the run that is to load it.
        shapes: the weights' keys and global shapes.
    """
    namespace = Global(*_NAMESPACE).stub()
    namespace.made, namespace.state = "newobj", dict(args)
    for name, value in (("args", namespace), *_STARTED.items()):
        yield Blob(name, "value", None, value, (name,), is_loaded=True)
    for key, shape in shapes.items():
        for module in _modules(key):
            n_lead = len(shape) - 2
            for place in product(*map(range, shape[:n_lead])):
                offsets, whole = (place, shape[:n_lead]) if n_lead else ((0,), (1,))
                shard = f"shard_{'.'.join(map(str, offsets))}_{'.'.join(map(str, whole))}"
                name = f"{module}._extra_state/{shard}"
                yield Blob(f"model.{name}", "torch_save", None, None, ("model", name), is_loaded=True)


def _modules(key: str) -> Iterator[str]:
    """Modules that have an extra state, as far as this weight tells."""
    linear, attention = _MODULE.fullmatch(key), _ATTENTION.fullmatch(key)
    if linear is not None:
        yield linear[1]
    if attention is not None:  # Transformer Engine's attention has one too; others do not ask for it
        yield f"{attention[1]}.core_attention"
