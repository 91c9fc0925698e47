"""Configurations that nobody means: one sentence at once, or a run; never a traceback, a hang or an allocation."""

from pathlib import Path

import pytest

from launch.estimate import main as estimate
from slurm.submit import main as submit
from ssscale.config import load_config, to_yaml
from tests.config.refusals import refuses

TINY = "config=tiny_sb"

FILES: dict[str, bytes] = {
    "a number": b"3\n",
    "a list": b"[1, 2]\n",
    "text": b"hello\n",
    "an anchor within itself": b"&a\nmodel: *a\n",
    "a list within itself": b"&a [*a]\n",
    "a section within itself": b"include: [tiny_sb]\nmodel: &a\n  attention: *a\n",
    "deep sections": b"{a: " * 3000 + b"1" + b"}" * 3000,
    "deep lists": b"[" * 3000 + b"]" * 3000,
    "bytes that are not UTF-8": b"\xff\xfe\x00name: x",
    "NUL": b"name: a\0b\n",
    "400 digits": b"include: [tiny_sb]\ntrain: {seed: " + b"9" * 400 + b"}\n",
    "5,000 digits": b"include: [tiny_sb]\ntrain: {seed: " + b"9" * 5000 + b"}\n",
    "a tag that runs something": b"!!python/object/apply:os.system ['true']\n",
    "a list as key": b"include: [tiny_sb]\n? [a, b]\n: 1\n",
    "a number as key": b"include: [tiny_sb]\n1: 1\n",
    "a date as key": b"2020-01-01: 1\n",
    "two documents": b"a: 1\n---\nb: 2\n",
    "aliases that multiply": b"\n".join(
        b"k%d: &k%d [%s]" % (n, n, b", ".join([b"*k%d" % (n - 1) if n else b"1"] * 9)) for n in range(7)
    ),
    "an include with NUL": b"include: ['\\0.yaml']\n",
    "a long include": b"include: ['" + b"a" * 5000 + b"']\n",
}

ARGUMENTS: list[list[str]] = [
    ["config=a\0.yaml"],
    ["config=" + "a" * 6000],
    ["config=" + "a" * 6000 + ".yaml"],
    ["config=/"],
    *(
        [TINY, argument]
        for argument in (
            "train.seed=1e30",
            "train.seed=" + "9" * 400,
            "train.seed=" + "9" * 5000,
            "train.seed=" + "[" * 2000 + "]" * 2000,
            "train.seed=&a [*a]",
            "train.watchdog=1e300",
            "train.stages.0.tokens=1e30",
            "train.stages.0.tokens=1e300",
            "train.max_steps=1e300",
            "train.batch_size=1e30",
            "train.keep=1e18",
            "data.timeout=1e10",
            "data.num_workers=1e6",
            "data.prefetch=1e9",
            "data.cache_gb=1e300",
            "data.length=1e18",
            "model.head_dim=1e18",
            "model.hidden_size=1e18",
            "model.num_layers=1e9",
            "model.vocab_size=1e18",
            "model.ffn_hidden_size=1e300",
            "parallel.tensor=1e18",
            "name=${x}",
            "name=${name}",
            "name=${",
            r'name="$\{x}${y"',
            'name="a\\0b"',
            'name="\\ud800"',
            'run_dir="a\\0"',
            'init_from="a\\0b"',
            'data.path="a\\0b"',
            'train.tasks=["\\0"]',
        )
    ),
]


@pytest.mark.parametrize("kind", FILES)
def test_run_files(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(FILES[kind])
    assert len(refuses(estimate, [f"config={file}"])) < 20_000


def test_arguments() -> None:
    for arguments in ARGUMENTS:
        refuses(estimate, arguments)


def test_divisors_of_large_numbers() -> None:
    sentence = refuses(estimate, [TINY, "model.hidden_size=2147483645", "model.num_heads=7"])
    assert "use 1, 5, 19, 95" in sentence
    assert "less than 2^31" in refuses(estimate, [TINY, "model.hidden_size=1000000000001", "model.num_heads=7"])


def test_a_configuration_that_is_taken_can_be_read_again() -> None:
    for name in ("a b", "ü", "$x", "{x}", "a: b", "# a", "'", '"', "-", "null", "1e3"):
        config = load_config([TINY, f'name="{name}"' if '"' not in name else f"name='{name}'"])
        assert load_config([TINY, "name=x"]).name == "x"
        from ssscale.config import from_yaml

        assert from_yaml(to_yaml(config)).name == name


def test_submit() -> None:
    for argument, sentence in (
        ("sbatch='unclosed", "sbatch='unclosed: no closing quotation"),
        ("evaluate=suite='x", "evaluate=suite='x"),
        ("evaluate=suite=nosuch", "nosuch"),
        ("nodes=99999999999", "processes"),
    ):
        assert sentence in refuses(submit, [TINY, "gpus=0", argument, "--dry-run"])
