"""Jobs for the worker pool: evaluations in several processes."""

from eval.checkpoint.environment import prepare

prepare()

from tests.distributed.jobs import regroup


def evaluate_file(arguments: list[str]) -> None:
    from launch.evaluate import main

    regroup(1)
    main(arguments)


def scores(checkpoint: str, names: list[str], eval_data: str, tensor: int) -> dict[str, list[float]]:
    """Log-likelihoods of each task's requests, in order, as this rank has them."""
    from pathlib import Path

    from eval.checkpoint.harness import PackedLM
    from eval.checkpoint.suite import find_tasks
    from eval.checkpoint.text import TextTokenizer
    from ssscale.train.build import load_for_inference
    from ssscale.train.checkpoint_folder import find_checkpoint

    model, config = load_for_inference(Path(checkpoint), regroup(tensor))
    lm = PackedLM(model, TextTokenizer.of_checkpoint(find_checkpoint(Path(checkpoint))), config.data.length)
    found: dict[str, list[float]] = {}
    for name in names:
        ((_, task),) = find_tasks([name], {"eval_data": eval_data}).load([name])["tasks"].items()
        task.build_all_requests(rank=0, world_size=1)
        requests = task.instances
        if requests[0].request_type == "loglikelihood_rolling":
            found[name] = lm.loglikelihood_rolling(requests)
        else:
            found[name] = [value for value, _ in lm.loglikelihood(requests)]
    return found


def evaluate_failing(arguments: list[str]) -> str | None:
    """The sentence that the main rank ends with; the others end without one."""
    from ssscale.errors import UserError

    try:
        evaluate_file(arguments)
    except UserError as error:
        return str(error)
    return None
