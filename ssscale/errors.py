"""The one exception that means: the user can mend this. `launch/` prints its sentence and exits with code 2."""


class UserError(Exception):
    """Bad input. The message is one sentence that names the key, file or rank."""
