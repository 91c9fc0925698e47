"""Functions that the commands below eval/ share: error messages, lists of integers, result files."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ssscale.errors import FAILED, INTERRUPTED, UNREAD, UserError
from ssscale.interrupt import raise_again, report
from ssscale.options import Command
from ssscale.train.files import replacing
from ssscale.unforeseen import describe, describe_os_error, output_unread, prepare_output


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one sentence, without the usage, which --help prints."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; --help lists all arguments\n")


@contextmanager
def sentences(command: Command | None = None) -> Iterator[None]:
    """Report errors of the block in one sentence on stderr and exit.

    A UserError, or an OSError such as a missing permission, exits with code 2. Any other exception exits with code 70,
    and its traceback is written to a file that the sentence names. Ctrl-C exits with code 130 after one line, and
    `COMMAND | head` with 141 once `head` has ended, without a word. With a command, --help prints its options.
    """
    prepare_output()
    try:
        raise_again()
        if command is not None:
            command.help_if_asked(sys.argv[1:])
        yield
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        report()
        sys.exit(INTERRUPTED)
    except Exception as error:
        if output_unread(error):
            sys.exit(UNREAD)
        refused = describe_os_error(error) if isinstance(error, OSError) else None
        said = f"error: {refused}" if refused else f"failed: {describe(error, Path(sys.argv[0]).stem or 'python')}"
        print(said, file=sys.stderr)
        sys.exit(2 if refused else FAILED)


def whole_numbers(text: str, flag: str, least: int = 1, most: int = 2**24) -> list[int]:
    """Parse comma-separated integers such as `1,2,3`.

    Raises UserError, which names `flag`, if one is not an integer or not in [least, most].
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} must be comma-separated integers, not {text!r}") from None
    if min(found) < least or max(found) > most:
        raise UserError(f"{flag} must be from {least} to {most}, not {text}")
    return found


def begun(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the result that an earlier call with the same settings wrote to the file, or else the settings.

    Raises UserError if the file is not JSON.
    """
    if file.is_file():
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is broken: {error}; remove it to start again") from None
        if isinstance(before, dict) and all(before.get(key) == value for key, value in settings.items()):
            return dict(before)
    return dict(settings)


def write(file: Path, result: dict[str, Any], indent: int | None = None) -> None:
    """Write a result to a JSON file. The file is replaced atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(result, indent=indent) + "\n", encoding="utf-8")
