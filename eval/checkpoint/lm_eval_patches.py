"""What is changed in lm-eval (0.4.13), each for as long as a `with` block lasts."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from lm_eval import utils


def without_environment() -> AbstractContextManager[Any]:
    """simple_evaluate adds a description of the machine to its results, for which it waits seconds for `pip list`."""
    return mock.patch("lm_eval.evaluator.add_env_info")


def templates_end_with(finalize: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Its Jinja environment has no other way to see what a template prints, and prints a missing field as nothing."""
    return mock.patch.object(utils.env, "finalize", finalize)


def download_gives(content: Any) -> AbstractContextManager[Any]:
    """RULER's question answering reads no local file: its readers download their JSON."""
    from lm_eval.tasks.ruler import qa_utils

    return mock.patch.object(qa_utils, "download_json", return_value=content)


@contextmanager
def importing_ruler() -> Iterator[None]:
    """RULER's prepare_niah downloads a sentence splitter and reads word lists as it is imported; neither is used here."""
    no_words = SimpleNamespace(_categories=dict.fromkeys(("adjectives", "nouns", "verbs"), ()))
    with mock.patch("nltk.data.find"), mock.patch("wonderwords.RandomWord", return_value=no_words):
        yield


@contextmanager
def ruler_uses(replacements: list[tuple[ModuleType, str, Any]]) -> Iterator[None]:
    """RULER's generators take no word list, sentence splitter, random generator or progress bar: they read globals."""
    with ExitStack() as stack:
        for module, name, value in replacements:
            stack.enter_context(mock.patch.object(module, name, value, create=name == "print"))
        yield
