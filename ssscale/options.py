"""The `key=value` arguments that a command takes for itself."""

from collections.abc import Mapping
from typing import Any

from ssscale.errors import UserError


def take_options(argv: list[str], options: Mapping[str, type]) -> tuple[dict[str, Any], list[str]]:
    """Split `key=value ...` into the command's own options, as int, float or str, and what `load_config` reads.

    Options that are absent from argv are absent from the dictionary. Raises UserError.
    """
    taken: dict[str, Any] = {}
    rest: list[str] = []
    for argument in argv:
        key, equals, text = argument.partition("=")
        if not equals or key not in options:
            rest.append(argument)
            continue
        try:
            taken[key] = options[key](text)
        except ValueError:
            expected = {int: "a whole number", float: "a number"}.get(options[key], "text")
            raise UserError(f"{key} must be {expected}, not {text!r}") from None
    return taken, rest
