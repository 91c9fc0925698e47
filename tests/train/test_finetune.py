"""Fine-tuning: SQuAD's form, batches whose targets are the answers, a step against plain torch, runs that resume."""

import json
import signal
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import zstandard

from ssscale.config import to_yaml
from ssscale.config.schema import Config, DataConfig, ModelConfig
from ssscale.data.questions import Example, make_batch, make_example, read_squad
from ssscale.errors import Stop, UserError
from ssscale.hf.convert import WeightsOnly
from ssscale.layout import IGNORE, PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.train.build import load_for_inference
from ssscale.train.checkpoint import TrainState
from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.train.clock import Stopwatch
from ssscale.train.finetune import epoch_order, finetuning, finetuning_config
from ssscale.train.loop import train
from ssscale.train.save import save_checkpoint

SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": "A stick is broken. ",
                    "qas": [
                        {"question": "What is broken? ", "answers": [{"text": "A stick"}, {"text": "stick"}]},
                        {"question": "Who broke it?", "answers": [], "is_impossible": True},
                        {"question": " ", "answers": [{"text": "stick"}]},
                    ],
                }
            ]
        }
    ]
}


def encode(text: str) -> list[int]:
    return [1 + byte % 60 for byte in text.encode()]


@pytest.mark.parametrize("name", ["a.json", "a.json.zst"])
def test_squad(tmp_path, name):
    raw = json.dumps(SQUAD).encode()
    (tmp_path / name).write_bytes(zstandard.compress(raw) if name.endswith("zst") else raw)
    (question,) = read_squad(tmp_path / name)
    example = make_example(question, encode, 0)
    assert example.tokens == [
        0,
        *encode("A stick is broken."),
        *encode("\n\nQuestion: What is broken?\nAnswer: A stick"),
    ]
    assert example.tokens[example.prompt :] == encode(" A stick")


# Half of a surrogate pair, which no tokenizer takes.
LONE = r'{"data": [{"paragraphs": [{"context": "\ud800 a", "qas": [{"question": "b", "answers": [{"text": "c"}]}]}]}]}'


@pytest.mark.parametrize("text", ["{", "[]", '{"data": [1]}', '{"data": []}', LONE])
def test_other_files(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=r"^questions="):
        read_squad(tmp_path / "a.json")


def test_targets_are_the_answers():
    examples = [Example([1, 2, 3, 4, 5], 3), Example([6, 7, 8], 2), Example([9] * 20, 19)]
    batch = make_batch(examples, 24)
    assert len(batch.tokens) == 1024
    assert batch.labels[:8].tolist() == [IGNORE, IGNORE, 4, 5, IGNORE, IGNORE, 8, IGNORE]
    assert batch.num_targets == 4 == int((batch.labels != IGNORE).sum())
    assert batch.layout.cu_seqlens[:4].tolist() == [0, 5, 8, 28]
    assert int(batch.layout.cu_seqlens.diff().max()) <= 24
    assert int(batch.layout.cu_seqlens[-1]) == 1024


def test_recipe():
    config = finetuning_config(Config(), "a", "b", num_examples=86_820, epochs=10, lr=2e-5, batch=128, microbatch=32)
    (stage,) = config.train.stages
    assert stage.tokens == 6782 * 128 * config.data.length
    assert stage.schedule.warmup_tokens == 86_820 * config.data.length
    assert config.optimizer.adamw.betas == (0.9, 0.999)
    assert config.optimizer.weight_decay == 0
    with pytest.raises(UserError, match="do not make one batch"):
        finetuning_config(Config(), "a", "b", num_examples=10, epochs=2, lr=1, batch=128, microbatch=1)
    orders = [epoch_order(50, 0, epoch) for epoch in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == list(range(50))


@pytest.fixture
def pretrained(tmp_path, groups):
    model = ModelConfig(
        num_layers=1, hidden_size=16, ffn_hidden_size=32, num_heads=2, vocab_size=64, tie_embeddings=True
    )
    config = Config(model=model, data=DataConfig(length=64))
    decoder = Decoder(model, groups, 64)
    initialize_weights(decoder, model, groups, seed=0)
    folder = tmp_path / "pretrained"
    save_checkpoint(
        folder / "checkpoints", WeightsOnly(decoder), groups, TrainState(step=3), {"config.yaml": to_yaml(config)}
    )
    return config, folder, decoder


def examples():
    generator = torch.Generator().manual_seed(0)
    return [Example(torch.randint(64, (n,), generator=generator).tolist(), n - 1 - n % 4) for n in range(8, 21)]


def settings(config, source, folder):
    return finetuning_config(
        config, str(source), str(folder), num_examples=13, epochs=2, lr=1e-2, batch=4, microbatch=2
    )


def test_a_step_is_plain_torchs(pretrained, tmp_path, groups):
    """The gradient of the mean over examples of the sum over answers, in one AdamW step from the same weights."""
    config, source, decoder = pretrained
    config = settings(config, source, tmp_path / "run")
    config = replace(config, optimizer=replace(config.optimizer, clip=0.0))
    run = finetuning(replace(config, train=replace(config.train, max_steps=1, log_every=1)), groups, examples(), {})
    train(run)
    record = records(tmp_path / "run")[0]
    loss, lr = record["loss"], record["lr"]
    chosen = [examples()[index] for index in epoch_order(13, config.train.seed, 0)[:4]]
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.0)
    total = 0.0
    for example in chosen:
        ids = torch.tensor(example.tokens)
        logits = decoder(ids, PackedLayout.from_lengths([len(ids)]))[example.prompt - 1 : -1]
        total = total + F.cross_entropy(logits, ids[example.prompt :], reduction="sum")
    (total / 4).backward()
    optimizer.step()
    tokens = sum(len(e.tokens) - e.prompt for e in chosen)
    assert loss == pytest.approx(float(total) / tokens, rel=1e-5)
    for (name, exact), weight in zip(decoder.named_parameters(), run.engine.module.parameters(), strict=True):
        torch.testing.assert_close(weight, exact, atol=1e-5, rtol=1e-4, msg=name)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_speed_counts_the_tokens_of_the_examples(pretrained, tmp_path, groups, monkeypatch):
    """Not whole rows: an example fills only a part of one."""
    config, source, _ = pretrained
    monkeypatch.setattr(Stopwatch, "lap", lambda watch, tokens: tokens)
    config = settings(config, source, tmp_path / "run")
    run = finetuning(replace(config, train=replace(config.train, log_every=1)), groups, examples(), {})
    train(run)
    order = [n for epoch in (0, 1) for n in epoch_order(13, config.train.seed, epoch)]
    sizes = [len(examples()[n].tokens) for n in order]
    assert [record["tokens_per_second"] for record in records(tmp_path / "run") if "loss" in record] == [
        sum(sizes[: 4 * step]) for step in range(1, 7)
    ]


def test_a_stopped_run_goes_on(pretrained, tmp_path, groups):
    config, source, _ = pretrained

    class Asked:
        """Asks to stop once a step has been trained."""

        times = 0

        @property
        def received(self):
            self.times += 1
            return signal.SIGUSR1 if self.times > 1 else None

    straight = finetuning(settings(config, source, tmp_path / "a"), groups, examples(), {})
    train(straight)
    assert straight.plan.total_steps == 6
    for step in (1, 2):
        stopped = finetuning(settings(config, source, tmp_path / "b"), groups, examples(), {}, Asked())
        with pytest.raises(Stop, match=f"step {step} is saved"):
            train(stopped)
    again = finetuning(settings(config, source, tmp_path / "b"), groups, examples(), {})
    train(again)
    for one, other in zip(straight.engine.module.parameters(), again.engine.module.parameters(), strict=True):
        assert torch.equal(one, other)
    logged = [record["step"] for record in records(tmp_path / "b") if "loss" in record]
    assert logged == sorted(set(logged))
    assert logged[-1] == 6
    model, _ = load_for_inference(tmp_path / "b", groups)
    assert torch.equal(model.norm.weight, again.engine.module.norm.weight)
    train(finetuning(settings(config, source, tmp_path / "b"), groups, examples(), {}))
    assert [path.name for path in list_checkpoints(tmp_path / "b" / "checkpoints")][-1] == "step-00000006"
    with pytest.raises(UserError, match="questions= are not those"):
        finetuning(settings(config, source, tmp_path / "b"), groups, examples()[1:] + examples()[:1], {})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["from=x"], r"questions=FILE\[,FILE...\] is missing"),
        (["from=x", "questions=y", "run_dir=z"], "from=x: there is no such folder"),
        (["from=x", "questions=y", "run_dir=z", "model.vocab_size=3"], "unknown argument 'model.vocab_size=3'"),
        (["from=x", "questions=y", "run_dir=z", "epochs=many"], "epochs must be a number"),
        (
            ["from=x", "questions=y", "run_dir=z", "train.microbatch=2"],
            "train.microbatch=2 has no effect here: use mic",
        ),
        (
            ["from=x", "questions=y", "run_dir=z", "train.stages.0.schedule.lr=1"],
            "has no effect here: use lr= and epochs=",
        ),
        (
            ["from=x", "questions=y", "run_dir=z", "train.eval_every=1"],
            "train.eval_every=1 has no effect here: fine-tuning",
        ),
        (["from=x", "questions=y", "run_dir=z", "train.tasks=[cloze]"], "no validation split and scores no tasks"),
        (["from=x", "questions=y", "run_dir=z", "train.keep_best=true"], "train.keep_best=true has no effect here"),
    ],
)
def test_command_says_what_is_wrong(arguments, said, tmp_path, monkeypatch):
    from launch import finetune

    monkeypatch.chdir(tmp_path)  # where there is no folder x
    with pytest.raises(UserError, match=said.replace("'", ".")):
        finetune.main(arguments)


def test_the_best_checkpoint_of_pretraining_binds_no_key(pretrained, tmp_path, monkeypatch):
    """A run that kept its best checkpoint is fine-tuned without saves."""
    from launch import finetune

    config, source, _ = pretrained
    kept = replace(config, train=replace(config.train, keep_best=True))
    monkeypatch.setattr(finetune, "saved_config", lambda checkpoint: kept)
    (tmp_path / "a.json").write_text("{}")
    options = {"from": str(source), "questions": f"{tmp_path}/a.json", "run_dir": str(tmp_path / "run")}
    train = finetune.checked(options, ["train.save_every=0"])[1].train
    assert (train.keep_best, train.save_every) == (False, 0)


def test_a_file_of_questions_counts_once(pretrained, tmp_path):
    """Also under a second name: its questions would have twice the weight."""
    from launch import finetune

    _, source, _ = pretrained
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").symlink_to(tmp_path / "a.json")
    arguments = [f"from={source}", f"run_dir={tmp_path / 'run'}", f"questions={tmp_path}/a.json,{tmp_path}/b.json"]
    with pytest.raises(UserError, match=r"/b\.json is named twice"):
        finetune.main(arguments)


def test_nan_goes_back_and_passes_over_the_examples(pretrained, tmp_path, groups, monkeypatch):
    """As in pretraining: steps 1 and 2 take examples 0 to 7 of the epoch, 8 to 11 are passed over."""
    config, source, _ = pretrained
    config = settings(config, source, tmp_path / "run")
    config = replace(config, train=replace(config.train, max_skipped=1, save_every=1, log_every=1))
    original, calls = Decoder.forward, []

    def forward(self, *arguments, **more):
        losses, terms = original(self, *arguments, **more)
        calls.append(1)
        return (losses * torch.nan if len(calls) in (5, 6) else losses), terms  # step 3 of two microbatches each

    monkeypatch.setattr(Decoder, "forward", forward)
    run = finetuning(config, groups, examples(), {})
    train(run)
    assert run.state.skipped == ((2, 4),)
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "skipped", "rollback"]
    assert [record["step"] for record in records(tmp_path / "run") if "loss" in record] == [1, 2, 3, 4, 5, 6]
    order = [index for epoch in (0, 1) for index in epoch_order(13, config.train.seed, epoch)]
    assert run.source.rows(range(8, 16))["examples"] == order[8:16]
    assert run.state.samples == 28
