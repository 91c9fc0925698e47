"""`python -m data_prep pack | merge | train-tokenizer | verify | stats | show`: packs raw text to shards
(docs/guide/data.md).
"""

import argparse
import dataclasses
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from data_prep.errors import DataError
from data_prep.interrupt import INTERRUPTED, raise_again
from data_prep.progress import Progress
from data_prep.settings import PACKINGS, Settings, from_dict, from_yaml
from data_prep.unforeseen import describe, output_full, prepare_output

FAILED = 70  # EX_SOFTWARE
TERMINATED = 143  # as shells show SIGTERM


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0 done, 2 bad input, 70 unexpected error, 130 or 143 interrupted.

    Unless it is 0, one sentence is printed to stderr.
    """
    prepare_output()
    console = Console(markup=False, emoji=False)
    args = argparse.Namespace()
    try:
        raise_again()
        args = _parser().parse_args(arguments)
        with Progress() as progress:
            args.run(args, console, progress)
        sys.stdout.flush()
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # for example a full disk, or a folder without write permission
        where = error.filename or ("the output" if output_full() else getattr(args, "out", "data_prep"))
        print(f"error: {error.strerror or error}: {where}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as end:
        print(f"{str(end) or 'interrupted'}: the same command continues", file=sys.stderr)
        return TERMINATED if str(end) else INTERRUPTED
    except Exception as error:
        print(f"failed: {describe(error, 'data_prep')}", file=sys.stderr)
        return FAILED
    return 0


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one sentence, without the usage, which --help prints."""

    def error(self, message: str) -> NoReturn:
        raise DataError(f"{message}; --help lists all arguments")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m data_prep", description="Raw text to packed shards; see docs/guide/data.md.")
    commands = parser.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack", help="tokenize and pack sources into a data folder")
    pack.add_argument("--out", required=True, metavar="FOLDER")
    pack.add_argument("--config", metavar="FILE", help="YAML with the settings; flags override it")
    _add_sources(pack)
    pack.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json")
    pack.add_argument("--train-vocab-size", type=int, metavar="N", help="train a tokenizer of N entries on the sources")
    pack.add_argument("--length", type=int, metavar="N", help="tokens per row (4096)")
    pack.add_argument("--packing", choices=PACKINGS, help="how documents are packed to rows (best-fit)")
    pack.add_argument(
        "--vocab-size", type=int, metavar="N", help="size of the model's vocabulary; every token id must be smaller"
    )
    pack.add_argument("--bos", metavar="TOKEN", help="beginning of a document (found by itself for known tokenizers)")
    pack.add_argument("--eos", metavar="TOKEN", help="end of a document")
    pack.add_argument(
        "--seed", type=int, metavar="N", help="seed of the order of best-fit's rows (0); training has data.shuffle_seed"
    )
    pack.add_argument("--deduplicate", action="store_true", default=None, help="keep only the first of equal texts")
    pack.add_argument("--task", metavar="I/N", help="only part I of N of the input, for `merge` (I from 0)")
    pack.add_argument("--shard-bytes", type=int, metavar="N", help="bytes of a shard before compression (32 MiB)")
    pack.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="tokenizing processes; any number gives the same bytes"
    )
    pack.add_argument(
        "--save-every",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds between saved states, from which a killed run continues (30)",
    )
    pack.set_defaults(run=_pack)

    merge = commands.add_parser("merge", help="combine the folders of all tasks into one, without reading their shards")
    merge.add_argument("parts", nargs="+", metavar="FOLDER")
    merge.add_argument("--out", required=True, metavar="FOLDER")
    merge.set_defaults(run=_merge)

    train = commands.add_parser("train-tokenizer", help="train a byte-level BPE")
    train.add_argument("--vocab-size", type=int, required=True, metavar="N")
    train.add_argument("--out", required=True, metavar="FILE")
    train.add_argument("--config", metavar="FILE", help="YAML with the settings; flags override it")
    _add_sources(train)
    train.set_defaults(run=_train_tokenizer)

    verify = commands.add_parser("verify", help="check every hash, count and document boundary")
    stats = commands.add_parser("stats", help="documents, tokens, lengths, packing efficiency")
    show = commands.add_parser("show", help="a row decoded, with its boundaries")
    for command, run in ((verify, _verify), (stats, _stats), (show, _show)):
        command.add_argument("folder")
        command.set_defaults(run=run)
    stats.add_argument("--figure", metavar="FILE", help="also draw the lengths, as .png, .svg or .pdf")
    show.add_argument("--split", default="train")
    show.add_argument("--source")
    show.add_argument("--row", type=int, default=0)
    return parser


def _add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="NAME=PATH[:valid]",
        help="JSON lines and text (.gz, .zst, .xz), Parquet, Arrow, folders of them or of `datasets`, Megatron's"
        " .bin/.idx, MDS of tokens, globs, stdlib:code, stdlib:docs; may be repeated",
    )
    parser.add_argument("--field", help="the text's field in a JSON record (text)")
    parser.add_argument("--valid-fraction", type=float, metavar="F", help="documents held out for validation (0.01)")
    parser.add_argument("--min-chars", type=int, metavar="N", help="leave shorter texts out")
    parser.add_argument("--max-chars", type=int, metavar="N", help="leave longer texts out")
    parser.add_argument("--skip-broken", action="store_true", default=None, help="count broken documents and continue")


def _settings(args: argparse.Namespace) -> Settings:
    sources: dict[str, dict[str, list[str]]] = {"sources": {}, "valid": {}}
    for text in args.source:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise DataError(f"--source {text} must be NAME=PATH or NAME=PATH:valid")
        kind = "valid" if path.endswith(":valid") else "sources"
        sources[kind].setdefault(name, []).append(path.removesuffix(":valid"))
    keys = {field.name for field in dataclasses.fields(Settings)} - {"sources", "valid"}
    values = {key: value for key, value in vars(args).items() if key in keys and value is not None}
    values |= {key: value for key, value in sources.items() if value}
    if args.config:
        return from_yaml(args.config, values)
    return from_dict(values, "flags")


def _pack(args: argparse.Namespace, console: Console, progress: Progress) -> None:
    from data_prep.inspect_shards import summary
    from data_prep.prepare import prepare

    if args.workers < 1:
        raise DataError(f"--workers {args.workers} must be at least 1")
    if not args.save_every >= 0:
        raise DataError(f"--save-every {args.save_every} must be at least 0")
    manifest, made = prepare(_settings(args), args.out, args.workers, progress, args.save_every)
    if made:
        summary(manifest, console)
        if not any(counts["documents"] for split in manifest["splits"].values() for counts in split.values()):
            console.print(f"{args.out}: task {args.task} has no documents", highlight=False, soft_wrap=True)
    else:
        console.print(f"{args.out} exists already, made from the same settings and input: kept")


def _merge(args: argparse.Namespace, console: Console, progress: Progress) -> None:
    from data_prep.inspect_shards import summary
    from data_prep.merge import merge

    summary(merge(args.parts, args.out, progress), console)


def _train_tokenizer(args: argparse.Namespace, console: Console, progress: Progress) -> None:
    from data_prep.train_tokenizer import train_tokenizer

    args.train_vocab_size, vocab_size, args.vocab_size, args.tokenizer = args.vocab_size, args.vocab_size, None, None
    train_tokenizer(_settings(args), vocab_size, Path(args.out), progress)
    console.print(f"{args.out}: {vocab_size:,} entries")


def _verify(args: argparse.Namespace, console: Console, progress: Progress) -> None:
    from data_prep.verify import verify

    manifest = verify(args.folder, progress)
    rows = sum(counts["rows"] for sources in manifest["splits"].values() for counts in sources.values())
    console.print(
        f"{args.folder} is whole: {len(manifest['files'])} files, {rows:,} rows of {manifest['length']:,} tokens"
    )


def _stats(args: argparse.Namespace, console: Console, progress: Progress) -> None:
    from data_prep.inspect_shards import stats

    if args.figure and not args.figure.endswith((".png", ".svg", ".pdf")):
        raise DataError(f"--figure {args.figure} must end in .png, .svg or .pdf")
    if args.figure and not Path(args.figure).absolute().parent.is_dir():
        raise DataError(f"--figure {args.figure}: there is no folder {Path(args.figure).parent}")
    stats(args.folder, console, args.figure)


def _show(args: argparse.Namespace, console: Console, progress: Progress) -> None:
    from data_prep.inspect_shards import show

    show(args.folder, args.split, args.source, args.row, console)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the command as Ctrl-C does. By itself, SIGTERM leaves processes and semaphores to Python, which complains."""
    raise KeyboardInterrupt("terminated")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main())
