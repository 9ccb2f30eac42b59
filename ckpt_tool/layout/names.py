"""A spelling is one reading of a tensor's name: the parameter it belongs to, without what wrappers put around it.

Wrappers (``module.``, ``_orig_mod.``), optimizers (``optim.state.<fqn>.exp_avg``) and adapters (``.lora_A.weight``) all
rename what a model calls a parameter. Knows no rules: whoever knows them takes the first spelling that one fits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpt_tool.records import dataclass

__all__ = ["Spelling", "spellings", "without_wrappers"]

# Inserted wherever a module is wrapped: torch.compile, FSDP, activation checkpointing, fairscale, Lightning.
_WRAPPERS = re.compile(
    r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module|_forward_module)\."
)
# Put in front of a whole model, one word each: DCP and Lightning keys, DDP, DeepSpeed, PEFT, multimodal models.
_PREFIXES = ("model.", "module.", "state_dict.", "app.", "base_model.", "language_model.", "text_model.", "network.")

_SLOTS = (
    "exp_avg|exp_avg_sq|max_exp_avg_sq|exp_inf|exp_avg_diff|exp_avg_sq_row|exp_avg_sq_col|momentum_buffer|square_avg|"
    "grad_avg|acc_delta|sum|step|param|fp32_param|master_param"
)
_STATE = (
    # torch and Megatron: the name of the state before or behind the parameter
    re.compile(rf"(?:.*?\.)??state\.(?P<slot>{_SLOTS})\.(?P<parameter>.+)"),
    re.compile(r"(?:.*?\.)??state\.(?P<parameter>.+)\.(?P<slot>[^.]+)"),
    re.compile(rf"(?:optim|optimizer|opt)\.(?!state\.)(?P<parameter>.+)\.(?P<slot>{_SLOTS})"),
)
# PEFT: `<base>.lora_A.weight`, with the adapter's name between in a live model, and what it wraps kept beside it.
_ADAPTER = re.compile(
    r"(?P<base>.+)\.lora_(?:(?P<side>[AB])|embedding_[AB]|magnitude_vector)(?:\.(?!weight$|bias$)[^.]+)?(?:\.weight)?"
)
_ADAPTED = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


@dataclass(frozen=True, slots=True)
class Spelling:
    """One reading of a name."""

    parameter: str
    """The parameter it may belong to."""
    stripped: str = ""
    """What was taken off in front, for people."""
    slot: str | None = None
    """Name of the optimizer state that it is; None for the parameter itself."""
    adapter: str | None = None
    """``A`` or ``B`` for a low-rank adapter of the parameter, ``other`` for its other parts; None for the parameter."""


def spellings(fqn: str, numbered: Mapping[int, str]) -> Iterator[Spelling]:
    """Readings of a name, the plainest first; ``numbered`` gives the names of parameters that optimizers number.

    >>> [s.parameter for s in spellings("model._orig_mod.norm.weight", {})]
    ['model._orig_mod.norm.weight', 'model.norm.weight', 'norm.weight']
    >>> list(spellings("optim.state.7.exp_avg", {7: "norm.weight"}))[-1]
    Spelling(parameter='norm.weight', stripped='', slot='exp_avg', adapter=None)
    """
    yield from _parameter_spellings(fqn)
    if "state." not in fqn and not fqn.startswith("opt"):  # most names, told without three searches
        return
    for pattern in _STATE:
        found = pattern.fullmatch(fqn)
        if found is None:
            continue
        parameter = found["parameter"]
        name = numbered.get(int(parameter), parameter) if parameter.isdecimal() else parameter
        for spelling in _parameter_spellings(name):
            yield replace(spelling, slot=found["slot"])


def without_wrappers(fqn: str) -> str:
    """The name without what wrappers insert anywhere, and without ``module.`` in front of it or of what it belongs to.

    >>> without_wrappers("module.layers.0._orig_mod._checkpoint_wrapped_module.w"), without_wrappers("module.x")
    ('layers.0.w', 'x')
    >>> without_wrappers("_forward_module.module.w")
    'w'
    """
    name = _WRAPPERS.sub("", fqn)
    while name.startswith("module.") and len(name) > len("module."):
        name = name[len("module.") :]
    return name


def _parameter_spellings(fqn: str) -> Iterator[Spelling]:
    for name, stripped in _without_prefixes(fqn):
        yield Spelling(name, stripped)
        if ".lora_" in name:
            found = _ADAPTER.fullmatch(name)
            if found is not None:
                base = _ADAPTED.sub("", found["base"])
                yield Spelling(f"{base}.weight", stripped, adapter=found["side"] or "other")
        elif _ADAPTED.search(name):
            yield Spelling(_ADAPTED.sub("", name), stripped)


def _without_prefixes(fqn: str) -> Iterator[tuple[str, str]]:
    """``(name, what was taken off)``, from nothing to everything that is known as a prefix."""
    yield fqn, ""
    name, stripped = fqn, ""
    if _WRAPPERS.search(fqn):
        name, stripped = _WRAPPERS.sub("", fqn), "".join(_WRAPPERS.findall(fqn))
        yield name, stripped
    while True:
        if not name.startswith(_PREFIXES):
            return
        prefix = name[: name.index(".") + 1]
        name, stripped = name[len(prefix) :], stripped + prefix
        yield name, stripped
