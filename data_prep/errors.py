"""The exception for mistakes that the user can correct. The command prints its message and exits with code 2."""


class DataError(Exception):
    """Bad input or output. The message is one sentence that names the file, line or flag."""
