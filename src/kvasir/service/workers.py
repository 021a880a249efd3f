"""Workers: several engines over one model's weights and one cache.

Owns their opening, their order and their end: the first one holds the weights and the cache and is closed last. Each
has a context, KV memory and a thread of its own. All of them together compute on no more cores than the process has:
the native core lends those to one decode at a time as far as they reach.
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from types import ModuleType

from kvasir import native
from kvasir.config import LoadSettings
from kvasir.errors import InvalidWorkerCount, WorkerStopped
from kvasir.model.weights import Progress
from kvasir.service.model import Model


class Workers:
    """The engines of one service, numbered from 0."""

    def __init__(self, models: list[Model]) -> None:
        self._models = models
        self._turn = itertools.count()

    @classmethod
    def open(
        cls,
        path: Path,
        settings: LoadSettings,
        n_workers: int,
        *,
        core: ModuleType = native,
        progress: Progress | None = None,
    ) -> Workers:
        """Load the weights once and make so many engines over them. What was opened is closed where one fails."""
        check_count(n_workers)
        with contextlib.ExitStack() as on_failure:
            first = on_failure.enter_context(Model.open(path, settings, core=core, progress=progress))
            first.stats()  # an encoder has no engine, and says so
            twins = [on_failure.enter_context(first._twin()) for _ in range(n_workers - 1)]
            on_failure.pop_all()
        return cls([first, *twins])

    def __len__(self) -> int:
        return len(self._models)

    def __getitem__(self, worker: int) -> Model:
        return self._models[worker]

    def next(self) -> int:
        """Choose a worker for a session: round robin over those that run."""
        for _ in self._models:
            worker = next(self._turn) % len(self._models)
            if not self._models[worker]._running_engine().stopped:
                return worker
        raise WorkerStopped("every worker of the service has stopped; load it again.")

    def close(self) -> None:
        """Stop them all, the owner of the weights last. Idempotent."""
        for model in reversed(self._models):
            model.close()


def check_count(n_workers: object) -> None:
    """Raise `InvalidWorkerCount` for what is no number of workers."""
    if isinstance(n_workers, bool) or not isinstance(n_workers, int) or n_workers < 1:
        raise InvalidWorkerCount(f"workers must be a whole number, 1 or more, got {n_workers!r}.")
