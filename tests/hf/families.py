"""Small random models of transformers' own classes, as their authors configure them: nothing of this package.

`python -m tests.hf.families make FOLDER TOKENIZER` saves each as FOLDER/NAME, with its logits of TEXT as logits.pt.
`python -m tests.hf.families load FOLDER` does that for the models that are there.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "initializer_range": 0.2,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 4.0,
}
# What SmolLM and SmolLM2 write beside their sizes.
SMOLLM: dict[str, Any] = {
    "is_llama_config": True,
    "rope_interleaved": False,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "rope_theta": 100_000,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rms_norm_eps": 1e-5,
    "hidden_size": 36,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
# 5.1, 1.6, 0.5 and 0.2 turns in 32 tokens: one frequency is kept, one is between, and two are divided.
LLAMA_3_1: dict[str, Any] = {
    "rope_theta": 100.0,
    "max_position_embeddings": 64,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
# What Qwen2 and later write: a window that is off.
QWEN = {"rope_theta": 1_000_000.0, "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}
# name → (model type, its keys, the format of the way back)
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama 2": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}, "llama"),
    "Llama, tied": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}, "llama"),
    "Llama, wide heads": ("llama", {"num_key_value_heads": 4, "head_dim": 12}, "llama"),
    "Llama 3": ("llama", {"rope_theta": 500_000.0, "num_key_value_heads": 1}, "llama"),
    "Llama 3.1": ("llama", LLAMA_3_1, "llama"),
    "Llama 3.2, tied": ("llama", LLAMA_3_1 | {"tie_word_embeddings": True, "head_dim": 16}, "llama"),
    "Llama, linear scaling": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, "llama"),
    "Llama, scaling by 1": ("llama", {"rope_scaling": {"type": "linear", "factor": 1.0}}, "llama"),
    "Llama, dynamic scaling": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}, "ssscale"),
    "SmolLM2": ("llama", SMOLLM, "llama"),
    "Mistral": ("mistral", {"sliding_window": None}, "llama"),
    "Mistral, window": ("mistral", {"sliding_window": 6, "tie_word_embeddings": True}, "mistral"),
    "Mistral, window of 1": ("mistral", {"sliding_window": 1}, "mistral"),
    "Mistral, wide heads": ("mistral", {"sliding_window": 4096, "head_dim": 16}, "mistral"),
    "Granite": ("granite", MULTIPLIERS, "granite"),
    "Granite, tied": ("granite", MULTIPLIERS | {"tie_word_embeddings": True}, "granite"),
    "Granite, linear scaling": (
        "granite",
        MULTIPLIERS | {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "granite",
    ),
    "Qwen2": ("qwen2", QWEN, "qwen2"),
    "Qwen2.5, tied": ("qwen2", QWEN | {"tie_word_embeddings": True, "num_key_value_heads": 1}, "qwen2"),
    "Qwen2, windows in no layer": (
        "qwen2",
        QWEN | {"use_sliding_window": True, "max_window_layers": 2, "rope_scaling": LLAMA_3_1["rope_scaling"]},
        "qwen2",
    ),
    "Qwen2, windows in all layers": (
        "qwen2",
        QWEN | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
        "ssscale",
    ),
    "Qwen3": ("qwen3", QWEN | {"head_dim": 12}, "qwen3"),
    "Qwen3, tied": ("qwen3", QWEN | {"tie_word_embeddings": True, "head_dim": 16, "rms_norm_eps": 1e-3}, "qwen3"),
}
TEXT = [0, 200, 3, 77, 8, 150, 299, 41, *range(5, 27)]  # longer than max_position_embeddings


def save_theirs(kind: str, keys: dict[str, Any], folder: Path, tokenizer_file: Path) -> torch.nn.Module:
    """Writes a random model of transformers, in float32, and returns it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | ids | keys)).eval()
    for name, weight in theirs.named_parameters():
        # 1 and 0 in a new model, which would hide norms that are swapped and biases that are missing
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif name.endswith("bias"):
            torch.nn.init.uniform_(weight, -1.0, 1.0)
    theirs.save_pretrained(folder)
    shutil.copy(tokenizer_file, folder / "tokenizer.json")
    return theirs


def logits_of(theirs: Any) -> torch.Tensor:
    """The logits [T, V] of TEXT."""
    with torch.no_grad():
        return theirs(torch.tensor([TEXT])).logits[0]


def main(what: str, folder: Path, tokenizer: str = "") -> None:
    from transformers import AutoModelForCausalLM

    if what == "make":
        for name, (kind, keys, _) in MODELS.items():
            theirs = save_theirs(kind, keys, folder / name, Path(tokenizer))
            torch.save(logits_of(theirs), folder / name / "logits.pt")
    else:
        for path in folder.iterdir():
            theirs, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
            assert not any(loading.values()), loading
            torch.save(logits_of(theirs), path / "logits.pt")
    assert not any(name.split(".")[0] == "ssscale" for name in sys.modules)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
