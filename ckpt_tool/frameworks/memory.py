"""Memory of a live tensor as numbers of its width, so that bits are moved and never interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckpt_tool.errors import Unsupported

__all__ = ["HostMemory", "TensorMemory", "memory_of"]

_BY_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class HostMemory:
    """Memory that numpy reaches: ``array`` shares it, with any strides."""

    def __init__(self, view: torch.Tensor) -> None:
        bits = view.view(_BY_WIDTH[view.element_size()])
        numbers: npt.NDArray[Any] = bits.numpy()
        self.array: npt.NDArray[Any] | None = (
            numbers.view(f"u{numbers.itemsize}") if numbers.dtype.kind == "i" else numbers
        )

    def put(self, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
        """Set the elements at ``index``; ``elements`` are numbers of the same width."""
        if self.array is not None:
            self.array[index] = elements

    def buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """uint8[nbytes] out of which ``put`` takes elements fastest."""
        return np.empty(nbytes, dtype=np.uint8)


class TensorMemory:
    """Memory of a device: elements go there by a copy that has ended when ``put`` returns.

    Made by the thread that trains, whose stream has done by then what it was told: other threads may call ``put``.
    """

    array: npt.NDArray[Any] | None = None

    def __init__(self, view: torch.Tensor) -> None:
        self._device = view.device
        self._await_stream()
        self._bits = view.view(_BY_WIDTH[view.element_size()])

    def _await_stream(self) -> None:
        """Return when this thread's stream has done what it was told, or the whole device where it has no streams."""
        module = getattr(torch, self._device.type)
        if hasattr(module, "current_stream"):
            module.current_stream(self._device).synchronize()
        else:
            module.synchronize()

    def put_tensor(self, index: tuple[slice, ...], content: torch.Tensor, sizes: tuple[int, ...]) -> None:
        """Set the elements at ``index``, of ``sizes``, to the bits of ``content``, uint8 on any device.

        Behind what this thread's stream was told, and before what it is told next.
        """
        kind = self._bits.dtype
        if content.storage_offset() % kind.itemsize:
            content = content.clone()  # where numbers of that width may begin
        with torch.inference_mode():
            self._bits[index].copy_(content.view(kind).view(sizes))

    def put(self, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
        """Set the elements at ``index``; ``elements`` are numbers of the same width."""
        packed = np.ascontiguousarray(elements)
        if packed.dtype.kind == "u" and packed.itemsize > 1:
            packed = packed.view(f"i{packed.itemsize}")
        with torch.inference_mode():  # which alone may fill what was made in it, and is a matter of each thread
            self._bits[index].copy_(torch.from_numpy(packed.reshape(elements.shape)))
        # What is strided there comes in one run and is spread by a kernel, for which such a copy does not wait; the
        # training's stream need not wait for the one of a thread that reads.
        self._await_stream()

    def buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """uint8[nbytes] out of which ``put`` takes elements fastest: locked in memory, where the runtime does that."""
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._device.type == "cuda")
        except RuntimeError:  # it locks no more of them; copies take longer then
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        found: npt.NDArray[np.uint8] = memory.numpy()
        return found


def memory_of(view: torch.Tensor, where: str) -> HostMemory | TensorMemory:
    """The memory of ``view``, which stays shared with it.

    Raises:
        Unsupported: putting elements there would not make ``view`` have them.
    """
    if view.is_conj():
        hint = "resolve_conj() gives one that can"
        raise Unsupported("a conjugated view cannot be filled", where=where, hint=hint)
    if any(not stride and size > 1 for stride, size in zip(view.stride(), view.shape, strict=True)):
        hint = "clone() gives one that can"
        raise Unsupported("an expanded view, whose elements share memory, cannot be filled", where=where, hint=hint)
    if not _are_apart(view):
        hint = "clone() gives one that can"
        raise Unsupported("a view whose elements overlap in memory cannot be filled", where=where, hint=hint)
    return HostMemory(view) if view.device.type == "cpu" else TensorMemory(view)


def _are_apart(view: torch.Tensor) -> bool:
    """Whether each step of a dimension leads beyond all that the steps shorter than it reach."""
    if view.is_contiguous():
        return True
    reach = 0
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += stride * (size - 1)
    return True
