"""Times programs that convert the same text, in turn: `python -m data_prep.benchmark --help`.

    python -m data_prep.benchmark --input text.jsonl \\
        ours='python -m data_prep pack --workers 1 --tokenizer t.json --source a={input} --out {out}' \\
        other='python convert.py {input} {out}'

Every command runs on the whole input, and on its first documents alone. The difference is the cost of the text without
the start of the program. Figures are medians over rounds. In each round all commands take turns, so that changes in the
speed of the machine affect all of them. CPU seconds are user and system time of the process and its children.
"""

import argparse
import resource
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

FEW = 60  # documents; enough for one row


def run(command: str, file: str, folder: str) -> tuple[float, float]:
    """Runs a command. Returns (CPU seconds, wall seconds)."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        filled = command.format(input=file, out=f"{out}/out")
        subprocess.run(shlex.split(filled), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", metavar="NAME=COMMAND", help="{input} and {out} are filled in")
    parser.add_argument("--input", required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    commands = dict(text.split("=", 1) for text in args.commands)
    megabytes = Path(args.input).stat().st_size / 1e6
    with tempfile.TemporaryDirectory() as folder:
        few = f"{folder}/few.jsonl"
        with open(args.input) as lines:
            Path(few).write_text("".join(line for _, line in zip(range(FEW), lines)))
        times: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in commands}
        for _ in range(args.rounds):
            for name, command in commands.items():
                times[name].append((*run(command, args.input, folder), *run(command, few, folder)))
    print("name               CPU s   of it start   wall s   MB a CPU second, without the start")
    for name, found in times.items():
        cpu, wall, start = (median(values[i] for values in found) for i in (0, 1, 2))
        speed = megabytes / median(values[0] - values[2] for values in found)
        print(f"{name:16} {cpu:7.2f}       {start:7.2f}  {wall:7.2f}   {speed:.2f}")


if __name__ == "__main__":
    main()
