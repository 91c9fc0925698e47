"""The module that holds learned tensors other than matrices and the norms of blocks."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ssscale.model.weight import Weight
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import replicated
from ssscale.parallel.splits import mark_split


class Weights(nn.Module):
    """The learned tensors that a mixer, a position method or the projections declare, filled with their start values.

    A tensor with a `split` dimension is divided over the tensor-parallel ranks. Each rank holds its slice.
    """

    def __init__(self, declared: Mapping[str, Weight], groups: Groups) -> None:
        super().__init__()
        self.groups, self.declared = groups, dict(declared)
        for name, weight in declared.items():
            shape = list(weight.shape)
            if weight.split is not None:
                shape[weight.split] //= groups.tensor_size
            parameter = nn.Parameter(torch.full(shape, weight.start))
            parameter.declared = weight  # for `initialize_weights` and `load_switched`
            if weight.split is not None:
                mark_split(parameter, weight.split, (weight.shape[weight.split],))
            self.register_parameter(name, parameter)

    def __contains__(self, name: str) -> bool:
        return name in self.declared

    def take(self, name: str) -> Tensor:
        """Returns the tensor for use with this rank's heads.

        If all ranks hold the whole tensor, its gradient is summed over the tensor-parallel ranks.
        """
        weight: Tensor = getattr(self, name)
        return replicated(weight, self.groups) if self.declared[name].split is None else weight

    def all(self) -> dict[str, Tensor]:
        return {name: self.take(name) for name in self.declared}
