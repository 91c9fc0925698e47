"""The one exception that means: the user can mend this. The command prints its sentence and exits with code 2."""


class DataError(Exception):
    """Bad input or output. The message is one sentence that names the file, line or flag."""
