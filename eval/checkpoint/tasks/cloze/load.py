"""Loads the items of the cloze task for lm-eval."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict


def load_items(cloze_items: str, **_: Any) -> DatasetDict:
    """Load items. cloze_items: a JSON-lines file of eval/checkpoint/cloze.py, from the metadata of the TaskManager."""
    with Path(cloze_items).open(encoding="utf-8") as file:
        return DatasetDict({"test": Dataset.from_list([json.loads(line) for line in file])})
