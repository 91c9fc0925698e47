import json
import random
from pathlib import Path

import pytest

from data_prep.__main__ import main as data_prep
from eval.checkpoint.harness import PackedLM
from eval.checkpoint.text import TextTokenizer
from ssscale.config import to_yaml
from ssscale.config.schema import Config, DataConfig, ModelConfig, ScheduleConfig, StageConfig, TrainConfig
from ssscale.data.stream import PackedData
from ssscale.hf.convert import WeightsOnly
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups
from ssscale.train.checkpoint import TrainState
from ssscale.train.save import save_checkpoint

LENGTH, VOCAB = 128, 400
SYLLABLES = ("stick", "break", "soft", "max", "ing", "ed", "er", "la", "mo", "ti", "ra", "ne", "po", "wen")


def make_documents(number: int, seed: int) -> list[str]:
    """Sentences of made-up words, a few of them frequent; documents from a few words to several rows."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(120)]
    frequencies = [1 / (rank + 2) for rank in range(len(words))]
    documents = []
    for index in range(number):
        text = rng.choices(words, frequencies, k=int(rng.paretovariate(0.9) * 40) % 900 + 5)
        sentences = [" ".join(text[i : i + 9]).capitalize() + "." for i in range(0, len(text), 9)]
        documents.append(f"{seed}.{index} " + " ".join(sentences) + ("\n" if index % 2 else ""))
    return documents


@pytest.fixture(scope="session")
def documents() -> dict[str, list[str]]:
    """Held-out documents by source."""
    return {"notes": make_documents(40, 1), "tales": make_documents(20, 2)}


@pytest.fixture(scope="session")
def data_folder(documents: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two sources packed to rows of LENGTH tokens."""
    root = tmp_path_factory.mktemp("corpus")
    flags = []
    for name, held_out in documents.items():
        for kind, texts in (("", make_documents(50, 3)), (":valid", held_out)):
            file = root / f"{name}{kind[1:]}.jsonl"
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            flags += ["--source", f"{name}={file}{kind}"]
    out = root / "data"
    sizes = ["--train-vocab-size", str(VOCAB), "--length", str(LENGTH), "--workers", "1", "--valid-fraction", "0"]
    assert data_prep(["pack", "--out", str(out), *sizes, *flags]) == 0
    return str(out)


@pytest.fixture(scope="session")
def valid(data_folder: str) -> PackedData:
    return PackedData.open(data_folder, "valid")


@pytest.fixture(scope="session")
def config(data_folder: str) -> Config:
    model = ModelConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_heads=2,
        vocab_size=VOCAB,
        tie_embeddings=True,
        init_std=0.3,
    )
    stages = [
        StageConfig("stable", 6400, ScheduleConfig(lr=1e-2)),
        StageConfig("decay", 6400, ScheduleConfig(lr=1e-2)),
    ]
    return Config(
        name="trial",
        model=model,
        data=DataConfig(path=data_folder, length=LENGTH),
        train=TrainConfig(batch_size=8, microbatch=4, stages=stages),
    )


@pytest.fixture(scope="session")
def model(config: Config, groups: Groups) -> Decoder:
    """Random weights large enough that its predictions are far from uniform."""
    decoder = Decoder(config.model, groups, LENGTH)
    initialize_weights(decoder, config.model, groups, seed=5)
    return decoder.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tokenizer(valid: PackedData) -> TextTokenizer:
    entry = valid.manifest["tokenizer"]
    return TextTokenizer(valid.tokenizer_file, entry["bos_id"], entry["eos_id"])


@pytest.fixture(scope="session")
def lm(model: Decoder, tokenizer: TextTokenizer) -> PackedLM:
    return PackedLM(model, tokenizer, LENGTH)


@pytest.fixture
def run(tmp_path: Path, config: Config, model: Decoder, groups: Groups, valid: PackedData) -> Path:
    """A run folder with a checkpoint and the metrics of ten logged steps."""
    folder = tmp_path / "runs" / "trial"
    files = {"config.yaml": to_yaml(config), "tokenizer.json": Path(valid.tokenizer_file).read_text()}
    save_checkpoint(folder / "checkpoints", WeightsOnly(model), groups, TrainState(step=10), files)
    (folder / "config.yaml").write_text(files["config.yaml"])
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 11):
            tokens = step * 1024
            stage = "stable" if tokens <= 6400 else "decay"
            record = {"step": step, "tokens": tokens, "stage": stage, "loss": 6 - step / 4, "lr": 0.01 / step}
            file.write(json.dumps(record | {"grad_norm": 1.0, "tokens_per_second": 100.0 * step}) + "\n")
            if step % 5 == 0:
                file.write(json.dumps({"step": step, "tokens": tokens, "valid_loss": 6.2 - step / 4}) + "\n")
    return folder
