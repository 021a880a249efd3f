"""A sequence: one request's tokens, its state, and the ledger of what the KV memory holds of it.

Owns the move table and the ledger's arithmetic. Never touches native memory: whoever does (`runner`, `loop`) tells
the sequence through `start`, `ran`, `rewind`, `resume_at` and `preempt`, so that the ledger always equals
`memory.pos_max(slot) + 1`.
"""

from __future__ import annotations

from enum import Enum, auto

from kvasir.engine.plan import SeqView
from kvasir.engine.request import Request, RequestId, Sink
from kvasir.types import Timings, Usage


class State(Enum):
    """Where a sequence stands."""

    WAITING = auto()  # in the queue, no slot
    FOLLOW = auto()  # has a slot; waits for another sequence to compute the prefix they share
    LOADING = auto()  # has a slot; a stored prefix is being read and imported
    PREFILL = auto()  # has a slot; more than the last token is still to run
    DECODE = auto()  # has a slot; exactly one token is still to run
    DONE = auto()  # ended; its slot, if any, is released by the next `finish`


RUNNABLE = frozenset({State.PREFILL, State.DECODE})

MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILL, State.FOLLOW, State.LOADING, State.DONE}),
    State.FOLLOW: frozenset({State.PREFILL, State.LOADING, State.WAITING, State.DONE}),  # LOADING: its leader is gone
    State.LOADING: frozenset({State.PREFILL, State.FOLLOW, State.WAITING, State.DONE}),  # FOLLOW: nothing was stored
    State.PREFILL: frozenset({State.DECODE, State.WAITING, State.DONE}),  # back to WAITING: preempted
    State.DECODE: frozenset({State.PREFILL, State.WAITING, State.DONE}),  # back to PREFILL: its KV was lost
    State.DONE: frozenset(),
}


class Sequence:
    """One request on its way through the engine.

    [0, n_cached)            shared or restored: never decoded by this sequence, and in KV once it runs
    [n_cached, n_decoded)    decoded: in KV
    [n_decoded, n_tokens)    still to run
    [n_prompt, n_tokens)     generated. The last of them is sampled and sent, and in KV only once it was decoded
    """

    __slots__ = (
        "admitted_at", "came_at", "deadline", "edited", "ended_at", "first_token_at", "id", "keeps_kv", "logprobs",
        "n_awaited", "n_cached", "n_decoded", "n_faults", "n_loaded", "n_preempted", "n_prompt", "n_rows", "n_skipped",
        "queued_at", "request", "sampler", "sink", "slot", "state", "stop_at", "tokens",
    )  # fmt: skip

    def __init__(self, request_id: RequestId, request: Request, sink: Sink, *, now: float) -> None:
        self.id = request_id
        self.request = request
        self.sink = sink
        self.sampler = request.sampler
        self.logprobs = request.sampling.logprobs
        self.state = State.WAITING
        self.slot: int | None = None
        self.tokens = list(request.tokens)
        self.n_prompt = len(self.tokens)
        self.n_awaited = 0  # tokens that whoever it follows was to bring
        self.n_cached = 0
        self.n_decoded = 0
        self.n_loaded = 0  # cells of a restore that counts only once its last part is there
        self.n_rows = 0  # rows the core decoded for it, reruns included: its part of Context.n_rows_decoded
        self.stop_at: int | None = None  # position a prefill must not run over: a snapshot is due exactly there
        self.n_skipped = 0  # ticks in a row in which it could run and was not planned
        self.n_preempted = 0  # times it lost its slot to another
        self.keeps_kv = True  # whether what it leaves in memory may be parked
        self.edited = False  # its KV had tokens cut out: no longer a function of its tokens, so nobody else's
        self.n_faults = 0  # steps it was in that cost its whole state, since its last token
        self.deadline = None if request.deadline_s is None else now + request.deadline_s
        self.queued_at = now
        self.came_at = now  # when it was queued, or had a slot if it had to wait for one
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None

    @property
    def n_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return len(self.tokens)

    @property
    def n_generated(self) -> int:
        """Tokens made and sent so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_left(self) -> int:
        """Tokens still to run before the next one can be sampled."""
        return len(self.tokens) - self.n_decoded

    @property
    def n_again(self) -> int:
        """Rows that were decoded more than once: after a preemption or a failed step."""
        return self.n_rows - max(self.n_decoded - self.n_cached, 0)

    @property
    def only_reads(self) -> bool:
        """Whether nothing is to be sampled: it ends when its last token has run."""
        return self.request.max_tokens == 0

    @property
    def cacheable(self) -> bool:
        """Whether its KV may go into the cache."""
        return self.request.cache and self.keeps_kv and not self.edited

    @property
    def generated(self) -> list[int]:
        """The tokens made so far."""
        return self.tokens[self.n_prompt :]

    def view(self) -> SeqView:
        """What a strategy may know of it."""
        decoding = self.state is State.DECODE
        return SeqView(self.id, decoding, len(self.tokens) - self.n_decoded, self.request.priority, self.n_skipped)

    def move(self, state: State) -> None:
        """Make a move of the table; every change of state in the program goes through here."""
        assert state in MOVES[self.state], f"sequence {self.id} cannot go from {self.state.name} to {state.name}"
        self.state = state

    def admit(self, slot: int, *, now: float) -> None:
        """Take a slot. `queued_at` to `admitted_at` is the time in the queue, of the first admission only."""
        self.slot = slot
        if self.admitted_at is None:
            self.admitted_at = now

    def start(self, n_reused: int) -> None:
        """Begin to run, with the first `n_reused` tokens in memory already."""
        self.n_decoded = n_reused
        n_cached = min(n_reused, self.n_prompt)
        self.n_cached = max(self.n_cached, n_cached) if self.n_rows else n_cached
        self.move(State.PREFILL)

    def preempt(self) -> None:
        """Go back to the queue without slot or KV. Its tokens stay, and its sampler stays where it was."""
        self.slot = None
        self.n_decoded = 0
        self.n_loaded = 0
        self.n_preempted += 1
        self.edited = False
        self.n_skipped = 0
        self.move(State.WAITING)

    def ran(self, n_tokens: int) -> None:
        """Note that the core decoded the next `n_tokens`."""
        self.n_decoded += n_tokens
        self.n_rows += n_tokens

    def took(self, token: int, *, now: float) -> None:
        """Append the token sampled after the last one ran."""
        self.tokens.append(token)
        if self.state is State.PREFILL and self.n_left == 1:
            self.move(State.DECODE)
        if self.first_token_at is None:
            self.first_token_at = now

    def resume_at(self, n_decoded: int) -> None:
        """Note that KV holds only the first `n_decoded` tokens, after a decode that failed half way."""
        self.n_decoded = n_decoded
        self.n_cached = min(self.n_cached, n_decoded)
        if self.state is State.DECODE and self.n_left > 1:
            self.move(State.PREFILL)

    def rewind(self) -> None:
        """Note that none of it is in KV any more. All tokens run again; the sampler stays where it was."""
        self.n_loaded = 0
        self.resume_at(0)

    def is_full(self, limit: int) -> bool:
        """Say whether it must end now: no token more is allowed, or its newest one has no cell to run in."""
        return self.n_generated >= self.request.max_tokens or len(self.tokens) > limit

    def usage(self) -> Usage:
        """Count its tokens; a stop token that ended it is not one of them."""
        return Usage(self.n_prompt, self.n_cached, self.n_generated)

    def timings(self) -> Timings:
        """Seconds in the queue, from admission to the first token, from `submit` to it, and from it to the end."""
        end = self.ended_at if self.ended_at is not None else self.queued_at
        admitted = self.admitted_at if self.admitted_at is not None else end
        first = self.first_token_at if self.first_token_at is not None else end
        return Timings(
            queue_s=admitted - self.queued_at,
            prefill_s=first - admitted,
            first_token_s=first - self.queued_at,
            decode_s=end - first,
        )
