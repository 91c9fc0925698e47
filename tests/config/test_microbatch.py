"""`train.microbatch=auto`: the number that a layout gets, against the estimate asked for each divisor by itself."""

from dataclasses import replace

import pytest

from launch import estimate as command
from ssscale.config import from_yaml, load_config, to_yaml
from ssscale.config.choices import Auto
from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.train.estimate import memory_per_gpu
from ssscale.train.microbatch import H100_MEMORY, with_microbatch
from ssscale.train.stages import stage_config
from ssscale.validate import validate

GIB = 2**30
STUDIES = ["162m_softmax", "162m_ssmax_pn", "162m_ssmax_during", "350m_sb", "350m_rope", "350m_fire", "350m_alibi"]


def needed(config: Config, rows: int, gpus: int) -> float:
    """GiB by the estimate, and what CUDA takes besides."""
    changed = replace(config, train=replace(config.train, microbatch=rows))
    return 1.05 * memory_per_gpu(changed, gpus).total / GIB + 3


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("gpus", [1, 8, 64, 128, 256])
def test_the_most_rows_that_divide_and_fit(name: str, gpus: int) -> None:
    config = load_config([f"config={name}"])
    assert config.train.microbatch is Auto.auto
    validate(config, world_size=gpus, gpu=True)
    rows = config.train.batch_size // gpus
    chosen = with_microbatch(config, config.train.batch_size, gpus).train.microbatch_rows
    assert rows % chosen == 0
    assert needed(config, chosen, gpus) <= 79
    most = 65_536 // config.data.length
    assert chosen <= most
    larger = [number for number in range(chosen + 1, min(rows, most) + 1) if rows % number == 0]
    assert all(needed(config, number, gpus) > 79 for number in larger)


@pytest.mark.parametrize(("gpus", "rows"), [(8, 32), (64, 8), (128, 4), (256, 2), (512, 1)])
def test_350m_by_hand(gpus: int, rows: int) -> None:
    """512 rows per step; 32 rows of 2,048 tokens are 59 GiB of an 80 GB GPU, 64 would be 115."""
    assert with_microbatch(load_config(["config=350m_sb"]), 512, gpus).train.microbatch_rows == rows


def test_a_smaller_gpu_and_a_longer_row_take_fewer() -> None:
    config = load_config(["config=350m_sb"])
    assert with_microbatch(config, 512, 8, memory=40 * GIB).train.microbatch_rows == 16
    assert with_microbatch(config, 512, 8, memory=1 * GIB).train.microbatch_rows == 1  # tried, and said
    longer = replace(config, data=replace(config.data, length=8192))
    assert with_microbatch(longer, 512, 8).train.microbatch_rows == 8


def test_stages_and_warmups_get_their_own() -> None:
    arguments = ["config=350m_rope", "train.stages.0.batch_warmup=[{batch_size: 128, tokens: 262144000}]"]
    config = load_config(arguments)
    validate(config, world_size=64, gpu=True)
    own = stage_config(config, 0)
    assert [with_microbatch(own, rows, 64).train.microbatch_rows for rows in (128, 512)] == [2, 8]
    fixed = load_config(["config=350m_rope", "train.microbatch=2", "train.stages.0.microbatch=auto"])
    assert stage_config(fixed, 0).train.microbatch is Auto.auto


def test_sequence_parallelism_takes_numbers_whose_tokens_divide() -> None:
    odd = ["config=350m_rope", "parallel.tensor=2", "data.length=255", "train.batch_size=6"]
    config = load_config(odd)
    assert with_microbatch(config, 12, 2, memory=8 * GIB).train.microbatch_rows in (4, 6, 12)
    validate(config, world_size=2)
    with pytest.raises(UserError, match=r"finds no divisor of 3 rows per rank .* set parallel.sequence=false"):
        validate(config, world_size=4)


@pytest.mark.parametrize(
    ("arguments", "gpus", "words"),
    [
        (["config=162m_softmax"], 96, "use 64 or 128 processes, or train.batch_size=2016 or 2112"),
        (["config=350m_rope", "parallel.tensor=2"], 96, "48 data-parallel ranks of 96 processes: use 64 or 128 processes"),
        (["config=350m_rope_8k"], 256, "or parallel.ulysses=2, by which 2 ranks share a row"),
        (["config=350m_window512", "train.batch_size=8"], 256, "use 4 or 8 processes, or train.batch_size=256"),
    ],
)  # fmt: skip
def test_too_many_ranks_end_in_what_works(arguments: list[str], gpus: int, words: str) -> None:
    config = load_config(arguments)
    with pytest.raises(UserError, match=words):
        validate(config, world_size=gpus, gpu=True)


def test_what_the_sentence_offers_works() -> None:
    validate(load_config(["config=350m_rope_8k", "parallel.ulysses=2"]), world_size=256, gpu=True)
    validate(load_config(["config=162m_softmax", "train.batch_size=2016"]), world_size=96, gpu=True)
    validate(load_config(["config=350m_rope", "parallel.tensor=2"]), world_size=128, gpu=True)


@pytest.mark.parametrize("text", ["all", "0.5", "null", "true", "[4]"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"train.microbatch must be a whole number or auto, not"):
        load_config(["config=tiny_sb", f"train.microbatch={text}"])


def test_it_survives_a_file() -> None:
    config = load_config(["config=tiny_sb", "train.microbatch=auto", "train.stages.1.microbatch=4"])
    assert from_yaml(to_yaml(config)) == config
    validate(config)


def test_the_estimate_says_what_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["config=350m_sb", "gpus=8"])
    assert "32 rows × 2,048 tokens" in capsys.readouterr().out
    command.main(["config=350m_sb", "gpus=8", "gpu_memory=4"])
    out = capsys.readouterr().out
    assert "1 rows × 2,048 tokens" in out
    assert "This does not fit a GPU of 4 GiB" in out
    assert H100_MEMORY == 79 * GIB


def test_a_run_of_minutes_does_not_take_zero_days(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["config=50m_sb", "gpus=8"])
    days = next(line for line in capsys.readouterr().out.splitlines() if "days to the budget" in line).split("|")[2]
    assert 0 < float(days) < 0.1
