"""The fake core's vocabulary: bytes for tokens, a few merged ones, and ChatML's special tokens.

Owns text to tokens and back; exact on every valid text. Adds no BOS unless the model's facts say so.
"""

from __future__ import annotations

import re

from kvasir.errors import BadOption, TokenizeFailed

_MERGED = (b" the", b"he", b"ing")
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MIN_VOCAB = 256 + len(_MERGED) + len(_SPECIAL)


class Vocab:
    """Ids 0 to 255 are bytes, then a few merged tokens, then the special ones; the rest is unused filler."""

    kind = "bpe"
    sep = pad = mask = fim_pre = fim_suf = fim_mid = None

    def __init__(self, n_tokens: int = MIN_VOCAB, *, add_bos: bool = False) -> None:
        if n_tokens < MIN_VOCAB:
            raise BadOption(f"a fake vocabulary has at least {MIN_VOCAB} tokens, got {n_tokens}")
        filler = (f"<|unused_{i}|>" for i in range(n_tokens - MIN_VOCAB))
        self._pieces = [bytes([b]) for b in range(256)] + list(_MERGED)
        self._special = {len(self._pieces) + i: text for i, text in enumerate((*_SPECIAL, *filler))}
        self.n_tokens = n_tokens
        self.nl: int | None = ord("\n")
        first = len(self._pieces)
        self.bos: int | None = first
        self.eos: int | None = first
        self.eot: int | None = first + 2
        self.eog_tokens = [first, first + 2]
        self.add_bos, self.add_eos, self.add_sep = add_bos, False, False

    def tokenize(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the tokens of a text; `TokenizeFailed` unless it is valid UTF-8."""
        try:
            plain = text if isinstance(text, str) else text.decode()
            plain.encode()
        except UnicodeError as error:
            raise TokenizeFailed(f"the text is not valid UTF-8: {error}") from error
        ids = {special: token for token, special in self._special.items()}
        parts = re.split("(" + "|".join(map(re.escape, ids)) + ")", plain) if parse_special else [plain]
        tokens = [self.bos] if add_special and self.add_bos and self.bos is not None else []
        for part in parts:
            tokens += [ids[part]] if parse_special and part in ids else _byte_tokens(part.encode())
        return tokens

    def token_to_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token; none for special tokens unless `special`."""
        self.check(token)
        if token in self._special:
            return self._special[token].encode() if special else b""
        return self._pieces[token]

    def detokenize(self, tokens: list[int], *, remove_special: bool = False, unparse_special: bool = False) -> bytes:
        """Return the bytes of tokens; special ones are shown only with `unparse_special`."""
        if remove_special and self.add_bos and tokens[:1] == [self.bos]:
            tokens = tokens[1:]
        return b"".join(self.token_to_bytes(token, special=unparse_special) for token in tokens)

    def text(self, token: int) -> str:
        """Return how the vocabulary spells a token."""
        return self.token_to_bytes(token, special=True).decode("latin-1")

    def score(self, token: int) -> float:
        """Return the score of a token: always 0."""
        self.check(token)
        return 0.0

    def is_eog(self, token: int) -> bool:
        """Tell whether a token ends a generation."""
        self.check(token)
        return token in self.eog_tokens

    def is_control(self, token: int) -> bool:
        """Tell whether a token is a special one."""
        self.check(token)
        return token in self._special

    def check(self, token: int) -> None:
        """Raise `BadOption` unless the token exists."""
        if not 0 <= token < self.n_tokens:
            raise BadOption(f"token {token} does not exist; this vocabulary has 0 to {self.n_tokens - 1}")


def _byte_tokens(data: bytes) -> list[int]:
    tokens, at = [], 0
    while at < len(data):
        merged = next((i for i, piece in enumerate(_MERGED) if data.startswith(piece, at)), None)
        tokens.append(data[at] if merged is None else 256 + merged)
        at += 1 if merged is None else len(_MERGED[merged])
    return tokens
