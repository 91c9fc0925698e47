"""Real text that exists on every machine with Python: code and documentation of the standard library.

`stdlib:code` has one document per module of the standard library, without docstrings, which belong to the other source.
`stdlib:docs` has one document for the docstrings of each module, for each topic of the language reference that `help()`
shows, for the interpreter's licence, and for each README (METADATA) and licence of the installed packages. Licences
repeat one another, so paragraphs of an earlier text are left out. Otherwise held-out documents could have copies in the
training data.

Order: modules by path, topics by name, the licence, packages by path. Tests, idlelib and the character tables of
`encodings` are left out: they are data rather than text, or would dominate the rest.
"""

import ast
import inspect
import os
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path

from data_prep.errors import DataError

SCHEME = "stdlib:"
NAMES = ("code", "docs")
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "encodings", "pydoc_data"}
PACKAGE_TEXTS = ("METADATA", "LICENSE", "LICENCE", "COPYING", "NOTICE", "AUTHORS")


def files(pattern: str) -> list[str]:
    """Returns the files that `stdlib:code` or `stdlib:docs` reads. Raises DataError for another name."""
    name = pattern.removeprefix(SCHEME)
    if name not in NAMES:
        raise DataError(f"unknown source {pattern}: {SCHEME}code and {SCHEME}docs are known")
    modules = _modules()
    if not modules:
        raise DataError(f"no sources of the standard library in {_library()}")
    if name == "code":
        return [str(path) for path in modules]
    return [str(path) for path in (*modules, *_library_texts(), *_package_texts())]


def documents(pattern: str) -> Iterator[bytes]:
    """Yields the documents of `stdlib:code` or `stdlib:docs` as UTF-8."""
    code = pattern.removeprefix(SCHEME) == "code"
    for path in _modules():
        without_docstrings, docstrings = _parts(path)
        yield (without_docstrings if code else docstrings).encode()
    if not code:
        yield from _topics()
        yield from _texts()


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _modules() -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(_library()):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT and not name.startswith("config-")]
        found += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfig")]
    return sorted(found)


@cache
def _parts(path: Path) -> tuple[str, str]:
    """Returns the code of a module without docstrings, and its docstrings."""
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            statements = list(_docstrings(ast.parse(source)))
    except SyntaxError:  # a few modules are templates or of another Python version
        return "", ""
    lines = source.splitlines(keepends=True)
    texts = []
    for statement in statements:
        assert isinstance(statement.value, ast.Constant)
        assert isinstance(statement.value.value, str)
        texts.append(inspect.cleandoc(statement.value.value))
        for line in range(statement.lineno - 1, statement.end_lineno or statement.lineno):
            lines[line] = ""
    return "".join(lines), "\n\n".join(text for text in texts if text)


def _docstrings(node: ast.AST) -> Iterator[ast.Expr]:
    """Yields the docstring statements of a module and its definitions, in order. Expressions cannot contain any."""
    body = getattr(node, "body", [])
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        first = body[0] if body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield first
    for block in (body, *(getattr(node, name, []) for name in ("handlers", "orelse", "finalbody"))):
        for child in block if isinstance(block, list) else []:
            yield from _docstrings(child)


def _topics() -> Iterator[bytes]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return
    for name in sorted(topics):
        yield str(topics[name]).encode()


def _library_texts() -> list[Path]:
    return [path for path in (_library() / "LICENSE.txt", _library() / "pydoc_data" / "topics.py") if path.is_file()]


def _package_texts() -> list[Path]:
    packages = Path(sysconfig.get_path("purelib"))
    found = [path for path in packages.glob("*.dist-info/**/*") if path.name.upper().startswith(PACKAGE_TEXTS)]
    return sorted(path for path in found if path.is_file())


def _texts() -> Iterator[bytes]:
    seen: set[bytes] = set()
    for path in [path for path in _library_texts() if path.suffix == ".txt"] + _package_texts():
        data = path.read_bytes().replace(b"\r\n", b"\n")
        if path.name == "METADATA":
            data = data.partition(b"\n\n")[2]  # the README follows the header
        new = []
        for paragraph in data.split(b"\n\n"):
            key = blake2b(b" ".join(paragraph.split())).digest()
            if key not in seen:
                seen.add(key)
                new.append(paragraph)
        yield b"\n\n".join(new).decode("utf-8", errors="replace").encode()
