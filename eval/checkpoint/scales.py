"""Writes the learned parameters of SSMax as CSV tables."""

import csv
from pathlib import Path

from ssscale.config.schema import Config
from ssscale.train.checkpoint import CheckpointReader
from ssscale.train.files import replacing


def write_scales(checkpoint: Path, config: Config, folder: Path) -> list[Path]:
    """Write ssmax.csv with layer, head, s, and b if it is learned. For the p_n study, also write pn.csv with n, p_n.

    Layers and heads are counted from 0. Returns the written files. A checkpoint without SSMax gives none.
    """
    reader, ssmax = CheckpointReader(checkpoint), config.model.used.get("ssmax")
    if ssmax is None:
        return []
    heads = config.model.num_heads
    rows: list[list[float]] = []
    for layer in range(config.model.num_layers):
        columns = []
        if config.model.mixer_of(layer) is not ssmax:
            continue
        for name in ("s", "b"):
            key = f"blocks.{layer}.attention.weights.{name}"
            if key in reader.weights:
                columns.append(reader.whole(key, "weight").tolist())
            elif name == "s":
                columns.append([ssmax.scale] * heads)
        rows += [[layer, head, *values] for head, values in enumerate(zip(*columns, strict=True))]
    header = ["layer", "head", "s", "b"][: len(rows[0])]
    files = [_write(folder / "ssmax.csv", header, rows)]
    if "shared.ssmax.pn" in reader.weights:
        values = reader.whole("shared.ssmax.pn", "weight").tolist()
        files.append(_write(folder / "pn.csv", ["n", "p_n"], [[n, p] for n, p in enumerate(values, 1)]))
    return files


def _write(file: Path, header: list[str], rows: list[list[float]]) -> Path:
    with replacing(file) as temporary, temporary.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(header)
        writer.writerows(rows)
    return file
