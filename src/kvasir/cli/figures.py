"""The figures of a chat as text: the gauge, the statistics, the messages and their tokens. Pure, but for asking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvasir.cli.console import clean
from kvasir.cli.talk import Talk
from kvasir.errors import KvasirError

if TYPE_CHECKING:
    from kvasir.chat.events import ChatReply

BAR = 10


def gauge(n_tokens: int, limit: int) -> str:
    """Say how full the context is: `███░░░░░░░ 2,457/8,192`."""
    full = min(max(n_tokens / limit, 0.0), 1.0) if limit else 1.0
    n_full = max(round(full * BAR), 1 if n_tokens else 0)
    return f"{'█' * n_full}{'░' * (BAR - n_full)} {n_tokens:,}/{limit:,}"


def level(n_tokens: int, limit: int) -> str:
    """How worrying that is: "low", "high" or "full"."""
    full = n_tokens / limit if limit else 1.0
    return "full" if full >= 0.9 else "high" if full >= 0.75 else "low"


def statistics(talk: Talk) -> list[str]:
    """What `/stats` shows."""
    rows = [*_last(talk.replies[-1])] if talk.replies else [("last reply", "there is none yet")]
    rows += [*_all(talk.replies)] if len(talk.replies) > 1 else []
    rows += [*_context(talk), *_cache(talk)]
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {value}" for name, value in rows]


def message_tokens(talk: Talk) -> list[str]:
    """What `/tokens` shows: a line for each message, and the sum."""
    chat = talk.chat
    lines = [
        f"{span.end - span.start:>7,}  {message['role']:9}  {brief(message)}"
        for message, span in zip(chat.messages, chat.spans, strict=True)
    ]
    return [*lines, f"{chat.n_tokens:>7,}  of {chat.limit:,}"]


def brief(message: dict[str, Any], *, size: int = 50) -> str:
    """The beginning of a message, on one line."""
    calls = " ".join(call["function"]["name"] for call in message.get("tool_calls") or ())
    text = " ".join(clean(str(message.get("content") or calls)).split())
    return text if len(text) <= size else text[: size - 1] + "…"


def speed(n_tokens: int, seconds: float) -> str:
    """Say `123 tokens/s`; nothing where there is nothing to measure."""
    return f"{n_tokens / seconds:,.0f} tokens/s" if n_tokens > 0 and seconds > 0 else ""


def _last(reply: ChatReply) -> list[tuple[str, str]]:
    usage, timings = reply.usage, reply.timings
    n_read = usage.prompt_tokens - usage.cached_tokens
    thought = f", {usage.reasoning_tokens:,} of them thinking" if usage.reasoning_tokens else ""
    return [
        ("prompt", _joined(f"{usage.prompt_tokens:,} tokens", f"{usage.cached_tokens:,} cached")),
        ("read", _joined(f"{n_read:,} tokens in {timings.prefill_s:.2f} s", speed(n_read, timings.prefill_s))),
        (
            "reply",
            _joined(
                f"{usage.completion_tokens:,} tokens{thought} in {timings.decode_s:.2f} s",
                speed(usage.completion_tokens - 1, timings.decode_s),
            ),
        ),
        ("first token", f"after {timings.first_token_s:.2f} s"),
    ]


def _all(replies: list[ChatReply]) -> list[tuple[str, str]]:
    n_prompt = sum(reply.usage.prompt_tokens for reply in replies)
    n_cached = sum(reply.usage.cached_tokens for reply in replies)
    n_made = sum(reply.usage.completion_tokens for reply in replies)
    share = f"{n_cached / n_prompt:.0%} of the prompts cached" if n_prompt else ""
    return [("all replies", _joined(f"{len(replies)} replies", f"{n_made:,} tokens", share))]


def _context(talk: Talk) -> list[tuple[str, str]]:
    chat = talk.chat
    gone = f"{len(chat.evicted)} messages given up" if chat.evicted else ""
    return [("context", _joined(gauge(chat.n_tokens, chat.limit), f"{len(chat.messages)} messages", gone))]


def _cache(talk: Talk) -> list[tuple[str, str]]:
    try:
        stats = talk.model.cache.stats()
    except KvasirError:
        return [("cache", "off")]
    hits = f"{stats.hits:,} hits, {stats.misses:,} misses"
    return [("cache", _joined(hits, f"{stats.tokens_restored:,} tokens restored" if stats.tokens_restored else ""))]


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)
