"""Real text that every machine with Python has: the standard library's code, and its documentation.

`stdlib:code`: one document a module of the standard library, docstrings taken out (they are the other source's).
`stdlib:docs`: one document for the docstrings of each module, each topic of the language reference that `help()` shows,
the interpreter's licence, and each README (METADATA) and licence text of the installed packages. Licences repeat one
another: a paragraph that a text before it had is left out, so that no held-out document has its twin in training.

Order: modules by path, then topics by name, then the licence, then packages by path. What is left out is data rather
than text or would drown the rest: tests, idlelib, the character tables of `encodings`.
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
    """The files that `stdlib:code` or `stdlib:docs` reads."""
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
    """The documents of `stdlib:code` or `stdlib:docs`, as UTF-8."""
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
    """A module's code without docstrings, and its docstrings."""
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules' invalid escapes
            statements = list(_docstrings(ast.parse(source)))
    except SyntaxError:  # a few modules are templates or of another version
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
    """The docstring statements of a module and of everything defined in it, in order. Expressions hold none."""
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
