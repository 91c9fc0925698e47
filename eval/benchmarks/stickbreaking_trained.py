"""Measures stick-breaking attention on activations of a trained model: live tiles, and time with and without skipping.

    python -m eval.benchmarks.stickbreaking_trained RUN DATA [--rows 4] [--lengths 4096,16384]

RUN is the folder of a run of launch/pretrain.py with `model.mixers=[stickbreaking]`. DATA is a packed data folder.
Its validation rows are joined to sequences of each length, and each sequence is read as one document. One forward and
one backward pass collect q, k, v and dO of all layers. Then each layer is timed separately, and softmax attention on
the same tensors. Blocks that leave the range of the fast algebra are counted (stickbreaking_range.py). At the end, decoded
texts are compared with full passes.
"""

import argparse
from pathlib import Path

from eval.checkpoint.command import Parser, sentences, whole_numbers


def main() -> None:
    parser = Parser(
        "python -m eval.benchmarks.stickbreaking_trained",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("data")
    parser.add_argument(
        "--rows", type=int, default=4, help="sequences of the first length; the other lengths get as many tokens"
    )
    parser.add_argument("--lengths", default="4096,16384")
    arguments = parser.parse_args()
    lengths = whole_numbers(arguments.lengths, "--lengths")

    import torch

    from eval.benchmarks.trained_layers import decode, held_out, report
    from ssscale.config.choices import Precision
    from ssscale.data.stream import PackedData
    from ssscale.parallel.groups import initialize
    from ssscale.train.build import load_for_inference

    groups = initialize()
    model, _ = load_for_inference(arguments.run, groups)
    data = PackedData.open(arguments.data, "valid")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{arguments.run.name}: {name}, torch {torch.__version__}")
    for length in lengths:
        report(model, held_out(data, length, max(1, arguments.rows * lengths[0] // length)), length)
    for precision in (Precision.fp32, Precision.bf16):
        model, _ = load_for_inference(arguments.run, groups, precision)
        print(decode(model, held_out(data, lengths[0], arguments.rows), lengths[0]), flush=True)


if __name__ == "__main__":
    with sentences():
        main()
