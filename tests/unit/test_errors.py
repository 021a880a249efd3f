"""The error tree is public API: its shape, its messages and its facts are pinned here."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from kvasir import errors

TREE: dict[str, Any] = {
    "KvasirError": {
        "BadRequest": {"BadOption": {}, "PromptTooLong": {}, "BadGrammar": {}, "BadSchema": {}, "TokenizeFailed": {}},
        "NotFound": {"ModelNotFound": {}, "ModelNotLoaded": {}, "SessionNotFound": {}},
        "Busy": {"QueueFull": {}, "SessionBusy": {}, "DeadlineExceeded": {}},
        "ContextFull": {},
        "ModelError": {"ModelLoadError": {}, "Unsupported": {}, "InvalidWorkerCount": {}},
        "Stopped": {"EngineStopped": {}, "WorkerStopped": {}, "Closed": {}},
        "StoreError": {"ChecksumMismatch": {}, "Offline": {}, "NoSpace": {}},
    }
}


def pairs(tree: dict[str, Any], parent: str = "Exception") -> Iterator[tuple[str, str]]:
    for name, children in tree.items():
        yield name, parent
        yield from pairs(children, name)


ALL = [name for name, _ in pairs(TREE)]


@pytest.mark.parametrize(("name", "parent"), list(pairs(TREE)))
def test_each_class_stands_under_its_parent(name: str, parent: str) -> None:
    above = Exception if parent == "Exception" else getattr(errors, parent)
    assert issubclass(getattr(errors, name), above)


def test_the_tree_has_no_other_public_class() -> None:
    public = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception) and n[0] != "_"}
    assert public == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_each_class_can_be_raised_with_just_a_message(name: str) -> None:
    error = getattr(errors, name)("what went wrong")
    assert str(error) == error.message == "what went wrong"


@pytest.mark.parametrize("name", ALL)
def test_each_error_survives_a_trip_to_another_process(name: str) -> None:
    error = pickle.loads(pickle.dumps(getattr(errors, name)("text")))
    assert type(error) is getattr(errors, name)
    assert str(error) == "text"


def test_facts_are_attributes_and_travel_with_the_error() -> None:
    error = errors.PromptTooLong("too long", n_tokens=41_200, limit=32_768)
    again = pickle.loads(pickle.dumps(error))
    assert (again.n_tokens, again.limit) == (41_200, 32_768)
    assert errors.QueueFull("full", retry_after_s=1.5).retry_after_s == 1.5
    assert errors.SessionNotFound("gone", id="s1").id == "s1"
    assert errors.Unsupported("no", what="shift", why="recurrent").why == "recurrent"


def test_a_load_error_without_a_reason_has_its_message_as_the_reason() -> None:
    assert errors.ModelLoadError("bad magic").reason == "bad magic"
    assert errors.ModelLoadError("cannot load x: bad magic", reason="bad magic").reason == "bad magic"


def test_facts_nobody_knew_are_none() -> None:
    error = errors.ContextFull("full")
    assert (error.n_tokens, error.limit) == (None, None)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("temprature", " Did you mean 'temperature'?"),
        ("top-k", " Did you mean 'top_k'?"),
        ("TOP_K", " Did you mean 'top_k'?"),
        ("zzzzzz", ""),
    ],
)
def test_suggest_names_the_closest_or_nothing(name: str, answer: str) -> None:
    assert errors.suggest(name, ["temperature", "top_k", "top_p"]) == answer
