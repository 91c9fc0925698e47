"""The hooks of a run, in the order in which they are called after a step."""

from ssscale.config.registry import HOOKS
from ssscale.config.schema import TrainConfig
from ssscale.train.hooks.base import Hook
from ssscale.train.hooks.guard import Guard, Reached
from ssscale.train.hooks.observation import Observation
from ssscale.train.hooks.profile import Profile
from ssscale.train.hooks.records import Records
from ssscale.train.hooks.spikes import Skips, Spikes
from ssscale.train.hooks.stragglers import stragglers


def standard_hooks(train: TrainConfig, *scores: Hook) -> list[Hook]:
    """Returns the hooks that every run has, and those that plugins have registered.

    scores: the hooks that score the model. They are called after Guard, so that broken weights are not scored.
    """
    return [
        Profile(train.profile, train.profile_ranks),
        Spikes(train.spike_z),
        *stragglers(train.straggler_every),  # before Records, which drops the marks of the step
        Records(train.log_every),
        Skips(train.max_skipped),
        Reached(),
        Guard(train.guard_every),
        *scores,
        Observation(train.observe_every),
        *(hook() for hook in HOOKS.values()),
    ]
