"""What a data folder holds, for tests to compare."""

from collections import defaultdict
from pathlib import Path

import numpy as np

from data_prep.read_shards import read_manifest, read_shard, shards


def documents(folder: Path) -> dict[tuple[str, str, int], list[int]]:
    """The tokens of each document's parts in the rows, by (split, source, number)."""
    parts = defaultdict(list)
    for split, sources in read_manifest(str(folder))["splits"].items():
        for source, counts in sources.items():
            for shard in shards(str(folder), split, source) if counts["rows"] else []:
                for sample in read_shard(str(folder), split, source, shard):
                    for part in zip(
                        np.split(sample["tokens"], np.cumsum(sample["lengths"])), sample["documents"], sample["offsets"]
                    ):
                        parts[split, source, int(part[1])].append((int(part[2]), part[0].tolist()))
    return {key: [token for _, tokens in sorted(found) for token in tokens] for key, found in parts.items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
