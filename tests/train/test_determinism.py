"""`train.deterministic` sets torch's flags before the training, and what cannot be deterministic is refused."""

from pathlib import Path

import pytest

from ssscale.config import load_config
from ssscale.errors import UserError
from ssscale.validate import validate
from tests.train.commands import run_command
from tests.train.jobs import SMALL

ARGUMENTS = ["config=tiny_ssmax", "data.num_workers=0", *(f"{key}={value}" for key, value in SMALL.items())]


def show_the_flags() -> None:
    """Prints torch's flags when the first step begins."""
    import os

    import torch
    import torch._inductor.config

    from ssscale.train import loop

    train_step = loop.train_step

    def shown(*arguments):
        flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        print(
            "flags",
            *flags,
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch._inductor.config.deterministic,
        )
        return train_step(*arguments)

    loop.train_step = shown


@pytest.mark.parametrize(
    ("value", "flags"),
    [("true", "flags True False :4096:8 False True"), ("false", "flags False False None True False")],
)
def test_the_flags_of_a_run(
    value: str, flags: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.delenv(name, raising=False)
    own = [f"data.path={corpus}", f"run_dir={tmp_path}/run", f"train.deterministic={value}"]
    code, output = run_command("launch.pretrain", [*ARGUMENTS, *own], tmp_path / "log", show_the_flags)
    assert code == 0, output
    assert flags in output
    assert ("train.deterministic: the same bits" in output) == (value == "true")


def test_fire_is_refused_on_a_gpu() -> None:
    config = load_config(["config=350m_fire", "train.deterministic=true"])
    validate(config, 1)
    with pytest.raises(
        UserError, match=r"train\.deterministic does not go with model\.position\.method=fire: a GPU adds up"
    ):
        validate(config, 1, gpu=True)


@pytest.mark.parametrize("name", ["1b_softmax", "1b_ssmax"])
def test_cudnn_is_refused_on_a_gpu(name: str) -> None:
    mixer = name.removeprefix("1b_")
    config = load_config([f"config={name}", "train.deterministic=true", f"model.mixer.{mixer}.backend=cudnn"])
    validate(config, 1)
    with pytest.raises(
        UserError, match=rf"deterministic does not go with model\.mixer\.{mixer}\.backend=cudnn: .* backend=auto"
    ):
        validate(config, 1, gpu=True)
    validate(load_config([f"config={name}", "train.deterministic=true"]), 1, gpu=True)
