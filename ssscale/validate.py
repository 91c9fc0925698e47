"""Combinations that cannot run, each with a sentence that says what would. `ssscale.config` has checked the types before."""

from ssscale.errors import UserError
from ssscale.schema import Config


def validate(config: Config, world_size: int | None = None, gpu: bool = False) -> None:
    """Raise UserError on the first impossible combination."""
