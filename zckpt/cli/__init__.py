"""The command line, one file a verb: a typed function that calls one verb and prints.

Not here: checkpoint logic, and imports of verbs. Each command imports its verb when it runs, so
that `zckpt --help` imports neither torch nor deepspeed. Commands catch nothing; `errors` says what
an exception means to the shell.
"""

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from zckpt import __version__
from zckpt.cli import convert, demo, diff, inspect, verify
from zckpt.cli.errors import CRASHED, EXIT_CODES, KNOWN, report

app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for _verb in (convert, inspect, verify, diff, demo):
    app.command(
        _verb.__name__.rpartition(".")[2],
        epilog="\n\n".join(("Examples:", *_verb.EXAMPLES, EXIT_CODES)),
    )(_verb.command)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"zckpt {__version__}")
        raise typer.Exit


@app.callback(epilog=EXIT_CODES)
def _zckpt(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """DeepSpeed ZeRO-3 checkpoints as plain safetensors, with proof that it is the same model."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code; `arguments` stand in for `sys.argv[1:]`."""
    try:
        app(arguments, prog_name="zckpt")
    except KNOWN as error:
        sys.exit(report(error))
    except Exception as error:  # noqa: BLE001 -- printed whole
        traceback.print_exception(error)
        sys.exit(CRASHED)
