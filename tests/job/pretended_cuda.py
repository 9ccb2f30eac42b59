"""Tensors that say they are on a CUDA device, and a ``torch.cuda`` that writes down what it is told.

The elements are in host memory, so that kernels of the CPU move them; what is asked of streams, events and pages comes
in the order in which a device would be told of it. For code that a machine without a GPU would otherwise never run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

__all__ = ["OnDevice", "on_device", "pretended_cuda"]


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """A tensor of a device; what is made of it is on the same one."""

    number = 0

    @property
    def is_cuda(self) -> bool:
        """True."""
        return True

    @property
    def device(self) -> torch.device:
        """The device it says it is on."""
        return torch.device("cuda", self.number)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch makes of it, on the device of the first operand that is on one."""
        found = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(found, OnDevice):
            found.number = next((each.number for each in args if isinstance(each, OnDevice)), 0)
        return found

    def numpy(self, *, force: bool = False) -> Any:
        """Refused, as for a tensor of a device."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """A copy in host memory."""
        return self.as_subclass(torch.Tensor).clone()


class OnSecond(OnDevice):
    """A tensor of another device."""

    number = 1


def on_device(tensor: torch.Tensor, number: int = 0) -> OnDevice:
    """``tensor``, whose memory it shares, as one of a device."""
    found: OnDevice = tensor.as_subclass(OnSecond if number else OnDevice)
    return found


class _Stream:
    def __init__(self, told: list[tuple[Any, ...]], device: torch.device, name: str) -> None:
        self._told, self.device, self.name = told, device, name

    def record_event(self) -> _Event:
        event = _Event(self._told)
        event.record(self)
        return event

    def wait_event(self, event: _Event) -> None:
        self._told.append(("wait", self.name, event.after))

    def synchronize(self) -> None:
        self._told.append(("synchronize", self.name))


class _Event:
    after = ""

    def __init__(self, told: list[tuple[Any, ...]]) -> None:
        self._told = told

    def record(self, stream: _Stream) -> None:
        self.after = stream.name
        self._told.append(("record", stream.name))

    def synchronize(self) -> None:
        self._told.append(("reached", self.after))


class _Runtime:
    def __init__(self, told: list[tuple[Any, ...]]) -> None:
        self._told = told

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self._told.append(("pin", address, nbytes, flags))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        self._told.append(("unpin", address))
        return 0


class _Functions:
    """What stands in the place of functions of torch, and writes down what a device would be told."""

    foreach, to, resolve = torch._foreach_copy_, torch.Tensor.to, torch.Tensor.resolve_conj

    def __init__(self, told: list[tuple[Any, ...]]) -> None:
        self.told = told
        self.current: list[_Stream] = []
        self._numbers = iter(range(1_000_000))

    @property
    def _name(self) -> str | None:
        return self.current[-1].name if self.current else None

    def own_stream(self, device: Any = None) -> _Stream:
        return self._stream(f"side {next(self._numbers)}", device)

    def current_stream(self, device: Any = None) -> _Stream:
        return self.current[-1] if self.current else self._stream("training", device)

    def _stream(self, name: str, device: Any) -> _Stream:
        place = torch.device("cuda", 0 if device is None else torch.device(device).index or 0)
        return _Stream(self.told, place, f"{name} of {place}")

    @contextmanager
    def within(self, stream: _Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def copy(self, targets: Any, sources: Any, non_blocking: bool = False) -> None:
        self.told.append(("copy", self._name, len(targets), non_blocking))
        type(self).foreach(*([each.as_subclass(torch.Tensor) for each in tensors] for tensors in (targets, sources)))

    def resolved(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda and tensor.is_conj():
            self.told.append(("resolve", self._name))
        found: torch.Tensor = type(self).resolve(tensor)
        return found

    def moved(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.device) and args[0].type == "cuda":
            return on_device(tensor.clone())
        found: torch.Tensor = type(self).to(tensor, *args, **kwargs)
        return found

    def maker(self, real: Any) -> Any:
        """A function that makes tensors, on a device where it is told to."""

        def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            if pin_memory:
                self.told.append(("pinned",))
            is_there = device is not None and torch.device(device).type == "cuda"
            plain: torch.Tensor = real(*args, **kwargs, **({} if is_there or device is None else {"device": device}))
            return on_device(plain) if is_there else plain

        return make


@contextmanager
def pretended_cuda() -> Iterator[list[tuple[Any, ...]]]:
    """A block in which there are two devices; gives the list of what they are told.

    Entries: ``("record" | "synchronize" | "reached", stream)``, ``("wait", stream, stream waited for)``, ``("copy",
    stream or None, tensors, whether it may go on)``, ``("resolve", stream or None)``, ``("pin", address, nbytes,
    flags)``, ``("unpin", address)``, ``("pinned",)`` for memory that is made so.
    """
    told: list[tuple[Any, ...]] = []
    own = _Functions(told)
    with (
        patch.multiple(
            torch.cuda, Stream=own.own_stream, Event=lambda: _Event(told), current_stream=own.current_stream,
            stream=own.within, device=lambda _: nullcontext(), cudart=lambda: _Runtime(told), current_device=lambda: 0,
            get_device_capability=lambda _=None: (8, 0),
        ),
        patch.multiple(
            torch, _foreach_copy_=own.copy, empty=own.maker(torch.empty), empty_like=own.maker(torch.empty_like),
            tensor=own.maker(torch.tensor),
        ),
        # Functions, for only these become methods of tensors.
        patch.object(torch.Tensor, "to", lambda tensor, *args, **named: own.moved(tensor, *args, **named)),  # noqa: PLW0108
        patch.object(torch.Tensor, "resolve_conj", lambda tensor: own.resolved(tensor)),  # noqa: PLW0108
        patch.object(dist, "get_backend_config", lambda _=None: "cuda:nccl"),
    ):  # fmt: skip
        yield told
