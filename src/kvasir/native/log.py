"""The log pump: llama.cpp's lines become records of the logger `kvasir.llama`.

Owns one daemon thread per core. llama.cpp logs from its own threads, which must never wait for the GIL: the core
queues the lines and this thread drains them. Chooses no level and no handler; that is the application's to do.
"""

from __future__ import annotations

import atexit
import logging
import threading
from functools import cache
from types import ModuleType

# A library stays silent until the application configures logging.
logging.getLogger("kvasir").addHandler(logging.NullHandler())

# How long a line may wait. Threads that wake beside llama.cpp's cost it speed, so lines are moved in batches; and the
# wait is for our own event, not in the core, so that stopping takes no time.
EVERY_S = 0.2


class LogPump:
    """Moves one core's log lines to Python's `logging` until `stop()`."""

    def __init__(self, core: ModuleType) -> None:
        self._core = core
        self._logger = logging.getLogger("kvasir.llama")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvasir-log", daemon=True)

    def start(self) -> None:
        """Begin; the pump stops by itself before the interpreter ends."""
        self._thread.start()
        # A daemon thread that wakes while the interpreter is being torn down would crash it: end it before.
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread after what is queued has been written; idempotent."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
            self._drain()

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self._drain()

    def _drain(self) -> None:
        for level, line in self._core.take_logs(0.0):
            self._logger.log(level, "%s", line)


@cache
def start_pump(core: ModuleType) -> LogPump:
    """Return the pump of this core, started on the first call."""
    pump = LogPump(core)
    pump.start()
    return pump
