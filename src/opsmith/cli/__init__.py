"""The command line: one file per verb, imported only when its verb is called."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from textwrap import shorten
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

# Verb to the line that `opsmith --help` shows, so that help needs none of the modules (and no torch).
VERBS = {
    "demo": "A real model, made faster and proved equal.",
    "optimize": "Make a local Hugging Face model faster.",
    "evaluate": "What a format takes from a model's predictions of a text.",
    "profile": "Where a model's time goes, and what to do.",
    "ops": "Operators, and what computes them here.",
    "doctor": "The machine, and what is amiss with it.",
    "new": "A project for an operator, from its prototype.",
    "verify": "Hold operators to their definition.",
    "build": "Compile the kernels of a project, or pack them into a wheel.",
    "bench": "Verify operators, then time them.",
    "demo-llm": "A real decoder, made faster and proved equal.",
    "bench-llm": "Tokens a second of a decoder, beside other ways to run it.",
}


class CommandError(Exception):
    """An error whose message is complete in itself: what is wrong, and the next step."""


class _Verbs(TyperGroup):
    """Knows every verb by its line of help, and imports a verb's module when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=VERBS[cmd_name]) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, _load(str(name)) if command else None, rest


def _load(verb: str) -> Any:
    """The command behind a verb: the function `run` of the module of that name."""
    module = importlib.import_module(f"opsmith.cli.{verb.replace('-', '_')}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(verb)(module.run)
    return typer.main.get_command(app)


app = typer.Typer(
    cls=_Verbs,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        from opsmith.version import VERSION

        print(f"opsmith {VERSION}")
        raise typer.Exit


@app.callback()
def opsmith(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
    ),
    debug: bool = typer.Option(
        False, "--debug", help="Show the traceback of an error (works behind a verb too)."
    ),
) -> None:
    """Fused operators for language models, and the compiler that puts them into your model.

    Example: opsmith doctor
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 for success, 1 with one line on stderr otherwise."""
    # PyTorch's profiler, which counts memory for `bench`, would say on stderr that it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Where a locale has no × or µ, better another character than none.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = _join_json([arg for arg in args if arg != "--debug"])
    args = args or ["--help"]
    try:
        status = typer.main.get_command(app).main(args, prog_name="opsmith", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        print("opsmith: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has left; what Python would still flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        print(f"opsmith: {_one_line(error)}", file=sys.stderr)
        return 1
    return status if isinstance(status, int) else 0


def _join_json(args: list[str]) -> list[str]:
    """Give a bare `--json` its value: the file behind it, where that looks like one, else "-" for stdout.

    Operator names have neither dot nor slash, so `verify --json softmax` and `verify --json out.json` both
    mean what they say.
    """
    joined: list[str] = []
    for arg in args:
        is_file = arg == "-" or (not arg.startswith("-") and any(c in arg for c in "./"))
        if is_file and joined[-1:] == ["--json"]:
            joined[-1] = f"--json={arg}"
        else:
            joined.append(arg)
    return ["--json=-" if arg == "--json" else arg for arg in joined]


def _one_line(error: Exception) -> str:
    """What is wrong and what to do next, without line breaks."""
    if hasattr(error, "format_message"):  # a usage error: an unknown verb, option or value
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "opsmith"
        text = f"{error.format_message().rstrip('.')}; see `{where} --help`"
    elif isinstance(error, CommandError):
        text = str(error)
    else:
        message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        text = f"{shorten(message, 400) or type(error).__name__} (--debug shows the traceback)"
    # What a file says may come with it, and must not speak to the terminal.
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
