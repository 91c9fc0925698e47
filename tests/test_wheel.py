"""The wheel: what it holds, and that it works beside Hugging Face's package `kernels`."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = ("pyproject.toml", "setup.py", "ssscale_kernels.py")
FOLDERS = ("ssscale", "kernels", "data_prep", "configs", "launch", "eval", "slurm")
LIBRARIES = {"ssscale", "ssscale_kernels", "data_prep"}

# Run without the checkout on the path: each module must come from the folder.
IMPORTS = """
import importlib, sys
folder = sys.argv[1]
sys.path.insert(0, folder)
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    assert module.__file__.startswith(folder), (name, module.__file__)
import kernels
assert kernels.__version__ == "0.0+theirs", kernels
from ssscale.config import load_config, run_names
assert load_config(["config=tiny_sb"]).name == "tiny_sb" and "3b_sb" in run_names()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as what an earlier build has left in build/ would be taken in."""
    source = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy2(ROOT / name, source / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(source / "dist"), str(source))
    return next((source / "dist").glob("ssscale-*.whl"))


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _theirs(folder: Path) -> Path:
    """A source tree of a distribution that installs a package `kernels`, as Hugging Face's does."""
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "__init__.py").write_text('__version__ = "0.0+theirs"\n')
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "kernels"\nversion = "0.0"\n'
    )
    return folder


def test_the_wheel_holds_the_libraries(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == LIBRARIES
    for folder, package in (("ssscale",) * 2, ("data_prep",) * 2, ("kernels", "ssscale_kernels")):
        files = {f"{package}/{path.relative_to(ROOT / folder)}" for path in (ROOT / folder).rglob("*.py")}
        # The plugin for vLLM is a distribution of its own.
        files = {name for name in files if not name.startswith("ssscale/serving/")}
        assert files == {name for name in names if name.startswith(f"{package}/") and name.endswith(".py")}
    configs = {f"ssscale/configs/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert configs == {name for name in names if name.endswith(".yaml")}


def test_the_wheel_works_beside_a_package_named_kernels(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "installed"
    theirs = _theirs(tmp_path / "theirs")
    _pip("install", "-q", "--no-deps", "--no-build-isolation", "--target", str(folder), str(wheel), str(theirs))
    assert {path.name for path in folder.iterdir() if path.suffix != ".dist-info"} == LIBRARIES | {"kernels"}
    uses = sorted(path for path in (folder / "ssscale").rglob("*.py") if "from ssscale_kernels" in path.read_text())
    modules = [".".join(path.relative_to(folder).with_suffix("").parts) for path in uses if path.stem != "__init__"]
    command = [sys.executable, "-I", "-c", IMPORTS, str(folder), "ssscale_kernels.softmax", "data_prep.pack", *modules]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("at_root", [True, False])
def test_a_checkout_does_not_hide_a_package_named_kernels(at_root: bool, tmp_path: Path) -> None:
    """Wherever the checkout stands on the path, before theirs or after it; both ways to start a command."""
    theirs = _theirs(tmp_path / "theirs")
    code = "import kernels, ssscale_kernels.softmax as ours; print(kernels.__version__, ours.__file__)"
    if not at_root:
        code = f"import sys; sys.path[0] = {str(ROOT / 'launch')!r}; import launch; {code}"
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": str(theirs)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0.0+theirs", str(ROOT / "kernels" / "softmax" / "__init__.py")]
