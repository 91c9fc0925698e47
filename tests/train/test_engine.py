"""bf16 with fp32 master weights, as GPUs train, against float32."""

from tests.distributed.test_training import MODELS
from tests.pool import Pool


def test_bf16_training_follows_fp32(pool1: Pool) -> None:
    arguments = {"model": MODELS["ssmax"], "microbatch": 2, "steps": 4}
    (exact,) = pool1.run("tests.distributed.jobs:train", **arguments)
    (rounded,) = pool1.run("tests.distributed.jobs:train", **arguments, bf16=True)
    for a, b in zip(exact["losses"], rounded["losses"]):
        assert abs(a - b) < 0.03  # bf16 keeps 8 bits: losses around 6 are known to 0.02
    for a, b in zip(exact["norms"], rounded["norms"]):
        assert abs(a - b) < 0.05 * a
