"""Recall: the tokens a text was made of, for clients that send a conversation back as text.

A model's own reply, tokenized again, often splits otherwise than it was sampled, and then its KV is not found. Here the
sampled tokens of a text are remembered and are authoritative: a prompt that begins with a remembered text begins with
its tokens. Owns only that memory, bounded; forgetting costs reuse, never correctness. Any thread may use it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Sequence
from threading import Lock

from kvasir.model.tokenizer import Tokenizer

# About a hundred bytes and four a token each: some ten megabytes at the most.
MAX_TEXTS = 4096


class Recall:
    """Texts and the tokens they were made of, by scope."""

    def __init__(self, tokenizer: Tokenizer, *, max_texts: int = MAX_TEXTS) -> None:
        self._tokenizer = tokenizer
        self._max_texts = max_texts
        self._lock = Lock()
        self._tokens: OrderedDict[tuple[str | None, bytes], tuple[int, tuple[int, ...]]] = OrderedDict()
        self._lengths: list[int] = []  # of the remembered texts in bytes, distinct, ascending
        self._n_of_length: Counter[int] = Counter()

    def remember(self, text: str, tokens: Sequence[int], *, scope: str | None = None) -> None:
        """Note that this text is these tokens, special ones at its beginning included."""
        encoded = text.encode()
        key = (scope, hashlib.blake2b(encoded, digest_size=16).digest())
        with self._lock:
            if key not in self._tokens:
                self._count(len(encoded))
            self._tokens[key] = (len(encoded), tuple(tokens))
            self._tokens.move_to_end(key)
            while len(self._tokens) > self._max_texts:
                _, (length, _) = self._tokens.popitem(last=False)
                self._uncount(length)

    def encode(self, text: str, *, scope: str | None = None) -> list[int]:
        """Tokenize a prompt, with the remembered tokens of its longest remembered beginning."""
        plain = self._tokenizer.encode_prompt(text)
        encoded = text.encode()
        found = self._longest(encoded, scope)
        if found is None:
            return plain
        length, head = found
        if plain[: len(head)] == list(head):
            return plain
        rest = encoded[length:]
        tail = self._tokenizer.encode(rest, add_special=False, parse_special=True) if rest else []
        # A vocabulary that puts a space before every text cannot continue one: its own split stays.
        spelled = self._tokenizer.vocab.detokenize(tail, unparse_special=True) if tail else b""
        return [*head, *tail] if spelled == rest else plain

    def _longest(self, encoded: bytes, scope: str | None) -> tuple[int, tuple[int, ...]] | None:
        """Hash the text once, looking at every length that is remembered; the longest that is known wins."""
        best = None
        digest, at = hashlib.blake2b(digest_size=16), 0
        with self._lock:
            for length in self._lengths[: bisect_right(self._lengths, len(encoded))]:
                digest.update(encoded[at:length])
                at = length
                key = (scope, digest.copy().digest())
                if key in self._tokens:
                    best = key
            if best is None:
                return None
            self._tokens.move_to_end(best)
            return self._tokens[best]

    def _count(self, length: int) -> None:
        self._n_of_length[length] += 1
        if self._n_of_length[length] == 1:
            insort(self._lengths, length)

    def _uncount(self, length: int) -> None:
        self._n_of_length[length] -= 1
        if not self._n_of_length[length]:
            del self._n_of_length[length]
            self._lengths.remove(length)
