"""Warnings before a run starts, for settings that can run but did badly in measurements."""

from ssscale.config.schema import Config
from ssscale.train.schedule import stage_learning_rate
from ssscale.train.stages import Plan

# Learning rate of the blocks' matrices times hidden_size, from docs/results/width.md for widths 256 to 1,024. With width
# transfer, the best runs reach this value, and no run exceeded it. Without, each run above it ended at least 0.35 nats
# worse than the best run of its width.
MATRIX_LR_TIMES_WIDTH = {"with": 8.0, "without": 2.0}


def learning_rate_advice(config: Config) -> str | None:
    """Returns a warning if the learning rate of the blocks' matrices is too high for the width, else None."""
    stages = config.train.stages
    found = [
        (stage_learning_rate(stages, config.train.batch_size, index, stage.schedule.warmup_tokens), own.model)
        for index, (stage, own) in enumerate(zip(stages, Plan(config).configs, strict=True))
    ]
    peak, model = max(found, key=lambda entry: entry[0] / entry[1].matrix_lr_divisor)
    transfer = "with" if model.width.base_hidden_size else "without"
    times_width = MATRIX_LR_TIMES_WIDTH[transfer]
    lr, most = peak / model.matrix_lr_divisor, times_width / model.hidden_size
    if lr <= most:
        return None
    return (
        f"the matrices' learning rate reaches {lr:.2g}, above {times_width:g} / hidden_size = {most:.2g}, the most that is "
        f"known to train well {transfer} width transfer (docs/results/width.md); lower train.stages.N.schedule.lr to at most "
        f"{most * model.matrix_lr_divisor:.2g}"
        + ("" if transfer == "with" else ", or include model/power_width, which divides it by the width")
    )
