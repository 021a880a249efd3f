"""The vocabularies of the tiny models: byte-level BPE for those that write text, word pieces for the encoders.

Owns which tokens exist and which of them a tiny model likes to write. The BPE one is exact on any valid text, so
UTF-8, stop strings and grammars can be tested with it: an emoji is four tokens.
"""

from __future__ import annotations

import string

import gguf
import numpy as np
from numpy.typing import NDArray

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MERGES = ["Ġ t", "h e", "Ġt he", "i n", "in g", "a n"]
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_NORMAL, _CONTROL = 1, 3


def byte_alphabet() -> list[str]:
    """Return GPT-2's printable character for each of the 256 bytes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]


BPE_TOKENS = [*byte_alphabet(), *(merge.replace(" ", "") for merge in _MERGES), *_SPECIAL]
WORD_PIECES = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *("\u2581" + c for c in string.ascii_lowercase + string.digits + string.punctuation),
    *(string.ascii_lowercase + string.digits),
]


def add_bpe(writer: gguf.GGUFWriter) -> None:
    """Add the byte-level vocabulary and a ChatML template. No BOS is added, as with SmolLM2."""
    end, turn = BPE_TOKENS.index("<|endoftext|>"), BPE_TOKENS.index("<|im_end|>")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(BPE_TOKENS)
    writer.add_token_types([_NORMAL] * (len(BPE_TOKENS) - len(_SPECIAL)) + [_CONTROL] * len(_SPECIAL))
    writer.add_token_merges(_MERGES)
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_eot_token_id(turn)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


def add_word_pieces(writer: gguf.GGUFWriter) -> None:
    """Add a vocabulary of single letters in BERT's manner."""
    writer.add_tokenizer_model("bert")
    writer.add_token_list(WORD_PIECES)
    writer.add_token_types([_CONTROL] * 5 + [_NORMAL] * (len(WORD_PIECES) - 5))
    writer.add_token_type_count(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)


def liking() -> NDArray[np.float32]:
    """Return a weight per BPE token: printable text is wanted, everything else nearly never comes out on top."""
    weights = np.full(len(BPE_TOKENS), 0.05, dtype=np.float32)
    weights[[ord(c) for c in string.ascii_letters + string.digits + " .,!?"]] = 1.0
    weights[256 : 256 + len(_MERGES)] = 1.0
    return weights
