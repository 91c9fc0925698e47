"""Chance and 95 % intervals of task scores."""

import pytest

from eval.checkpoint.chance import WRITTEN, against_chance, interval
from eval.checkpoint.in_training import values_of
from eval.checkpoint.paper import SUITE, chance_rows
from eval.checkpoint.scoring import _scored, guessing, make_result
from eval.checkpoint.tasks.local.files import FILES

CHOICES = {
    "arc_challenge",
    "arc_easy",
    "hellaswag",
    "mmlu",
    "mmlu_5shot",
    "openbookqa",
    "piqa",
    "race",
    "sciq",
    "winogrande",
}
LIMITS = {"num_fewshot": 0, "limit": None, "length": 64}


def test_wilsons_interval_is_that_of_the_literature():
    """Bounds are the roots of (p − x)² = z² x (1 − x) / n (Wilson 1927)."""
    for successes, n in ((3, 10), (263, 1000), (1, 7)):
        p = successes / n
        for x in interval("acc", p, None, n):
            assert (p - x) ** 2 == pytest.approx(1.959964**2 * x * (1 - x) / n, rel=1e-5)
    low, high = interval("exact_match", 0.0, 0.0, 1319)
    assert low == 0
    assert high == pytest.approx(1.959964**2 / (1319 + 1.959964**2), rel=1e-5)
    assert interval("acc", 1.0, 0.0, 20)[1] == 1
    assert interval("written", 0.0, 0.0, 3) is None  # all documents score the same
    assert interval("word_perplexity", 50.0, 2.0, 62) == pytest.approx((46.08, 53.92), abs=0.01)
    assert interval("word_perplexity", 50.0, None, 62) is None


def test_against_chance():
    assert against_chance((0.26, 0.30), 0.25) == "above"
    assert against_chance((0.20, 0.24), 0.25) == "below"
    assert against_chance((0.24, 0.30), 0.25) == "no"
    assert against_chance((0.0, 0.003), 0.0) == "no"
    assert against_chance(None, 0.25) == against_chance((0.1, 0.2), None) == ""


def test_every_task_but_wikitext_has_a_chance():
    assert set(FILES) - CHOICES - set(WRITTEN) == {"wikitext"}
    assert guessing("niah_single_1@4096", "string_match,none") == 0
    assert guessing("ruler_qa_squad@4096", "string_match,none") is None
    assert guessing("lambada_openai", "acc,none") == 0.017
    assert guessing("lambada_openai", "perplexity,none") is None
    assert all(entry.source and 0 <= entry.rate < 0.05 for entry in WRITTEN.values())


def test_rows_of_the_papers_tables():
    """A score above chance and one that is not; a task without result, the average and the perplexity have no chance."""
    arc = {"metrics": {"acc_norm,none": 0.29, "acc_norm_stderr,none": 0.0093}, "items": 2376, "chance": 0.25}
    piqa = {"metrics": {"acc_norm,none": 0.51, "acc_norm_stderr,none": 0.0117}, "items": 1838, "chance": 0.5}
    pages = {
        "metrics": {"word_perplexity,none": 60.0, "word_perplexity_stderr,none": "N/A"},
        "items": 62,
        "chance": None,
    }
    (shown, chance, excludes), _, gsm = chance_rows({"arc_easy": arc, "piqa": piqa, "wikitext": pages})
    assert (shown[1], chance[1], excludes[1]) == ("27.2–30.9", "25.0", "above")
    assert (chance[4], excludes[4]) == ("50.0", "no")
    assert {shown[0], chance[0], excludes[0], shown[-1], chance[-1], excludes[-2]} == {"–"}
    assert gsm == (("–", "–"),) * 3
    assert len(shown) == 10
    assert set(SUITE) <= set(FILES)


@pytest.mark.parametrize(("metrics", "asked"), [(["acc"], 4), (["acc", "acc_mutual_info"], 8)])
def test_chance_counts_choices_and_not_requests(metrics, asked):
    """For mutual information, lm-eval also asks for each choice without its question."""
    samples = [{"doc_id": 0, "arguments": [("question", f" {n}") for n in range(asked)]}]
    config = {"output_type": "multiple_choice", "metric_list": [{"metric": name} for name in metrics]}
    output = {
        "samples": {"t": samples},
        "results": {"t": {"acc,none": 0.5}},
        "configs": {"t": config},
        "n-shot": {"t": 0},
    }
    assert _scored("t", output, None, 64).result.chance == 0.25


def test_training_logs_the_filter_that_results_name():
    metrics = {
        "exact_match,strict": 0.1,
        "exact_match_stderr,strict": 0.01,
        "exact_match,flexible": 0.3,
        "f1,none": 0.2,
    }
    result = make_result("t", metrics, chance=None, items=1, **LIMITS)
    assert values_of([result]) == {"t/exact_match": result.value, "t/f1": 0.2}
    assert result.value == 0.1


def test_lambadas_result_is_the_share_that_has_a_chance():
    """lm-eval gives its perplexity first, which has none, so the documented chance was never shown."""
    metrics = {"perplexity,none": 40.0, "acc,none": 0.3}
    output = {
        "samples": {"lambada_openai": [{"doc_id": 0, "arguments": [("a", " b")]}]},
        "results": {"lambada_openai": metrics},
        "configs": {"lambada_openai": {"output_type": "loglikelihood"}},
        "n-shot": {"lambada_openai": 0},
    }
    result = _scored("lambada_openai", output, None, 64).result
    assert (result.metric, result.value, result.chance) == ("acc", 0.3, WRITTEN["lambada_openai"].rate)
    assert make_result("t", {"f1,none": 0.2, "x,none": 1.0}, chance=None, items=1, **LIMITS).metric == "f1"
