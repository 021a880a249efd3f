"""Which messages go, in which order, and which never do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvasir.chat.eviction import Sized, choose

SYSTEM = Sized("system", 10)
USER = Sized("user", 10)
REPLY = Sized("assistant", 10)
CALL = Sized("assistant", 10, has_calls=True)
RESULT = Sized("tool", 10)


def test_the_oldest_turn_goes_first() -> None:
    assert choose([SYSTEM, USER, REPLY, USER, REPLY, USER], 5) == [1, 2]


def test_only_as_many_turns_go_as_are_needed() -> None:
    messages = [SYSTEM, *[USER, REPLY] * 4, USER]
    assert choose(messages, 20) == [1, 2]
    assert choose(messages, 21) == [1, 2, 3, 4]


def test_the_turn_of_the_last_reply_stays() -> None:
    assert choose([SYSTEM, USER, REPLY, USER], 1) is None


def test_tool_exchanges_of_the_current_turn_go_after_the_turns() -> None:
    messages = [SYSTEM, USER, REPLY, USER, REPLY, USER, CALL, RESULT, CALL, RESULT, RESULT]
    assert choose(messages, 10) == [1, 2]
    assert choose(messages, 30) == [1, 2, 6, 7]


def test_a_result_that_waits_for_an_answer_stays() -> None:
    assert choose([SYSTEM, USER, CALL, RESULT], 1) is None


def test_nothing_to_give_up_is_nothing() -> None:
    assert choose([], 1) is None
    assert choose([SYSTEM], 1) is None


MESSAGES = st.lists(
    st.builds(
        Sized,
        st.sampled_from(["user", "assistant", "tool", "system"]),
        st.integers(1, 50),
        st.booleans(),
    ),
    max_size=30,
)


@given(messages=MESSAGES, n_over=st.integers(1, 400))
def test_what_must_stay_stays_and_what_goes_is_enough(messages: list[Sized], n_over: int) -> None:
    messages = [m if m.role == "assistant" else m._replace(has_calls=False) for m in messages]
    chosen = choose(messages, n_over)
    if chosen is None:
        return
    assert sum(messages[i].n_tokens for i in chosen) >= n_over
    assert len(set(chosen)) == len(chosen)
    assert all(messages[i].role != "system" for i in chosen)
    users = [i for i, m in enumerate(messages) if m.role == "user"]
    assert users[-1] not in chosen
    replies = [i for i, m in enumerate(messages) if m.role == "assistant" and not m.has_calls]
    assert not replies or replies[-1] not in chosen
