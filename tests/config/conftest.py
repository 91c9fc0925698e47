import pytest

from ssscale.config import load as config_module


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """An empty configs/ folder that `load_config` reads instead of the repository's."""
    folder = tmp_path / "configs"
    folder.mkdir()
    monkeypatch.setattr(config_module, "CONFIGS", folder)
    return folder
