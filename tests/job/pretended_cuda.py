"""Tensors that say they are on a CUDA device, and a ``torch.cuda`` that does what it is told as late as it may.

The elements are in host memory, so that kernels of the CPU move them. What a stream is told stays undone until somebody
waits for it, and is then done behind what that stream was to wait for: a wait that is missing shows in the elements.
All that is asked of streams, events and pages is written down too. For code that a machine without a GPU would
otherwise never run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

__all__ = ["OnDevice", "OnOther", "on_device", "pretended_cuda"]


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

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> OnDevice:
        """As torch copies from host memory: one run at once, what has gaps by a kernel that it does not wait for."""
        kept = source.clone()

        def spread() -> None:
            self.as_subclass(torch.Tensor).copy_(kept)

        stream = getattr(torch, self.device.type).current_stream(self.device)
        stream.do(spread, is_late=non_blocking or not self.is_contiguous())
        return self

    def numpy(self, *, force: bool = False) -> Any:
        """Refused, as for a tensor of a device."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """A copy in host memory."""
        return self.as_subclass(torch.Tensor).clone()


class OnSecond(OnDevice):
    """A tensor of another device."""

    number = 1


class OnOther(OnDevice):
    """A tensor of a device that is none of CUDA's."""

    @property
    def is_cuda(self) -> bool:
        """False."""
        return False

    @property
    def device(self) -> torch.device:
        """The device it says it is on."""
        return torch.device("xpu", 0)


def on_device(tensor: torch.Tensor, number: int = 0) -> OnDevice:
    """``tensor``, whose memory it shares, as one of a device."""
    found: OnDevice = tensor.as_subclass(OnSecond if number else OnDevice)
    return found


class _Stream:
    """Does what it is told when it must."""

    def __init__(self, told: list[tuple[Any, ...]], device: torch.device, name: str) -> None:
        self._told, self.device, self.name = told, device, name
        self._undone: deque[Callable[[], object]] = deque()
        self._n_done = 0
        self._lock = threading.RLock()

    @property
    def n_told(self) -> int:
        return self._n_done + len(self._undone)

    def do(self, step: Callable[[], object], *, is_late: bool = True) -> None:
        with self._lock:
            self._undone.append(step)
            if not is_late:
                self.reach(self.n_told)

    def reach(self, number: int) -> None:
        with self._lock:
            while self._n_done < number:
                self._undone.popleft()()
                self._n_done += 1

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event(self._told)
        event.record(self)
        return event

    def wait_event(self, event: _Event) -> None:
        self._told.append(("wait", self.name, event.after))
        self.do(event.reach)

    def synchronize(self) -> None:
        self._told.append(("synchronize", self.name))
        self.reach(self.n_told)


class _Event:
    after = ""

    def __init__(self, told: list[tuple[Any, ...]]) -> None:
        self._told = told
        self.reach: Callable[[], object] = lambda: None

    def record(self, stream: _Stream) -> None:
        self.after, number = stream.name, stream.n_told
        self.reach = lambda: stream.reach(number)
        self._told.append(("record", stream.name))

    def synchronize(self) -> None:
        self._told.append(("reached", self.after))
        self.reach()


class _Runtime:
    """CUDA's functions; the last error stays until a kernel asks for it."""

    def __init__(self, told: list[tuple[Any, ...]], pin_error: int) -> None:
        self._told, self._pin_error = told, pin_error
        self.last_error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self._told.append(("pin", address, nbytes, flags))
        self.last_error = self._pin_error
        return self._pin_error

    def run_kernel(self, *_: Any, **__: Any) -> torch.Tensor:
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")
        return on_device(torch.empty(1).fill_(0))

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        self._told.append(("unpin", address))
        return 0


class _Functions:
    """What stands in the place of functions of torch, and writes down what a device would be told."""

    foreach, to, resolve = torch._foreach_copy_, torch.Tensor.to, torch.Tensor.resolve_conj

    def __init__(self, told: list[tuple[Any, ...]], *, locks_pages: bool) -> None:
        self.told, self._locks_pages = told, locks_pages
        self._within = threading.local()
        self._known: dict[str, _Stream] = {}
        self._numbers = iter(range(1_000_000))

    @property
    def current(self) -> list[_Stream]:
        """Streams whose blocks this thread is in."""
        found: list[_Stream] = self._within.__dict__.setdefault("streams", [])
        return found

    @property
    def _name(self) -> str | None:
        return self.current[-1].name if self.current else None

    def own_stream(self, device: Any = None) -> _Stream:
        return self._stream(f"side {next(self._numbers)}", device)

    def current_stream(self, device: Any = None) -> _Stream:
        """Training has a stream of its own, for which that of another thread does not wait."""
        is_training = threading.current_thread() is threading.main_thread()
        return self.current[-1] if self.current else self._stream("training" if is_training else "default", device)

    def _stream(self, name: str, device: Any) -> _Stream:
        place = torch.device("cuda", 0 if device is None else torch.device(device).index or 0)
        return self._known.setdefault(f"{name} of {place}", _Stream(self.told, place, f"{name} of {place}"))

    @contextmanager
    def within(self, stream: _Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def copy(self, targets: Any, sources: Any, non_blocking: bool = False) -> None:
        self.told.append(("copy", self._name, len(targets), non_blocking))
        plain = [[each.as_subclass(torch.Tensor) for each in tensors] for tensors in (targets, sources)]
        if self.current:
            self.current[-1].do(lambda: type(self).foreach(*plain), is_late=non_blocking)
        else:
            type(self).foreach(*plain)

    def resolved(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_cuda and tensor.is_conj()):
            found: torch.Tensor = type(self).resolve(tensor)
            return found
        self.told.append(("resolve", self._name))
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        plain = tensor.as_subclass(torch.Tensor)
        self.current_stream(tensor.device).do(lambda: made.copy_(plain))
        return on_device(made, tensor.device.index)

    def moved(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.device) and args[0].type == "cuda":
            return on_device(tensor.clone())
        found: torch.Tensor = type(self).to(tensor, *args, **kwargs)
        return found

    def maker(self, real: Any, kernel: Any = None) -> Any:
        """A function that makes tensors, on a device where it is told to, there by ``kernel`` if given."""

        def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            if pin_memory:
                self.told.append(("pinned",))
                if not self._locks_pages:
                    raise RuntimeError("CUDA error: out of memory")
            is_there = device is not None and torch.device(device).type == "cuda"
            if is_there and kernel is not None:
                return kernel()
            plain: torch.Tensor = real(*args, **kwargs, **({} if is_there or device is None else {"device": device}))
            return on_device(plain) if is_there else plain

        return make


@contextmanager
def pretended_cuda(*, pin_error: int = 0, locks_pages: bool = True) -> Iterator[list[tuple[Any, ...]]]:
    """A block in which there are two devices, used by one thread that trains; gives the list of what they are told.

    ``torch.cuda.current_stream(device).do(function)`` is a kernel of a test's training. Locking pages fails with
    ``pin_error``, if one is given; without ``locks_pages`` no memory is made that has them locked.

    Entries: ``("record" | "synchronize" | "reached", stream)``, ``("wait", stream, stream waited for)``, ``("copy",
    stream or None, tensors, whether it may go on)``, ``("resolve", stream or None)``, ``("pin", address, nbytes,
    flags)``, ``("unpin", address)``, ``("pinned",)`` for memory that is made so, or would be.
    """
    told: list[tuple[Any, ...]] = []
    own, runtime = _Functions(told, locks_pages=locks_pages), _Runtime(told, pin_error)
    with (
        patch.multiple(
            torch.cuda, Stream=own.own_stream, Event=lambda blocking=False: _Event(told), stream=own.within,
            current_stream=own.current_stream, device=lambda _: nullcontext(), cudart=lambda: runtime,
            current_device=lambda: 0, get_device_capability=lambda _=None: (8, 0),
        ),
        patch.multiple(
            torch.xpu, current_stream=own.current_stream, synchronize=lambda: own.current_stream().synchronize(),
        ),
        patch.multiple(
            torch, _foreach_copy_=own.copy, empty=own.maker(torch.empty), empty_like=own.maker(torch.empty_like),
            tensor=own.maker(torch.tensor), zeros=own.maker(torch.zeros, kernel=runtime.run_kernel),
        ),
        # Functions, for only these become methods of tensors.
        patch.object(torch.Tensor, "to", lambda tensor, *args, **named: own.moved(tensor, *args, **named)),  # noqa: PLW0108
        patch.object(torch.Tensor, "resolve_conj", lambda tensor: own.resolved(tensor)),  # noqa: PLW0108
        patch.object(dist, "get_backend_config", lambda _=None: "cuda:nccl"),
    ):  # fmt: skip
        yield told
