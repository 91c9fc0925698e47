"""Patches of lm-eval (seen in 0.4.13). Each lasts as long as its `with` block."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from lm_eval import utils


def without_environment() -> AbstractContextManager[Any]:
    """Leave out the description of the machine in the results. simple_evaluate waits seconds for its `pip list`."""
    return mock.patch("lm_eval.evaluator.add_env_info")


def templates_end_with(finalize: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Pass every value that a template prints through `finalize`.

    lm-eval's Jinja environment prints a missing field as nothing. It offers no other way to see what a template prints.
    """
    return mock.patch.object(utils.env, "finalize", finalize)


def download_gives(content: Any) -> AbstractContextManager[Any]:
    """Make RULER's question-answering readers use `content`. They cannot read local files, only download JSON."""
    from lm_eval.tasks.ruler import qa_utils

    return mock.patch.object(qa_utils, "download_json", return_value=content)


@contextmanager
def importing_ruler() -> Iterator[None]:
    """Allow the import of RULER's prepare_niah without its side effects.

    It downloads a sentence splitter and reads word lists at import. We use neither.
    """
    no_words = SimpleNamespace(_categories=dict.fromkeys(("adjectives", "nouns", "verbs"), ()))
    with mock.patch("nltk.data.find"), mock.patch("wonderwords.RandomWord", return_value=no_words):
        yield


@contextmanager
def ruler_uses(replacements: list[tuple[ModuleType, str, Any]]) -> Iterator[None]:
    """Replace globals of RULER's generators: (module, name, value).

    The generators read word lists, sentence splitter, random generator and progress bar from globals, not arguments.
    """
    with ExitStack() as stack:
        for module, name, value in replacements:
            stack.enter_context(mock.patch.object(module, name, value, create=name == "print"))
        yield
