"""Fine-tune on question answering:   python launch/finetune.py from=RUN questions=FILE[,FILE...] run_dir=FOLDER [key=value ...]

from:       a run folder (its newest checkpoint) or a checkpoint folder
questions:  files in SQuAD 2.0's JSON form, .zst or not; questions without an answer are left out
epochs:     10; lr: 2e-5; batch: 128 examples a step; microbatch: 32 of them a forward pass
data.* and train.*: keys to change, such as train.seed=1 or train.save_every=500

The recipe of arXiv:2501.19399, Section 3.3 and Table 3: the loss is summed over the tokens of the answers. Examples longer
than the run's rows are left out. The same command goes on where a run was stopped; torchrun shares the batch out over GPUs.
"""

import logging
import os
import sys
from pathlib import Path

if not __package__:  # started as a script: launch/ itself must not shadow packages named as its files
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.cli import run, take_options
from launch.process import follow_launcher, rank_environment
from ssscale.errors import SAVED, Stop, UserError

OPTIONS = {"from": str, "questions": str, "run_dir": str, "epochs": float, "lr": float, "batch": int, "microbatch": int}
NEEDED = ("from", "questions", "run_dir")


def main(argv: list[str]) -> None:
    from ssscale.train.signals import StopSignals

    options, rest = take_options(argv, OPTIONS)
    for key in NEEDED:
        if not options.get(key):
            raise UserError(f"{key}= is missing: python launch/finetune.py from=RUN questions=FILE run_dir=FOLDER")
    unknown = [text for text in rest if not text.startswith(("data.", "train."))]
    if unknown:
        raise UserError(f"unknown argument {unknown[0]!r}: this command takes {', '.join(OPTIONS)}, data.* and train.*")
    with StopSignals() as signals:
        follow_launcher()
        os.environ |= rank_environment(os.environ)
        import torch

        from eval.text import TextTokenizer
        from ssscale.config import change, validate
        from ssscale.data.questions import make_example, read_squad
        from ssscale.parallel.groups import initialize, shutdown
        from ssscale.train.finetune import FineTuning, finetuning_config
        from ssscale.train.reading import find_checkpoint
        from ssscale.train.switch import saved_config

        main_rank = os.environ.get("RANK", "0") == "0"
        logging.basicConfig(level=logging.WARNING if main_rank else logging.ERROR, format="%(message)s", force=True)
        logger = logging.getLogger("ssscale")
        logger.setLevel(logging.INFO if main_rank else logging.ERROR)
        checkpoint = find_checkpoint(Path(options["from"]), "from")
        before = change(saved_config(checkpoint), rest)
        tokenizer = TextTokenizer.of_checkpoint(checkpoint, None)
        questions = [question for file in options["questions"].split(",") for question in read_squad(Path(file))]
        every = [make_example(question, tokenizer.encode, tokenizer.bos_id) for question in questions]
        examples = [example for example in every if len(example.tokens) <= before.data.length]
        logger.info(
            "%d examples, %d longer than %d tokens left out", len(every), len(every) - len(examples), before.data.length
        )
        config = finetuning_config(
            before,
            options["from"],
            options["run_dir"],
            num_examples=len(examples),
            epochs=options.get("epochs", 10.0),
            lr=options.get("lr", 2e-5),
            batch=options.get("batch", 128),
            microbatch=options.get("microbatch", min(32, options.get("batch", 128))),
        )
        validate(config, int(os.environ.get("WORLD_SIZE", "1")), gpu=torch.cuda.is_available())
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        groups = initialize(config.parallel.tensor, local_rank, distributed="RANK" in os.environ)
        kept = [checkpoint / name for name in ("tokenizer.json", "boundaries.json")]
        files = {file.name: file.read_text() for file in kept if file.is_file()}
        try:
            FineTuning(config, groups, examples, files, signals).run()
        except Stop as stop:
            if stop.code == SAVED:
                shutdown()
            raise
        shutdown()


if __name__ == "__main__":
    run(main, __doc__)
