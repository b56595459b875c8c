"""What an outcome means to the shell: the exit codes, and the one table of exceptions."""

import os
import traceback
from dataclasses import dataclass

from rich.text import Text

from zckpt import errors
from zckpt.cli.output import stderr

FINE, DIFFERS, USAGE, CORRUPT = range(4)
CRASHED = 70
"""A bug, told apart from "differs" (Python itself would exit with 1); sysexits.h: EX_SOFTWARE."""
INTERRUPTED = 130
"""Ctrl-C, as a shell says it: 128 and the number of the signal."""

EXIT_CODES = (
    "Exit codes: 0 fine, 1 a check found a difference, 2 usage error, "
    "3 unreadable or corrupt checkpoint, 70 a bug in zckpt."
)


@dataclass(frozen=True, slots=True)
class Meaning:
    """What to exit with, and the next thing to do."""

    exit_code: int
    next_step: str


_MEANINGS: dict[type[Exception], Meaning] = {
    errors.NotACheckpointError: Meaning(
        CORRUPT,
        "name what the command reads (zckpt COMMAND --help): a ZeRO folder and its --tag, a folder "
        "of zckpt or Hugging Face, or a .safetensors file",
    ),
    errors.ManifestVersionError: Meaning(CORRUPT, "pip install --upgrade zckpt"),
    errors.UnsafePickleError: Meaning(
        CORRUPT, "ask who made the file; --allow-global NAME is for calls of your own training code"
    ),
    errors.MissingParametersError: Meaning(
        CORRUPT, "save_consolidated saves them from the live model; else use the option above"
    ),
    errors.CorruptCheckpointError: Meaning(
        CORRUPT,
        "take another copy, or of a ZeRO folder another --tag; of a folder of safetensors "
        "zckpt verify PATH says all that is wrong",
    ),
    errors.SpecMismatchError: Meaning(DIFFERS, "zckpt inspect PATH shows what a checkpoint holds"),
    errors.TargetExistsError: Meaning(
        USAGE, "name another folder, or replace a checkpoint with --overwrite"
    ),
    errors.NoSpaceError: Meaning(USAGE, "make room, or name a folder on another disk"),
    errors.MissingExtraError: Meaning(USAGE, "install it beside zckpt and try again"),
    errors.UnsupportedError: Meaning(USAGE, "the message says what would work instead"),
    errors.UsageError: Meaning(USAGE, "zckpt COMMAND --help has the options and examples"),
    errors.ZckptError: Meaning(USAGE, "ZCKPT_TRACEBACK=1 in the environment shows where"),
    PermissionError: Meaning(CORRUPT, "get permission for what is named above"),
    OSError: Meaning(CORRUPT, "the system said so; see to it and try again"),
}
"""The first row that an exception is an instance of counts. All others are bugs: a traceback and
`CRASHED`."""

KNOWN = tuple(_MEANINGS)


def report(error: Exception) -> int:
    """Print a known exception with the next thing to do to stderr, and return the exit code."""
    meaning = next(row for kind, row in _MEANINGS.items() if isinstance(error, kind))
    if os.environ.get("ZCKPT_TRACEBACK") == "1":
        traceback.print_exception(error)
    console = stderr()
    console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
    console.print(Text.assemble(("next:  ", "bold"), meaning.next_step), soft_wrap=True)
    return meaning.exit_code
