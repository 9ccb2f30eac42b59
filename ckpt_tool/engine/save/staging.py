"""Staging copies what a rank holds into an arena, in one fused call, each tensor in the order of its own memory.

On CUDA devices the copies run on streams of their own into pinned memory, and ``wait`` waits for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from ckpt_tool.engine.save.arena import Arena, arrange
from ckpt_tool.engine.save.assignment import Assigned
from ckpt_tool.engine.save.columns import HeldState, Names
from ckpt_tool.engine.save.commands import Structure
from ckpt_tool.manifest.model import KeyPath

__all__ = ["Stager", "dense_strides", "pin", "structure_of"]

_COPIED = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
    | {torch.int8, torch.int16, torch.complex64, torch.complex128}
)
"""Types that every copy kernel knows; others are copied as integers of their width."""
_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable
_BY_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def structure_of(
    tensors: Sequence[tuple[KeyPath, str, tuple[int, ...]]],
    boxes: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]],
    views: Sequence[torch.Tensor],
    objects: Sequence[KeyPath],
    format: str,
) -> Structure:
    """The columns of what a rank holds, with a fingerprint of all of them and of the format, by which they are shared.

    Args:
        tensors: path, dtype and global shape of each tensor.
        boxes: row of ``tensors``, offsets and sizes of each box.
        views: its elements.
        objects: path of each object.
        format: of the save.
    """
    names = Names(
        tuple(path for path, _, _ in tensors),
        tuple(dtype for _, dtype, _ in tensors),
        tuple(shape for _, _, shape in tensors),
        tuple(objects),
    )
    held = HeldState.of(names, [row for row, _, _ in boxes], [(start, extent) for _, start, extent in boxes])
    strides = {row: each for row, view in enumerate(views) if (each := dense_strides(view)) is not None}
    encoded = names.encoded()
    digest = hashlib.blake2b(encoded, digest_size=16, person=format.encode()[:16])
    digest.update(held.encoded())
    digest.update(repr(sorted(strides.items())).encode())
    return Structure(digest.hexdigest(), held, encoded, strides)


def dense_strides(view: torch.Tensor) -> tuple[int, ...] | None:
    """Strides in which ``view`` is copied front to back; None for row-major order, also where it has gaps.

    >>> dense_strides(torch.zeros(2, 3).t()), dense_strides(torch.zeros(4, 4)[:, :2])
    ((1, 3), None)
    """
    if view.is_contiguous():
        return None
    expected = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return tuple(view.stride())


def pin(arena: Arena, views: Sequence[torch.Tensor]) -> None:
    """Lock an arena's pages, without which copies from a CUDA device are slow, if some of ``views`` lie on one."""
    device = next((view.device for view in views if view.is_cuda), None)
    if arena.release is not None or device is None:
        return
    address = torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr()
    with torch.cuda.device(device):  # which has a context already; where none is set, the first one would get another
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(address, arena.nbytes, _FOR_ALL_DEVICES)) == 0:
            arena.release = lambda: runtime.cudaHostUnregister(address)
            return
        # The runtime keeps the error until somebody asks for the last one, as the training's next kernel would, and
        # torch would blame that. A kernel of our own takes it; the arena stays as it is, and copies take longer.
        with suppress(RuntimeError):
            torch.zeros(1, device=device).fill_(1)


class Stager:
    """Places for the same boxes in one arena, made ready once; holds no tensor of the state between two copies."""

    def __init__(
        self, views: Sequence[torch.Tensor], structure: Structure, assigned: Assigned | None, arena: Arena
    ) -> None:
        """Places for what is ``assigned``, for all boxes where that is not known yet."""
        held = structure.held
        boxes = held if assigned is None else assigned.boxes
        rows = np.arange(len(held)) if assigned is None else assigned.rows
        offsets, self.nbytes = arrange(boxes.nbytes)
        starts, is_part = boxes.offsets - held.offsets[rows], (boxes.sizes != held.sizes[rows]).any(axis=1)
        self._rows: list[int] = []
        self._cuts: list[tuple[slice, ...] | None] = []
        places: list[tuple[int, torch.Tensor, tuple[int, ...] | None]] = []
        for number, (row, offset) in enumerate(zip(rows.tolist(), offsets.tolist(), strict=True)):
            source, cut = views[row], None
            if is_part[number]:
                pairs = zip(starts[number].tolist(), boxes.sizes[number].tolist(), strict=True)
                cut = tuple(slice(start, start + size) for start, size in pairs)[: source.ndim]
                source = source.detach()[cut]
            if not source.numel():
                continue
            self._rows.append(row)
            self._cuts.append(cut)
            places.append((offset, source, structure.order_of(row, source.shape)))
        with torch.inference_mode(mode=False):  # what is made in that mode cannot be filled again outside of it
            memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
            self._targets = [_place(memory, *each) for each in places]
        self._before: dict[torch.device, Any] = {}
        self._events: list[Any] = []
        self._held: list[torch.Tensor] = []

    def begin(self, views: Sequence[torch.Tensor]) -> None:
        """Note what devices have been told so far; called by the thread that trains, right before ``start``."""
        devices = {view.device for view in views if view.device.type != "cpu"}
        self._before = {}
        for device in devices:
            if device.type == "cuda":
                self._before[device] = torch.cuda.current_stream(device).record_event()
            else:  # the copies are told to another thread's stream, and wait for nothing
                getattr(torch, device.type).synchronize()

    def start(self, views: Sequence[torch.Tensor]) -> None:
        """Copy ``views``, one per box of the structure; on CUDA devices the copies are only begun.

        When it fails, none is under way any more.
        """
        try:
            self._start(views)
        except BaseException:
            self.wait()  # another save may be given the arena next
            raise

    def _start(self, views: Sequence[torch.Tensor]) -> None:
        if not self._rows:
            return
        pairs: dict[torch.device | None, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        with torch.no_grad():
            for row, cut, target in zip(self._rows, self._cuts, self._targets, strict=True):
                source = views[row] if cut is None else views[row][cut]
                targets, sources = pairs.setdefault(source.device if source.is_cuda else None, ([], []))
                targets.append(target)
                sources.append(source)
            for device, (targets, sources) in pairs.items():
                if device is not None:
                    self._start_on(device, targets, sources)
            if None in pairs:  # last: devices copy meanwhile
                targets, sources = pairs[None]
                torch._foreach_copy_(targets, _plain(sources))

    def _start_on(self, device: torch.device, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Begin the copies from one device, behind all that its stream had been told before."""
        stream = torch.cuda.Stream(device)
        if device in self._before:
            stream.wait_event(self._before[device])
        with torch.cuda.device(device), torch.cuda.stream(stream):
            sources = _plain(sources)  # here, for what is conjugated is so by a kernel of this stream
            self._held += sources  # their memory is not to be used again before the copies end
            try:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            finally:  # some may be under way when another has failed
                self._events.append(stream.record_event(torch.cuda.Event(blocking=True)))

    def wait(self) -> None:
        """Return when the copies are there; sleeps meanwhile, so that no core is taken from who feeds the devices."""
        for event in self._events:
            event.synchronize()
        self._events, self._held = [], []


def _place(memory: torch.Tensor, offset: int, source: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """Memory for the bits of ``source`` from byte ``offset`` on, of its shape; in row-major order unless told."""
    kind = source.dtype if source.dtype in _COPIED else _BY_WIDTH[source.element_size()]
    flat = memory[offset : offset + source.nbytes].view(kind)
    return flat.view(source.shape) if strides is None else flat.as_strided(source.shape, strides)


def _plain(sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that every copy kernel knows, of the same bits."""
    return [source if source.dtype in _COPIED and not source.is_conj() else _bits(source) for source in sources]


def _bits(source: torch.Tensor) -> torch.Tensor:
    source = source.resolve_conj()
    return source if source.dtype in _COPIED else source.view(_BY_WIDTH[source.element_size()])
