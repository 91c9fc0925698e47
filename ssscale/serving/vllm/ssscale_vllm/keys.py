"""Strict reading of config.json: each key is used, is known not to matter for inference, or is refused."""

from __future__ import annotations

from typing import Any

NUMBER = (int, float)


class Keys:
    """A section of config.json from which each key is taken once. `done` refuses the keys that are left.

    path: the section's name in error messages. All errors are ValueErrors of one sentence.
    """

    def __init__(self, path: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise ValueError(f"config.json: {path} must be a section, not {values!r}")
        self.path, self.left = path, dict(values)

    def named(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def take(self, key: str, *kinds: Any) -> Any:
        """Returns the value of a key that must be there and of one of the types; None stands for a null."""
        if key not in self.left:
            raise ValueError(
                f"config.json has no {self.named(key)}: export the model again with this version of ssscale"
            )
        value = self.left.pop(key)
        types = tuple(t for kind in kinds for t in (kind if isinstance(kind, tuple) else (kind,)) if t is not None)
        # bool is a subclass of int
        fits = type(value) in types or (value is None and None in kinds)
        if not fits:
            raise ValueError(f"config.json: {self.named(key)}={value!r} is not understood")
        return value

    def section(self, key: str) -> Keys:
        return Keys(self.named(key), self.take(key, dict))

    def skip(self, *names: str) -> None:
        """Drops keys that matter only in training."""
        for name in names:
            self.left.pop(name, None)

    def done(self) -> None:
        if self.left:
            key, value = next(iter(self.left.items()))
            raise ValueError(f"config.json: {self.named(key)}={value!r} is not known to this vLLM plugin")
