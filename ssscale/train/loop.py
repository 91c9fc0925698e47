"""The training loop: it enters each part of the run's plan, trains the steps of the part, and calls the hooks.

A part consists of consecutive steps of one stage with one batch size (`ssscale.train.stages.Part`).
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import closing

from ssscale.data.batch import Batch
from ssscale.data.stream import Ahead
from ssscale.errors import UserError
from ssscale.train.faults import Rollback
from ssscale.train.run import Run
from ssscale.train.step import agree, train_step

logger = logging.getLogger("ssscale")


def train(run: Run) -> None:
    """Trains until the last step is done. If the run is already finished, trains nothing.

    Raises Stop if the run ends before its last step, and UserError if the last step cannot be saved.
    """
    with run.going_on():
        if run.plan.total_steps == 0 and run.place.choice.path is None:
            run.saving.save_beginning(run)  # a run of no steps saves its initial weights
        while not run.finished:
            try:
                with run.metrics.open(run.state.step):
                    _train(run)
            except Rollback:
                run.roll_back()
        logger.info("%s is finished: step %d of %d", run.folder, run.state.step, run.plan.total_steps)


def _train(run: Run) -> None:
    run.start_clocks()
    while not run.finished:
        with run.watch.paused():
            run.enter(run.plan.at(run.state.step))
        run.mark("data")
        # Closed at once, whatever happens: the loader's workers ignore the signals with which Python would end them later.
        with closing(run.source.steps(run.config, run.part, run.state)) as steps:
            ahead = Ahead(steps)
            while (batches := _read(ahead)) is not None:
                _advance(run, batches, ahead.prepare)
    run.saving.finish(run)


def _read(ahead: Ahead[Sequence[Batch]]) -> Sequence[Batch] | UserError | None:
    """Returns the batches of the next step, or the error of reading them; None at the end of the part."""
    try:
        return next(ahead, None)
    except UserError as error:
        return error


def _advance(run: Run, batches: Sequence[Batch] | UserError, prepare: Callable[[], None]) -> None:
    """Trains one step. Before the step, calls `agreed` of every hook; after it, calls `act` of each hook that is due.

    batches: of this rank, or the error of reading them. prepare: reads the batches of the next step.
    """
    run.mark("agreement")
    agreed = agree(run, batches)
    if agreed.unread or isinstance(batches, UserError):
        run.end_unread(batches if isinstance(batches, UserError) else None)
    run.measure_memory()
    for hook in run.hooks:
        hook.agreed(run, agreed)
    if agreed.stop:
        run.stop()
    done = train_step(run, batches, agreed.num_targets, prepare)
    run.complete(done)
    for hook in run.hooks:
        if hook.is_due(run.state.step, run.plan.total_steps):
            hook.act(run, done)
    run.begin_step()
