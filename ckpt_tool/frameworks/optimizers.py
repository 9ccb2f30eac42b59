"""An optimizer makes its state at its first step; this has it make one before, to be filled from a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

__all__ = ["make_state"]


def make_state(value: Any) -> bool:
    """Whether ``value`` is an optimizer of torch that had no state, and has one now.

    It takes a step without gradients and at a rate of 0, which leaves parameters as they are. One whose steps need more
    than that, as LBFGS, keeps having none.
    """
    if not isinstance(value, torch.optim.Optimizer) or value.state:
        return False
    parameters = [each for group in value.param_groups for each in group["params"] if each.requires_grad]
    gradients = [each.grad for each in parameters]
    rates = [(group, group["lr"]) for group in value.param_groups if "lr" in group]
    try:
        with torch.inference_mode(mode=False), torch.no_grad():  # what that mode makes no later step could change
            for each in parameters:
                each.grad = torch.zeros_like(each)
            for group, rate in rates:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            with suppress(Exception):
                type(value).step(value)  # not what a scheduler has put in its place, which counts
    finally:
        for each, gradient in zip(parameters, gradients, strict=True):
            each.grad = gradient
        for group, rate in rates:
            group["lr"] = rate
    return bool(value.state)
