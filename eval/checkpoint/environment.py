"""What lm-eval and the Hugging Face libraries read from the environment when they are imported."""

import logging
import os

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "TRANSFORMERS_OFFLINE")


def prepare() -> None:
    """Keep this process off the network, unless the user has said otherwise (HF_HUB_OFFLINE=0), and libraries quiet.

    Must run before lm_eval is imported.
    """
    for name in OFFLINE:
        os.environ.setdefault(name, os.environ.get("HF_HUB_OFFLINE", "1"))
    os.environ.setdefault("TQDM_DISABLE", "1")  # our own progress bar takes its place
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # many texts at once; nothing forks and then tokenizes
    os.environ.setdefault(
        "DISABLE_MULTIPROC", "1"
    )  # lm-eval would fork a pool for its bootstrap, torch's threads running
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
