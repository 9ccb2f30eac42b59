"""The table of contents of the commands, and how a call of one ends.

A command's module is imported when its name is typed, and imports the api inside its function, so that ``ckpt --help``
loads neither numpy nor pyarrow nor fsspec. Help is plain text: typer's rich help takes 90 ms more to load.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ckpt_tool.cli.failures import interruptions, reported
from ckpt_tool.cli.traffic import traffic_shown
from ckpt_tool.errors import UsageError

__all__ = ["COMMANDS", "app"]

_SETTINGS = {"help_option_names": ["-h", "--help"]}

COMMANDS = ("inspect", "ls", "verify", "diff", "reshard", "export", "edit", "cat", "plan", "clean", "formats")
"""In the order in which help lists them: the function ``inspect`` of the module ``ckpt_tool.cli.inspect`` ..."""


_NEGATIVE = re.compile(r"-\d")
_MANY = 25
"""Arguments and options of a command that are too many for one list."""


class Command(TyperCommand):
    """A command. No option begins with a digit, so that a negative number is an argument."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List arguments and options; many options under their headings, in the order in which these first occur."""
        listed = [(each, record) for each in self.get_params(ctx) if (record := each.get_help_record(ctx)) is not None]
        has_many = len(listed) > _MANY
        sections: dict[str, list[Any]] = {}
        for each, record in listed:
            heading = getattr(each, "rich_help_panel", None) if has_many else None
            heading = "Arguments" if each.param_type_name == "argument" else heading or "Options"
            sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, negative numbers taken as arguments where no option takes them."""
        valued = {name for each in self.params if not getattr(each, "is_flag", False) for name in each.opts}
        numbers = [at for at, text in enumerate(args) if _NEGATIVE.match(text) and not (at and args[at - 1] in valued)]
        if numbers and "--" not in args:
            others = [text for at, text in enumerate(args) if at not in numbers]
            args = [*others, "--", *(args[at] for at in numbers)]
        try:
            found: list[str] = super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:  # an option without its value does not say whose it is
                error.ctx = ctx  # type: ignore[attr-defined]
            raise
        return found


class Commands(TyperGroup):
    """The group of all commands; whatever ends a call of one of them ends it as ``failures`` says."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the signature is click's
        """Names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name; its options are read from the function's signature.

        Raises:
            UsageError: no command has that name.
        """
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing or cmd_name.startswith("-"):
                return None
            import difflib

            near = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            hint = f"did you mean ckpt {near[0]}" if near else "ckpt --help"
            raise UsageError(f"no such command {cmd_name!r}", hint=hint)
        module = importlib.import_module(f"{__package__}.{cmd_name}")
        alone = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings=_SETTINGS)
        examples = "\n".join(f"  {example}" for example in module.EXAMPLES)
        alone.command(cmd_name, cls=Command, epilog=f"\b\nExamples:\n{examples}")(getattr(module, cmd_name))
        return typer.main.get_command(alone)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        with interruptions():
            return super().invoke(ctx)

    def main(self, args: Sequence[str] | None = None, *others: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run with the given arguments and exit with the status."""
        arguments = list(sys.argv[1:] if args is None else args)
        with reported(as_json="--json" in arguments), traffic_shown(arguments):
            status = super().main(arguments, *others, **{**extra, "standalone_mode": False})
            if not standalone_mode:
                return status
            sys.exit(status if isinstance(status, int) else 0)


app = typer.Typer(
    name="ckpt",
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings=_SETTINGS,
    epilog="""Start with ckpt inspect SRC. ckpt COMMAND --help shows the options of a command, and examples.

    Exit status: 0 fine, 1 problems found, 2 usage, 3 bad checkpoint or layout, 4 storage. NO_COLOR=1 prints without
    colour, CKPT_DEBUG=1 shows the traceback of an error.

    What --json prints says its schema, "ckpt-tool/NAME/1", as the help of a command tells it; later versions only add
    keys. Errors are {"schema": "ckpt-tool/error/1", "error": {kind, message, where, hint, exit_code}} on stderr.""",
)


def _show_version(value: bool) -> None:
    if value:
        package = sys.modules[__name__.partition(".")[0]]  # the metadata of the installed package takes 25 ms to read
        typer.echo(f"ckpt {package.__version__}")
        raise typer.Exit


@app.callback()
def ckpt(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look at, check, reshard and export training checkpoints of any framework, without the framework."""
