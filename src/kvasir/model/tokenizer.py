"""Text to tokens and back, checked.

Owns what a prompt may be (text, UTF-8 bytes or token ids) and how bytes become whole characters. Raises before
the core would see a bad id. Knows no sampling and no requests; any number of threads may use one `Tokenizer`, each
stream has its own `Detokenizer`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from numbers import Integral

from kvasir import native
from kvasir.errors import BadOption, TokenizeFailed

Prompt = str | bytes | Sequence[int]
"""What a model continues: text, the same as UTF-8 bytes, or token ids."""


class Tokenizer:
    """One vocabulary's way between text and tokens."""

    def __init__(self, vocab: native.Vocab) -> None:
        self.vocab = vocab

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Turn a prompt into the tokens to run; text may name special tokens. Raises where nothing is left to run."""
        tokens = self.encode(prompt, parse_special=True) if isinstance(prompt, str | bytes) else self.check(prompt)
        if not prompt or not tokens:
            raise BadOption("the prompt is empty; give at least one character or one token.")
        return tokens

    def encode(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Turn text into tokens; `TokenizeFailed` where it is not valid Unicode."""
        return self.vocab.tokenize(_utf8(text), add_special=add_special, parse_special=parse_special)

    def encode_pair(self, query: str, document: str) -> list[int]:
        """Turn a query and a document into the one text that a reranker scores, marked as its vocabulary wants."""
        vocab = self.vocab
        end = vocab.eos if vocab.eos is not None else vocab.sep
        tokens = [vocab.bos] if vocab.add_bos else []
        tokens += self.encode(query, add_special=False)
        tokens += [end] if vocab.add_eos else []
        tokens += [vocab.sep] if vocab.add_sep else []
        tokens += self.encode(document, add_special=False)
        tokens += [end] if vocab.add_eos or vocab.add_sep else []
        return [token for token in tokens if token is not None]

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Turn tokens into text, without the beginning-of-text token that `encode` put first.

        Bytes that are no whole character become U+FFFD. `special` shows control tokens by their names.
        """
        ids = self.check(tokens)
        # Dropped here because llama.cpp, when asked to, forgets to drop the space that SPM vocabularies put after it.
        if ids and not special and self.vocab.add_bos and ids[0] == self.vocab.bos:
            ids = ids[1:]
        return self.vocab.detokenize(ids, unparse_special=special).decode("utf-8", errors="replace")

    def piece(self, token: int) -> str:
        """Return one token's own text, as a table of alternatives shows it."""
        return self.vocab.token_to_bytes(token, special=True).decode("utf-8", errors="replace")

    def check(self, tokens: Iterable[int]) -> list[int]:
        """Return token ids as plain ints; `BadOption` for what is no id of this vocabulary."""
        n_tokens = self.vocab.n_tokens
        if isinstance(tokens, list) and set(map(type, tokens)) == {int} and 0 <= min(tokens) <= max(tokens) < n_tokens:
            return list(tokens)  # nearly always so, and prompts are long
        return [_checked(token, n_tokens) for token in _iterated(tokens)]


class Detokenizer:
    """Turns one stream of tokens into text, giving out only whole characters.

    Special tokens have no text, but for those of `shown`.
    """

    def __init__(self, vocab: native.Vocab, *, shown: frozenset[int] = frozenset()) -> None:
        self._vocab = vocab
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """Return the characters that this token completes; often none, in the middle of an emoji."""
        return self._decoder.decode(self._vocab.token_to_bytes(token, special=token in self._shown))

    @property
    def is_whole(self) -> bool:
        """Whether the tokens so far end with a whole character."""
        return not self._decoder.getstate()[0]

    def flush(self) -> str:
        """Return U+FFFD for a character that was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)


def _utf8(text: str | bytes) -> bytes:
    try:
        if isinstance(text, str):
            return text.encode("utf-8")
        if isinstance(text, bytes):
            text.decode("utf-8")
            return text
    except UnicodeEncodeError as error:
        raise TokenizeFailed(
            f"the text holds a lone surrogate at character {error.start}, which is no character; remove it."
        ) from None
    except UnicodeDecodeError as error:
        raise TokenizeFailed(f"the bytes are not valid UTF-8 at byte {error.start} ({error.reason}).") from None
    raise BadOption(f"text must be a string or UTF-8 bytes, got {type(text).__name__}.")


def _iterated(tokens: Iterable[int]) -> Iterable[int]:
    try:
        return iter(tokens)
    except TypeError:
        raise BadOption(f"a prompt is text or a list of token ids, got {type(tokens).__name__}.") from None


def _checked(token: object, n_tokens: int) -> int:
    if isinstance(token, bool) or not isinstance(token, Integral):
        raise BadOption(f"token ids must be whole numbers, got {token!r}.")
    if not 0 <= (number := int(token)) < n_tokens:
        raise BadOption(f"token id {number} is out of range; this vocabulary has ids 0 to {n_tokens - 1}.")
    return number
