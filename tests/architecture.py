"""What CONTRIBUTING.md promises about the sources, read from their syntax trees: nothing of ours is imported.

`python -m tests.architecture` prints what breaks a rule, in the form of tests/known_offenders.txt.
"""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = "ssscale_kernels"  # the name by which kernels/ is imported
# From the top down: each may import what stands below it.
LAYERS = ("slurm", "launch", "eval", "ssscale", KERNELS)
SHARED = {"ssscale.data.streaming_patches", "ssscale.data.zstd"}  # by data_prep, which imports nothing else of ours
MIXERS = ("softmax", "ssmax", "stickbreaking")
SUITES = ["stickbreaking_paper"]  # of tasks
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
BIRTH = ("__init__", "__post_init__", "__new__")
HOMES = {"deepspeed": "ssscale/engine/", "megatron": "ssscale/parallel/megatron_patches.py"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class File:
    """One source file. path: from the root, with slashes; module: its dotted name, a package's without `.__init__`."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.is_package = path.endswith("/__init__.py")
        parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
        self.top = parts[0]
        self.module = ".".join([KERNELS if parts[0] == "kernels" else parts[0], *parts[1:]])

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def imports(self) -> list[tuple[str, str | None]]:
        """(module, name) of each import outside `if TYPE_CHECKING`; name is None for `import module`."""
        return [found for node in _run(self.tree) for found in self._imported(node)]

    def _imported(self, node: ast.AST) -> Iterator[tuple[str, str | None]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = self.module.split(".")[: None if self.is_package and node.level == 1 else -node.level]
                if self.is_package and node.level > 1:
                    above = self.module.split(".")[: 1 - node.level]
                base = ".".join([*above, *filter(None, [node.module])])
            yield from ((base, alias.name) for alias in node.names)


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _run(child)


class Sources:
    """The Python files of a checkout, tests apart."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        folders = ("slurm", "launch", "eval", "ssscale", "kernels", "data_prep", "tests")
        found = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
        self.all = [File(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in found]
        self.files = [file for file in self.all if file.top != "tests"]
        self.tests = [file for file in self.all if file.top == "tests"]
        self.run_files = [path.stem for path in (root / "configs").glob("*.yaml")]
        self.by_module = {file.module: file for file in self.all}

    def target(self, module: str, name: str | None) -> File | None:
        """The file that `from module import name` reads; None for one that is not ours."""
        return self.by_module.get(f"{module}.{name}") or self.by_module.get(module)


def directions(sources: Sources) -> Iterator[str]:
    """slurm → launch → eval → ssscale → kernels; ssscale.config and data_prep import nothing of ours, or SHARED only."""
    ours = {*LAYERS, "data_prep", "tests", "kernels"}
    for file in sources.files:
        for module, name in file.imports:
            if module.split(".")[0] in ours and not _may_import(file.module, module, f"{module}.{name}"):
                yield f"{file.path}: {module}"


def _may_import(importer: str, module: str, whole: str) -> bool:
    source, target = importer.split(".")[0], module.split(".")[0]
    if importer.startswith("ssscale.config"):
        return module.startswith("ssscale.config") or "ssscale.errors" in (module, whole)
    if source == "data_prep":
        return target == "data_prep" or not SHARED.isdisjoint((module, whole))
    if target == "data_prep":
        return source in LAYERS[:3]
    return target in LAYERS and LAYERS.index(source) <= LAYERS.index(target)


def circles(sources: Sources) -> Iterator[str]:
    """Files that import each other, directly or through others, at their tops or inside functions."""
    edges: dict[str, set[str]] = {}
    for file in sources.files:
        targets = (sources.target(*found) for found in file.imports)
        edges[file.path] = {target.path for target in targets if target is not None and target is not file}
    reached = {path: _reach(path, edges) for path in edges}
    seen: set[str] = set()
    for path in edges:
        if path in reached[path] and path not in seen:
            circle = sorted(other for other in reached[path] if path in reached.get(other, ()))
            seen.update(circle)
            yield " ".join(circle)


def _reach(path: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = [path]
    while todo:
        new = edges.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def mixer_names(sources: Sources) -> Iterator[str]:
    """A mixer's name, as an identifier or in a string that is no docstring, outside of the mixers' own files."""
    harmless = sources.run_files + SUITES
    for file in sources.files:
        if file.top not in ("ssscale", "launch", "slurm"):
            continue
        found = {name for word in _words(file.tree) for name in named(word, harmless)} - _own_names(file.path)
        if found:
            yield f"{file.path}: {' '.join(sorted(found))}"


def named(word: str, harmless: list[str]) -> set[str]:
    """The mixers that a word names: "ssmax_scale", "StickBreaking", "stick-breaking"; "config=1b_ssmax" is harmless."""
    for name in harmless:
        word = re.sub(rf"\b{name}\b", "", word)
    bare = re.sub(r"[-_\s]", "", word).lower().replace("logsoftmax", "")
    return {name for name in MIXERS if name in bare}


def _own_names(path: str) -> set[str]:
    """A mixer may build on another one, so that their files may name all."""
    if re.fullmatch(r"ssscale/(model|serving/vllm/ssscale_vllm)/mixers/(?!__init__|base)\w+\.py", path):
        return set(MIXERS)
    plugin = r"ssscale/serving/vllm/ssscale_vllm/backends"
    return {name for name in MIXERS if re.fullmatch(rf"ssscale/parallel/{name}_ring\.py|{plugin}/{name}\.py", path)}


def _words(tree: ast.Module) -> Iterator[str]:
    """Identifiers and strings, but for docstrings and for calls of torch's softmax."""
    skipped = {id(text) for text in _docstrings(tree)}
    skipped |= {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_plain(node.func)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        for field in ("id", "attr", "arg", "name", "asname", "module", "value"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                yield word


def _is_plain(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("softmax", "log_softmax")


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def late_attributes(sources: Sources) -> Iterator[str]:
    """Attributes that a method other than __init__ gives to self first."""
    for file in sources.files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef) and file.top != "kernels":
                born = _born(node, file, sources)
                for method in _methods(node):
                    if method.name not in BIRTH:
                        yield from (f"{file.path}: {node.name}.{name}" for name in _given(method) if name not in born)


def _born(node: ast.ClassDef, file: File, sources: Sources) -> set[str]:
    """Attributes of the class itself, of its __init__, and those of the bases that are ours."""
    found = {method.name for method in _methods(node)}
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    for method in _methods(node):
        if method.name in BIRTH:
            found |= _given(method)
    for base in node.bases:
        where = _class_named(ast.unparse(base).split("[")[0], file, sources)
        if where is not None and where[0] is not node:
            found |= _born(*where, sources)
    return found


def _class_named(name: str, file: File, sources: Sources) -> tuple[ast.ClassDef, File] | None:
    owner: File | None = file
    for module, imported in file.imports:
        if imported == name.split(".")[-1]:
            owner = sources.target(module, None)
    for node in ast.walk(owner.tree) if owner is not None else ():
        if isinstance(node, ast.ClassDef) and node.name == name.split(".")[-1] and owner is not None:
            return node, owner
    return None


def _methods(node: ast.ClassDef) -> list[Function]:
    return [child for child in node.body if isinstance(child, Function)]


def _given(method: Function) -> set[str]:
    """The names X of `self.X = ...`, in whatever kind of statement."""
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def homes(sources: Sources) -> Iterator[str]:
    """DeepSpeed appears in one folder, Megatron-core in one file."""
    for file in sources.files:
        for module in sorted({module for module, _ in file.imports}):
            home = HOMES.get(module.split(".")[0])
            if home is not None and not file.path.startswith(home):
                yield f"{file.path}: {module}"


def patches(sources: Sources) -> Iterator[str]:
    """Changes of other people's modules outside of LIBRARY_patches.py, and libraries with two such files."""
    names: dict[str, str] = {}
    for file in sources.files:
        stem = file.path.rpartition("/")[2].removesuffix(".py")
        if stem.endswith("_patches"):
            if stem in names:
                yield f"{file.path}: {names[stem]}"
            names[stem] = file.path
        else:
            yield from (f"{file.path}: {what}" for what in sorted(set(_patched(file, sources))))


def _patched(file: File, sources: Sources) -> Iterator[str]:
    imported = [found for found in file.imports if found[0].split(".")[0] not in ("sys", "os", "__future__")]
    foreign = {name or module.split(".")[0] for module, name in imported if sources.target(module, name) is None}
    for node in ast.walk(file.tree):
        text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Call) else ""
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            # `library.config.x = ...` is a setting that the library offers.
            if (_root(node) in foreign and ".config." not in text) or "import_module(" in text:
                yield text
        elif isinstance(node, ast.Call) and text.startswith("sys.modules.update"):
            yield "sys.modules"
        elif isinstance(node, ast.Call) and node.args:
            called, changed = ast.unparse(node.func), node.args[0]
            of_foreign = called.endswith(("patch.object", "setattr")) and _root(changed) in foreign
            if called.endswith("mock.patch") or of_foreign:
                yield f"{called}({ast.unparse(changed)})"


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def long_files(sources: Sources) -> Iterator[str]:
    """Files of MAX_FILE_LINES lines and more."""
    return (file.path for file in sources.all if file.text.count("\n") >= MAX_FILE_LINES)


def long_functions(sources: Sources) -> Iterator[str]:
    """Functions of more than MAX_FUNCTION_LINES lines."""
    for file in sources.all:
        for node in ast.walk(file.tree):
            if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES:
                yield f"{file.path}: {node.name}"


def imports_of_tests(sources: Sources) -> Iterator[str]:
    """Test modules that others import: what several tests share belongs into a file without tests."""
    for file in sources.tests:
        for module in sorted({f"{module}.{name}" for module, name in file.imports}):
            test = next((part for part in module.split(".") if part.startswith("test_")), None)
            if test is not None and module.startswith("tests."):
                yield f"{file.path}: {module[: module.index(test) + len(test)]}"


RULES: dict[str, Callable[[Sources], Iterator[str]]] = {
    rule.__name__: rule
    for rule in (
        directions,
        circles,
        mixer_names,
        late_attributes,
        homes,
        patches,
        long_files,
        long_functions,
        imports_of_tests,
    )
}


if __name__ == "__main__":
    checked = Sources()
    for rule_name, rule in RULES.items():
        for offender in sorted(set(rule(checked))):
            print(f"{rule_name}: {offender}")
