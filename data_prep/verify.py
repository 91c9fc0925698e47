"""The command `verify`, which checks every hash, count and document boundary of a data folder. Errors name the file."""

from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import DataError
from data_prep.progress import Progress
from data_prep.read_shards import Sample, read_manifest, read_shard, shards
from data_prep.write_shards import file_sha256


def verify(folder: str, progress: Progress) -> dict[str, Any]:
    """Checks a data folder and returns its manifest. Raises DataError for the first defect."""
    manifest = read_manifest(folder)
    progress.start("verify", 2 * sum(entry["bytes"] for entry in manifest["files"].values()))
    _check_files(Path(folder), manifest, progress)
    for split, sources in manifest["splits"].items():
        for source, counts in sources.items():
            _check_source(folder, manifest, split, source, counts, progress)
    return manifest


def _check_files(folder: Path, manifest: dict[str, Any], progress: Progress) -> None:
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is missing")
        if path.stat().st_size != entry["bytes"]:
            raise DataError(f"{path} has {path.stat().st_size:,} bytes, the manifest says {entry['bytes']:,}")
        if file_sha256(path) != entry["sha256"]:
            raise DataError(f"{path} is corrupt: its sha256 is not the manifest's")
        progress.advance(entry["bytes"])
    tokenizer = manifest["tokenizer"]
    if manifest["files"].get(tokenizer["file"], {}).get("sha256") != tokenizer["sha256"]:
        raise DataError(f"{folder / tokenizer['file']} is not the tokenizer whose fingerprint the manifest gives")


def _check_source(
    folder: str, manifest: dict[str, Any], split: str, source: str, counts: dict[str, Any], progress: Progress
) -> None:
    where = f"{folder}/{split}/{source}"
    if counts["tokens_in"] != counts["tokens_out"] + sum(counts["tokens_dropped"].values()):
        raise DataError(f"{where}: tokens in are not tokens out plus tokens dropped")
    rows, parts = 0, []
    for shard in shards(folder, split, source) if counts["rows"] else []:
        name = f"{where}/{shard['zip_data']['basename']}"
        for sample in read_shard(folder, split, source, shard):
            _check_row(sample, manifest, name)
            parts.append(np.stack([sample["documents"], sample["offsets"], sample["lengths"].astype(np.int64)], axis=1))
            rows += 1
        progress.advance(shard["zip_data"]["bytes"], rows * manifest["length"])
    if rows != counts["rows"] or rows * manifest["length"] != counts["tokens_out"]:
        raise DataError(f"{where} has {rows:,} rows, the manifest says {counts['rows']:,}")
    if parts:
        _check_parts(np.concatenate(parts), where)


def _check_row(sample: Sample, manifest: dict[str, Any], name: str) -> None:
    tokens, lengths = sample["tokens"], sample["lengths"]
    tokenizer = manifest["tokenizer"]
    if tokens.dtype != manifest["dtype"] or len(tokens) != manifest["length"]:
        raise DataError(f"{name}: a row of {len(tokens)} {tokens.dtype}, not {manifest['length']} {manifest['dtype']}")
    if not len(lengths) == len(sample["documents"]) == len(sample["offsets"]):
        raise DataError(f"{name}: a row with columns of different length")
    if lengths.min() < 1 or lengths.sum() != len(tokens):
        raise DataError(f"{name}: a row whose parts do not add up to it")
    if tokens.max() >= tokenizer["vocab_size"]:
        raise DataError(f"{name}: token id {tokens.max()} beyond the vocabulary of {tokenizer['vocab_size']}")
    starts = np.cumsum(lengths) - lengths
    if (tokens[starts[sample["offsets"] == 0]] != tokenizer["bos_id"]).any():
        raise DataError(f"{name}: a document that does not begin with token {tokenizer['bos_id']}")


def _check_parts(parts: np.ndarray, where: str) -> None:
    """Checks that no token of a document occurs twice: a part starts where or after the previous one ended."""
    document, offset, length = parts[np.lexsort((parts[:, 1], parts[:, 0]))].T
    same = document[1:] == document[:-1]
    overlap = same & (offset[1:] < offset[:-1] + length[:-1])
    if overlap.any():
        raise DataError(f"{where}: tokens of document {document[1:][overlap][0]} lie in two rows")
