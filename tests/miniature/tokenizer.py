"""The miniature's tokenizer: bytes, whole words, GLM's special tokens; 640 ids.

A byte-level BPE without merges: a piece that is a word of the vocabulary is one token
(``ignore_merges``), any other text is its bytes. Digits are single tokens.
"""

from __future__ import annotations

from typing import Any

from sglang_glm53.tiny.tokenizer import SPECIAL_TOKENS, VISIBLE

from .words import CHAT, CITIES, NOUNS, VERBS

VOCAB = 640

# Words with the space before them, single digits, single signs, white space.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s*[\r\n]|\s+(?!\S)|\s+"


def whole_words() -> list[str]:
    """Every piece of text that is one token beside bytes and special tokens."""
    spaced = [f" {word}" for word in (*CITIES, *NOUNS, *VERBS)]
    return list(dict.fromkeys([*spaced, *CITIES, *CHAT]))


def build_tokenizer() -> Any:
    """The tokenizer (`tokenizers.Tokenizer`); the same on every machine."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = bytes_to_letters()
    alphabet = sorted(letters.values())
    words = ["".join(letters[b] for b in word.encode()) for word in whole_words() if len(word) > 1]
    vocab = {piece: index for index, piece in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token in SPECIAL_TOKENS:  # one by one: the order sets the ids
        if token in VISIBLE:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
        else:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    if tokenizer.get_vocab_size() > VOCAB:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens; the vocabulary holds {VOCAB}")
    return tokenizer


def bytes_to_letters() -> dict[int, str]:
    """The printable letter that byte-level BPE writes for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return letters
