"""The commands `stats` and `show`, which present a data folder to people."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from data_prep.errors import DataError
from data_prep.read_shards import Sample, read_manifest, read_shard, shards
from data_prep.tokenize import load

BAR = 40


def summary(manifest: dict[str, Any], console: Console) -> None:
    """Prints one line per split and source."""
    for split, sources in manifest["splits"].items():
        for source, counts in sources.items():
            if not counts["documents"]:
                continue
            dropped = sum(counts["tokens_dropped"].values())
            console.print(
                f"{split}/{source}: {counts['documents']:,} documents, {counts['bytes']:,} bytes,"
                f" {counts['tokens_in']:,} tokens → {counts['rows']:,} rows of {manifest['length']:,}"
                f" ({manifest['packing']}, {dropped:,} tokens dropped)",
                highlight=False,
                soft_wrap=True,
            )


def stats(folder: str, console: Console, figure: str | None = None) -> None:
    """Prints the summary, what was dropped and why, and a histogram of document lengths, also drawn to `figure`."""
    manifest = read_manifest(folder)
    summary(manifest, console)
    found = {}
    for split, sources in manifest["splits"].items():
        for source, counts in sources.items():
            for what in ("documents_dropped", "tokens_dropped"):
                for reason, number in counts[what].items():
                    console.print(f"{split}/{source}: {number:,} {what.split('_')[0]} dropped: {reason}")
            if counts["rows"]:
                lengths = found[f"{split}/{source}"] = _document_lengths(folder, split, source)
                _histogram(lengths, counts, f"{split}/{source}", console)
    if figure and not found:
        raise DataError(f"--figure {figure}: {folder} has no rows to draw")
    if figure:
        _draw(found, manifest["length"], figure)
        console.print(f"\n{figure}: the lengths of all sources")


def _document_lengths(folder: str, split: str, source: str) -> np.ndarray:
    """Returns the number of tokens of each document that are in rows."""
    parts = [(sample["documents"], sample["lengths"]) for sample in _rows(folder, split, source)]
    _, document = np.unique(np.concatenate([documents for documents, _ in parts]), return_inverse=True)
    return np.bincount(document, np.concatenate([lengths for _, lengths in parts])).astype(np.int64)


def _histogram(lengths: np.ndarray, counts: dict[str, Any], name: str, console: Console) -> None:
    efficiency = counts["tokens_out"] / counts["tokens_in"]
    console.print(
        f"\n{name}: {len(lengths):,} documents in {counts['parts']:,} parts,"
        f" packing efficiency {efficiency:.2%} (tokens out / tokens in); tokens per document:"
    )
    bins = np.bincount(np.floor(np.log2(lengths)).astype(int))
    for power, number in enumerate(bins):
        bar = "█" * round(BAR * number / bins.max())
        console.print(f"  {1 << power:>9,} – {(2 << power) - 1:<9,} {number:>10,} {bar}")


def _draw(lengths: dict[str, np.ndarray], row: int, file: str) -> None:
    """Draws tokens by the length of their document, stacked by source, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    edges = 2.0 ** np.arange(0, np.log2(max(found.max() for found in lengths.values())) + 1, 0.5)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.hist(list(lengths.values()), edges.tolist(), weights=list(lengths.values()), stacked=True, label=list(lengths))
    axes.axvline(row, color="black", linestyle="--", linewidth=1, label=f"a row: {row:,}")
    axes.set(xscale="log", xlabel="tokens of the document", ylabel="tokens")
    axes.legend(fontsize="small")
    try:
        figure.savefig(file, dpi=150)
    except ValueError as error:  # a format that matplotlib does not know
        raise DataError(f"--figure {file}: {error}") from error
    pyplot.close(figure)


def show(folder: str, split: str, source: str | None, row: int, console: Console) -> None:
    """Prints a decoded row with the boundaries of its documents."""
    manifest = read_manifest(folder)
    sources = manifest["splits"].get(split)
    if sources is None:
        raise DataError(f"{folder} has no split {split!r}: it has {', '.join(manifest['splits'])}")
    source = source or next(iter(sources))
    if source not in sources:
        raise DataError(f"{folder} has no source {source!r} in {split}: it has {', '.join(sources)}")
    if not 0 <= row < sources[source]["rows"]:
        raise DataError(f"{split}/{source} has {sources[source]['rows']:,} rows: there is no row {row}")
    tokenizer = load(str(Path(folder) / manifest["tokenizer"]["file"]))
    sample = _row(folder, split, source, row)
    ends = np.cumsum(sample["lengths"])
    for document, offset, length, end in zip(sample["documents"], sample["offsets"], sample["lengths"], ends):
        cut = "" if offset == 0 else ", continued"
        console.rule(f"document {document}, tokens {offset:,} to {offset + length - 1:,}{cut}", align="left")
        text = tokenizer.decode(sample["tokens"][end - length : end].tolist(), skip_special_tokens=False)
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _rows(folder: str, split: str, source: str) -> Iterator[Sample]:
    for shard in shards(folder, split, source):
        yield from read_shard(folder, split, source, shard)


def _row(folder: str, split: str, source: str, row: int) -> Sample:
    for shard in shards(folder, split, source):
        if row < shard["samples"]:
            return next(sample for i, sample in enumerate(read_shard(folder, split, source, shard)) if i == row)
        row -= shard["samples"]
    raise DataError(f"{folder}/{split}/{source}/index.json lists fewer rows than the manifest")
