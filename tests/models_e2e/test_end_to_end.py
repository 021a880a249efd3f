"""The end-to-end tests of tests/e2e, on every real model instead of the tiny one.

Those that ask for a model are taken over as they are; the fixtures of this folder bring the models. Those that write
their own files need no second run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.e2e import test_cli, test_python_api

# A model's first test may fetch it.
pytestmark = [pytest.mark.models, pytest.mark.timeout(3600)]

ASK_FOR_A_MODEL = {"model", "real", "sensible", "any_path", "real_path"}


def taken_from(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in vars(module).items():
        if name.startswith("test_") and ASK_FOR_A_MODEL & set(inspect.signature(value).parameters):
            yield name, value


globals().update(taken_from(test_python_api))
globals().update(taken_from(test_cli))
