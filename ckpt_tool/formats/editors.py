"""Which formats can be edited without moving their payload; modules are imported on first use."""

from __future__ import annotations

from importlib import import_module

from ckpt_tool.formats.edited import Editor

__all__ = ["editor", "editor_names"]

_EDITORS = {
    "safetensors": "ckpt_tool.formats.safetensors.editor",
    "safetensors-index": "ckpt_tool.formats.safetensors.editor",
    "dcp": "ckpt_tool.formats.dcp.editor",
}


def editor(format: str) -> Editor | None:
    """The editor of a format, None where there is none."""
    module = _EDITORS.get(format)
    if module is None:
        return None
    found: Editor = import_module(module).EDITOR
    return found


def editor_names() -> tuple[str, ...]:
    """Formats that have one."""
    return tuple(_EDITORS)
