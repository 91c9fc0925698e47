"""The sequences of multi-query repeated associative recall (MQRAR), arXiv:2410.17980, Section 5.1."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ssscale.errors import UserError

TEST_SEED = 2**40  # first seed of the test sequences, after the seeds of training steps


class Examples(NamedTuple):
    """A batch. tokens: [B, length] int64. answers: [B, queries] int64, the correct token after each query."""

    tokens: Tensor
    answers: Tensor


@dataclass(frozen=True)
class Task:
    """The rules of a sequence. First, `pairs` keys get one value each. Then each question repeats a key and gives it a
    new value. The model must predict the value that the key had before:

        B 6  E 3  X 1  Z 2  |  E 2  B 1  E ...        after E: 3, after B: 6, after the second E: 2

    Where the paper leaves rules open, they follow MQAR of arXiv:2312.04927. Tokens 0 … num_keys − 1 are keys, and the
    next num_values tokens are values. The keys of a sequence are distinct and drawn uniformly. Values are drawn
    uniformly with repetition. Every question asks for a uniformly drawn key of the sequence. Only questions count in
    loss and accuracy.

    length: tokens of a sequence. Raises UserError if pairs or length do not allow a sequence with a question.
    """

    pairs: int
    length: int = 768
    num_keys: int = 4096
    num_values: int = 4096

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= self.num_keys:
            raise UserError(f"pairs={self.pairs} must be from 1 to num_keys={self.num_keys}")
        if self.num_values < 1:
            raise UserError(f"num_values={self.num_values} must be at least 1")
        if self.length % 2 or self.num_queries < 1:
            raise UserError(
                f"length={self.length} must be even and leave room for a question after {self.pairs} pairs: "
                f"at least {2 * self.pairs + 2}"
            )

    @property
    def num_queries(self) -> int:
        return self.length // 2 - self.pairs

    @property
    def vocab_size(self) -> int:
        return self.num_keys + self.num_values

    def query_positions(self, device: torch.device) -> Tensor:
        """Return the positions of the keys in questions, [queries] int64: every other token after the pairs."""
        return torch.arange(2 * self.pairs, self.length, 2, device=device)

    def examples(self, count: int, seed: int, device: torch.device) -> Examples:
        """Return `count` sequences. The same seed gives the same sequences on the same kind of device."""
        generator = torch.Generator(device=device).manual_seed(seed)

        def draw(high: int, size: int) -> Tensor:
            return torch.randint(high, (count, size), generator=generator, device=device)

        keys = torch.rand(count, self.num_keys, generator=generator, device=device).argsort(1)[:, : self.pairs]
        first = draw(self.num_values, self.pairs) + self.num_keys
        asked = draw(self.pairs, self.num_queries)
        new = draw(self.num_values, self.num_queries) + self.num_keys
        tokens = torch.empty(count, self.length, dtype=torch.int64, device=device)
        behind = 2 * self.pairs
        tokens[:, 0:behind:2], tokens[:, 1:behind:2] = keys, first
        tokens[:, behind::2], tokens[:, behind + 1 :: 2] = keys.gather(1, asked), new
        # The index of the last earlier question for the same key, counted from 1. 0: the key has its first value.
        number = torch.arange(1, self.num_queries + 1, device=device)
        earlier = (asked[:, :, None] == asked[:, None, :]) & (number[:, None] > number)
        latest = (earlier * number).amax(-1)
        answers = torch.where(latest > 0, new.gather(1, (latest - 1).clamp(min=0)), first.gather(1, asked))
        return Examples(tokens, answers)
