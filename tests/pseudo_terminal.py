"""A command on a terminal of its own, driven as a person does: type, press keys, read what appears."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import TracebackType

ENTER, CTRL_C, CTRL_D, ESCAPE = "\r", "\x03", "\x04", "\x1b"

# The first terminal that the leader of a session opens becomes the one whose Ctrl-C it gets.
_BEGIN = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execv(sys.executable, sys.argv[1:])"
# The program asks where the cursor is; a terminal answers.
_WHERE = b"\x1b[6n"
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07")


class PseudoTerminal:
    """Runs a Python command line, `python ARGS`. `text` is all that appeared, without colours and cursor moves."""

    def __init__(self, *args: str | Path, columns: int = 80, rows: int = 24, **environ: str) -> None:
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environ = {**os.environ, "TERM": "xterm-256color", **environ}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BEGIN, sys.executable, *map(str, args)],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
            env=environ,
        )
        os.close(follower)
        self._raw = b""

    @property
    def raw(self) -> str:
        return self._raw.decode("utf-8", "replace")

    @property
    def text(self) -> str:
        return _CODES.sub("", self.raw).replace("\r", "")

    def press(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    def wait_for(self, text: str, *, times: int = 1, timeout_s: float = 60) -> None:
        """Read until `text` has appeared so many times."""
        deadline = time.monotonic() + timeout_s
        while self.text.count(text) < times:
            assert time.monotonic() < deadline, f"no {text!r} in {self.text!r}"
            if not self.read(0.1) and self._process.poll() is not None and not self.read(0.1):
                raise AssertionError(f"it ended without {text!r}: {self.text!r}")

    def wait(self, *, timeout_s: float = 60) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            assert time.monotonic() < deadline, self.text
            self.read(0.05)
        while self.read(0.05):
            pass
        return self._process.returncode

    def read(self, wait_s: float = 0.1) -> bool:
        """Wait for more to appear; whether something did."""
        if not select.select([self._leader], [], [], wait_s)[0]:
            return False
        try:
            piece = os.read(self._leader, 65536)
        except OSError:  # Linux's way to say that the other side has gone
            return False
        for _ in range((self._raw[-3:] + piece).count(_WHERE)):
            self.press("\x1b[1;1R")
        self._raw += piece
        return bool(piece)

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._leader)
