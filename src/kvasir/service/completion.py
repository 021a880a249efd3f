"""One request's reply, from engine events to a `Completion`.

Owns the receiving side: detokenising, stop strings, log probabilities by text and parsing of JSON, all on the
reader's thread while the engine decodes the next tick. Pure of waiting: it is fed events and asked for text.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir.engine import Done, Event, Failed, Tokens
from kvasir.errors import BadSchema, KvasirError
from kvasir.model.sampler import parse_reply
from kvasir.model.tokenizer import Detokenizer, Tokenizer
from kvasir.service.stops import StopFilter
from kvasir.types import Completion, FinishReason, Sampling, TokenLogprob


class Reply:
    """A reply as it grows. `stopped` tells that a stop string matched, so the rest of the work is unwanted.

    `stops` are further stop strings, and `shown` special tokens whose names are part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: Sampling,
        *,
        seed: int,
        remember: Callable[[str, list[int]], None] | None = None,
        fresh_samplers: tuple[str, ...] = (),
        stops: tuple[str, ...] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._seed = seed
        self._remember = remember
        self._fresh_samplers = fresh_samplers
        self._detokenizer = Detokenizer(tokenizer.vocab, shown=shown)
        self._stops = StopFilter((*sampling.stop, *stops))
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._outcome: Completion | KvasirError | None = None

    @property
    def ended(self) -> bool:
        """Whether the last event came."""
        return self._outcome is not None

    @property
    def n_tokens(self) -> int:
        """How many tokens came until now."""
        return len(self._tokens)

    @property
    def stopped(self) -> bool:
        """Whether a stop string matched."""
        return self._stops.matched is not None

    @property
    def text(self) -> str:
        """The text until now."""
        return "".join(self._pieces)

    @property
    def tokens(self) -> list[int]:
        """The tokens until now, those that a stop string came with included."""
        return list(self._tokens)

    def outcome(self) -> Completion:
        """The completion of an ended reply; raises where it failed."""
        assert self._outcome is not None, "asked for the outcome of a reply that goes on"
        if isinstance(self._outcome, KvasirError):
            raise self._outcome
        return self._outcome

    def take(self, event: Event) -> str:
        """Absorb one event; return the text it makes certain, which may be empty."""
        if isinstance(event, Tokens):
            piece = self._take_tokens(event)
        elif isinstance(event, Done):
            piece = self._stops.feed(self._detokenizer.flush()) + self._stops.flush()
        else:
            piece = ""
        if piece:
            self._pieces.append(piece)
        if isinstance(event, Done):
            self._outcome = self._finish(event)
        elif isinstance(event, Failed):
            self._outcome = event.error
        return piece

    def _take_tokens(self, event: Tokens) -> str:
        shown = ""
        for i, token in enumerate(event.ids):
            if self.stopped:  # the engine ran ahead of us; those tokens are nobody's
                break
            self._tokens.append(token)
            if self._sampling.logprobs is not None:
                self._logprobs.append(self._logprob(token, event, i))
            shown += self._stops.feed(self._detokenizer.feed(token))
        return shown

    def _logprob(self, token: int, event: Tokens, i: int) -> TokenLogprob:
        piece = self._tokenizer.piece
        found = event.logprobs[i] if i < len(event.logprobs) else None
        if found is None:
            return TokenLogprob(token, piece(token), float("nan"))
        top = tuple((other, piece(other), logprob) for other, logprob in found.top)
        return TokenLogprob(token, piece(token), found.logprob, top)

    def _finish(self, done: Done) -> Completion | KvasirError:
        text = "".join(self._pieces)
        reason = FinishReason.STOP if self.stopped else done.reason
        if self._remember is not None and not self.stopped:
            self._remember(text, self._tokens)
        try:
            parsed = self._parsed(text, reason)
        except BadSchema as error:
            return error
        return Completion(
            text=text,
            tokens=tuple(self._tokens),
            finish_reason=reason,
            stop=self._stops.matched,
            logprobs=tuple(self._logprobs) if self._sampling.logprobs is not None else None,
            seed=self._seed,
            usage=done.usage,
            timings=done.timings,
            parsed=parsed,
            key=done.key.hex() if done.key is not None else None,
            fresh_samplers=self._fresh_samplers,
        )

    def _parsed(self, text: str, reason: FinishReason) -> object:
        """The object the text describes; None for a text that was cut off before its end."""
        schema = self._sampling.json_schema
        if schema is None:
            return None
        try:
            return parse_reply(schema, text)
        except BadSchema:
            if reason is FinishReason.STOP and not self.stopped:
                raise
            return None
