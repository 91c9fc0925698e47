"""Sets the environment variables that lm-eval and the Hugging Face libraries read when they are imported."""

import logging
import os

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "TRANSFORMERS_OFFLINE")


def prepare() -> None:
    """Disable network access, unless the user has set HF_HUB_OFFLINE=0, and silence the libraries.

    Must be called before lm_eval is imported.
    """
    for name in OFFLINE:
        os.environ.setdefault(name, os.environ.get("HF_HUB_OFFLINE", "1"))
    os.environ.setdefault("TQDM_DISABLE", "1")  # replaced by our own progress bar
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "true"
    )  # tokenizes many texts at once. No process tokenizes after a fork.
    os.environ.setdefault(
        "DISABLE_MULTIPROC", "1"
    )  # otherwise lm-eval forks a pool for its bootstrap while torch's threads run
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
