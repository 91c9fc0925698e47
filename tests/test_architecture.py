"""The rules of tests/architecture.py hold, but for the offenders listed in known_offenders.txt, a list that only shrinks."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.architecture import KERNELS, ROOT, RULES, Sources

KNOWN = (ROOT / "tests" / "known_offenders.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


@pytest.mark.parametrize("rule", RULES)
def test_rule_holds(rule: str, sources: Sources) -> None:
    found = {f"{rule}: {offender}" for offender in RULES[rule](sources)}
    known = {line for line in KNOWN if line.startswith(f"{rule}: ")}
    meaning = f"{rule} ({RULES[rule].__doc__})"
    assert not found - known, f"new offenders of {meaning}:\n" + "\n".join(sorted(found - known))
    assert not known - found, "repaired, to be deleted from known_offenders.txt:\n" + "\n".join(sorted(known - found))


def test_known_offenders_are_of_rules() -> None:
    assert {line.split(": ")[0] for line in KNOWN} <= set(RULES)
    assert sorted(set(KNOWN), key=KNOWN.index) == KNOWN


def offenders(folder: Path, rule: str, files: dict[str, str]) -> list[str]:
    """What a rule finds in a checkout that holds these files."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return sorted(RULES[rule](Sources(folder)))


CASES: dict[str, tuple[str, dict[str, str], Iterable[str]]] = {
    "upwards": (
        "directions",
        {
            "kernels/a.py": "def f():\n    import ssscale.errors",
            "ssscale/b.py": f"from {KERNELS} import a\nfrom {KERNELS}.a import f\nimport launch.c",
            "ssscale/config/d.py": "from ssscale.errors import E\nfrom ssscale import errors, b",
            "launch/c.py": "import eval.e\nfrom data_prep import f",
            "data_prep/f.py": "from ssscale.data.streaming_patches import g\nfrom ssscale import b",
        },
        [
            "data_prep/f.py: ssscale",
            "kernels/a.py: ssscale.errors",
            "ssscale/b.py: launch.c",
            "ssscale/config/d.py: ssscale",
        ],
    ),
    "circles": (
        "circles",
        {
            "ssscale/a.py": "from . import b",
            "ssscale/b.py": "def f():\n    from ssscale.c.d import g",
            "ssscale/c/d.py": "from ..a import h\nfrom ..e import i",
            "ssscale/e.py": "if TYPE_CHECKING:\n    from ssscale.a import h",
            "kernels/p/__init__.py": "from .q import f",
            "kernels/p/q.py": f"from {KERNELS}.p import g",
        },
        ["kernels/p/__init__.py kernels/p/q.py", "ssscale/a.py ssscale/b.py ssscale/c/d.py"],
    ),
    "mixers": (
        "mixer_names",
        {
            "configs/1b_ssmax.yaml": "",
            "ssscale/a.py": '"""Of softmax."""\nx.softmax(-1); torch.log_softmax(x); g("config=1b_ssmax")',
            "ssscale/b.py": "core.is_ssmax",
            "ssscale/c.py": 'if x == "stick-breaking" or f(ssmax_scale=1):\n    y: SoftMax',
            "ssscale/model/mixers/softmax.py": "class Softmax: ...",
            "ssscale/model/mixers/base.py": f"from {KERNELS}.softmax import f",
            "ssscale/parallel/softmax_ring.py": "softmax = ssmax",
            "eval/d.py": "softmax",
        },
        [
            "ssscale/b.py: ssmax",
            "ssscale/c.py: softmax ssmax stickbreaking",
            "ssscale/model/mixers/base.py: softmax",
            "ssscale/parallel/softmax_ring.py: ssmax",
        ],
    ),
    "attributes": (
        "late_attributes",
        {
            "ssscale/a.py": "class A:\n    x: int\n    def __init__(self):\n        self.y, self.z = 1, 2\n",
            "launch/b.py": "from ssscale.a import A\nclass B(A):\n    def f(self):\n        self.x = self.y = 1\n"
            "        with open(1) as self.w:\n            self.w.name = self.z\n",
        },
        ["launch/b.py: B.w"],
    ),
    "homes": (
        "homes",
        {
            "ssscale/engine/a.py": "import deepspeed",
            "ssscale/b.py": "from megatron.core import c\nfrom ssscale.engine import deepspeed",
        },
        ["ssscale/b.py: megatron.core"],
    ),
    "patches": (
        "patches",
        {
            "ssscale/a.py": "import torch.cuda\ntorch.cuda.f = 1\ntorch._dynamo.config.g = 2",
            "ssscale/torch_patches.py": "import torch\ntorch.f = 1",
            "eval/torch_patches.py": "",
            "eval/b.py": "from x import y\nsetattr(y, n, 1)\nmock.patch('z')\ny = A()\nimport_module('u').v = 1",
        },
        [
            "eval/b.py: import_module('u').v",
            "eval/b.py: mock.patch('z')",
            "eval/b.py: setattr(y)",
            "ssscale/a.py: torch.cuda.f",
            "ssscale/torch_patches.py: eval/torch_patches.py",
        ],
    ),
    "lengths of files": ("long_files", {"ssscale/a.py": "\n" * 399, "tests/b.py": "\n" * 400}, ["tests/b.py"]),
    "lengths of functions": (
        "long_functions",
        {"ssscale/a.py": "def f():\n" + "    x\n" * 59 + "def g():\n" + "    x\n" * 60},
        ["ssscale/a.py: g"],
    ),
    "tests": (
        "imports_of_tests",
        {"tests/a/test_b.py": "from tests.a import test_c as d, e\nfrom .test_f import g", "tests/a/test_f.py": ""},
        ["tests/a/test_b.py: tests.a.test_c", "tests/a/test_b.py: tests.a.test_f"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_rule_finds(name: str, tmp_path: Path) -> None:
    rule, files, expected = CASES[name]
    assert offenders(tmp_path, rule, files) == sorted(expected)
