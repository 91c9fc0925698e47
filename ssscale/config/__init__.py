"""The configuration of a run: its keys (`schema`), loading (`load`), and the names that they refer to (`registry`)."""

from ssscale.config.load import CONFIGS, change, from_yaml, load_config, read_yaml, run_names, save, to_yaml

__all__ = ["CONFIGS", "change", "from_yaml", "load_config", "read_yaml", "run_names", "save", "to_yaml"]
