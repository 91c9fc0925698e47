"""Code that torch.compile has cached for an earlier version of the operators is not used."""

import re
from pathlib import Path

import pytest
from torch.compiler import config

from ssscale_kernels import versions

ROOT = Path(__file__).parents[2]


def test_each_version_of_a_module_has_its_own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_digests", {})
    before = config.cache_key_tag
    with config.patch(cache_key_tag="mine"):  # monkeypatch would leave torch's settings without this one
        check_keys(tmp_path)
    assert config.cache_key_tag == before


def check_keys(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.py", "b.py")]
    for file in files:
        file.write_text(f"# {file.name}")
        versions.mark(str(file))
    first = config.cache_key_tag
    assert first.startswith("mine ")
    versions.mark(str(files[0]))
    assert config.cache_key_tag == first
    files[1].write_text("# changed")
    versions.mark(str(files[1]))
    assert config.cache_key_tag != first
    assert config.cache_key_tag.split()[0] == "mine"
    files[1].write_text("# b.py")
    versions.mark(str(files[1]))
    assert config.cache_key_tag == first


def test_all_modules_that_register_operators_are_marked() -> None:
    found = [
        file
        for folder in ("kernels", "ssscale")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if re.search(
            r"^@torch\.library\.custom_op|torch\.library\.Library\(|= new_library\(", file.read_text(), re.MULTILINE
        )
    ]
    assert len(found) > 6
    assert [str(file) for file in found if "\nmark(__file__)\n" not in file.read_text()] == []
