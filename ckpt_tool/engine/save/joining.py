"""Ranks find each other once: every rank learns where its parent in the control tree listens.

Three small collectives of the process group, at the first save of a job; none afterwards.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any

import torch.distributed as dist

from ckpt_tool.engine.distributed_group import Group
from ckpt_tool.engine.save.links import Place
from ckpt_tool.engine.save.tree import control_tree

__all__ = ["current_group", "join"]


def current_group(process_group: Any) -> Any:
    """The group that is meant: the one given, else that of all ranks; None without torch.distributed."""
    if process_group is not None or not (dist.is_available() and dist.is_initialized()):
        return process_group
    return dist.group.WORLD


def join(group: Group) -> tuple[Place, socket.socket | None]:
    """This rank's place in the tree, and the socket that its children will call; None where there are none."""
    if group.size == 1:
        return Place(0, 1, None, None, (), secrets.token_hex(16)), None
    token = group.share(lambda: secrets.token_hex(16).encode()).decode()
    hosts = group.gather_texts(f"{socket.gethostname()}/{_boot_id()}")
    tree = control_tree(hosts)
    children = tree.children(group.rank)
    listener = None
    address = ""
    if children:
        is_alone = len(set(hosts)) == 1
        listener = socket.socket()
        listener.bind(("127.0.0.1" if is_alone else "", 0))
        listener.listen(len(children) + 8)
        address = f"{'127.0.0.1' if is_alone else _own_address()}:{listener.getsockname()[1]}"
    addresses = group.gather_texts(address)
    parent = int(tree.parent[group.rank])
    parent_address = None
    if parent >= 0:
        host, _, port = addresses[parent].rpartition(":")
        parent_address = (host, int(port))
    place = Place(group.rank, group.size, parent if parent >= 0 else None, parent_address, tuple(children), token)
    return place, listener


def _boot_id() -> str:
    """Tells hosts of one name apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _own_address() -> str:
    """The address at which other hosts reach this one: that of the way to the job's master, where it names one."""
    master = os.environ.get("MASTER_ADDR", "")
    for target in (master, socket.gethostname()):
        try:
            found = socket.getaddrinfo(target, 9, socket.AF_INET, socket.SOCK_DGRAM) if target else []
            for _, _, _, _, place in found:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    probe.connect(place)  # sends nothing: asks for the route
                    own: str = probe.getsockname()[0]
                    if not own.startswith("127."):
                        return own
        except OSError:  # noqa: PERF203 - one of two names at most
            continue
    return socket.gethostbyname(socket.gethostname())
