"""The one error tree: every failure a caller can act on has a class here.

    KvasirError              catching it catches all of ours and nothing else
      BadRequest             the caller can fix it
        BadOption            an unknown name, a wrong type, a value out of range
        PromptTooLong        n_tokens, limit
        BadGrammar           a GBNF grammar does not parse
        BadSchema            a JSON schema cannot become a grammar
        TokenizeFailed       text that cannot become tokens
      NotFound
        ModelNotFound        no such file, repository or package
        ModelNotLoaded       a known model that no runtime holds now
        SessionNotFound      id
      Busy                   try again later
        QueueFull            retry_after_s
        SessionBusy          id
        DeadlineExceeded     the request's own deadline passed
      ContextFull            this conversation or session cannot go on: n_tokens, limit
      ModelError             the model cannot do this
        ModelLoadError       reason
        Unsupported          what, why
        InvalidWorkerCount
      Stopped                nobody will answer any more
        EngineStopped, WorkerStopped, Closed
      StoreError             downloads and the model store
        ChecksumMismatch, Offline, NoSpace

Owns the classes and the "did you mean" sentence; knows no other module. Each class takes one message, so that
native code can raise it, and carries its facts as attributes where the raiser knew them.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class KvasirError(Exception):
    """Base of every error Kvasir raises on purpose."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message


class _Sized(KvasirError):
    """An error about a number of tokens against a limit; each is None where the raiser did not know it."""

    def __init__(self, message: str = "", *, n_tokens: int | None = None, limit: int | None = None) -> None:
        super().__init__(message)
        self.n_tokens = n_tokens
        self.limit = limit


class _Session(KvasirError):
    """An error about one session; `id` is None where the raiser did not know it."""

    def __init__(self, message: str = "", *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(message)
        self.id = id


class BadRequest(KvasirError):
    """The request is wrong and the caller can fix it."""


class BadOption(BadRequest):
    """An option has an unknown name, a wrong type or a value out of range."""


class PromptTooLong(_Sized, BadRequest):
    """The prompt has `n_tokens` tokens and the model takes `limit`."""


class BadGrammar(BadRequest):
    """The GBNF grammar does not parse."""


class BadSchema(BadRequest):
    """The JSON schema is broken, or asks for what a grammar cannot express."""


class TokenizeFailed(BadRequest):
    """The text cannot be turned into tokens."""


class NotFound(KvasirError):
    """What was named does not exist."""


class ModelNotFound(NotFound):
    """No file, repository, package or known name answers to this model reference."""


class ModelNotLoaded(NotFound):
    """The model is known, but nobody holds it loaded."""


class SessionNotFound(_Session, NotFound):
    """No session has this `id`, or it has ended."""


class Busy(KvasirError):
    """The request is fine; try again later."""


class QueueFull(Busy):
    """The waiting queue is full; `retry_after_s` is a guess of when it will not be."""

    def __init__(self, message: str = "", *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SessionBusy(_Session, Busy):
    """The session `id` is generating; wait for it or cancel it."""


class DeadlineExceeded(Busy):
    """The request's own deadline passed before it ended."""


class ContextFull(_Sized):
    """The conversation has reached `limit` tokens and cannot go on."""


class ModelError(KvasirError):
    """The model cannot do what was asked."""


class ModelLoadError(ModelError):
    """The model file cannot be loaded; `reason` says why in a few words."""

    def __init__(self, message: str = "", *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason if reason is not None else message


class Unsupported(ModelError):
    """This model or build cannot do `what`, because of `why`."""

    def __init__(self, message: str = "", *, what: str | None = None, why: str | None = None) -> None:
        super().__init__(message)
        self.what = what
        self.why = why


class InvalidWorkerCount(ModelError):
    """The number of workers is not one this model can be served with."""


class Stopped(KvasirError):
    """Nobody will answer any more."""


class EngineStopped(Stopped):
    """The engine was closed, or died, before the request ended."""


class WorkerStopped(Stopped):
    """The worker that held this request or session is gone."""


class Closed(Stopped):
    """The object was used after `close()`."""


class StoreError(KvasirError):
    """A download failed, or the model store cannot be read or written."""


class ChecksumMismatch(StoreError):
    """The bytes that came are not the bytes that were promised; nothing was kept."""


class Offline(StoreError):
    """The network is needed, and it is forbidden or cannot be reached."""


class NoSpace(StoreError):
    """The disk is too full for the model."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the known name closest to this one, or an empty string."""
    by_folded = {k.casefold().replace("-", "_"): k for k in known}
    close = get_close_matches(name.casefold().replace("-", "_"), by_folded, n=1)
    return f" Did you mean {by_folded[close[0]]!r}?" if close else ""
