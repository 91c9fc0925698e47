"""Code that torch.compile has cached for an earlier version of the operators is not used."""

import re
from pathlib import Path

import pytest

from ssscale_kernels import versions

ROOT = Path(__file__).parents[2]


def test_each_version_of_a_module_has_its_own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.compiler_config, "cache_key_tag", "mine")
    monkeypatch.setattr(versions, "_digests", {})
    files = [tmp_path / name for name in ("a.py", "b.py")]
    for file in files:
        file.write_text(f"# {file.name}")
        versions.mark(str(file))
    first = versions.compiler_config.cache_key_tag
    assert first.startswith("mine ")
    versions.mark(str(files[0]))
    assert versions.compiler_config.cache_key_tag == first
    files[1].write_text("# changed")
    versions.mark(str(files[1]))
    assert versions.compiler_config.cache_key_tag != first
    assert versions.compiler_config.cache_key_tag.split()[0] == "mine"
    files[1].write_text("# b.py")
    versions.mark(str(files[1]))
    assert versions.compiler_config.cache_key_tag == first


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
