"""A byte-level BPE tokenizer with GLM's special tokens, trained on a few pages of our own text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_glm53.tiny.text import ANSWER, CORPUS, REASONING

# In the order of their ids, which follow the byte-level vocabulary as GLM's do.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<tools>",
    "</tools>",
)
# Shown in decoded text, since the parsers of reasoning and tool calls look for them there.
VISIBLE = frozenset(SPECIAL_TOKENS[SPECIAL_TOKENS.index("<think>") :])

# GPT-style pieces: contractions, words, up to three digits, punctuation, white space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(vocab: int) -> Any:
    """Train the tokenizer (`tokenizers.Tokenizer`) with at most `vocab` ids, specials included.

    The text has no more than about 1,300 merges to learn; a larger `vocab` leaves ids unused.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Repeated, so that each of its words becomes one token.
    tokenizer.train_from_iterator([*CORPUS, *[REASONING, ANSWER] * 20], trainer)
    _add_special_tokens(tokenizer)
    return tokenizer


def _add_special_tokens(tokenizer: Any) -> None:
    from tokenizers import AddedToken

    for token in SPECIAL_TOKENS:  # one by one: the order sets the ids
        if token in VISIBLE:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
        else:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])


def special_token_ids(tokenizer: Any) -> dict[str, int]:
    """Id of each of `SPECIAL_TOKENS`."""
    return {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}


def write_tokenizer(tokenizer: Any, folder: Path, *, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": "<|endoftext|>",
        "extra_special_tokens": [t for t in SPECIAL_TOKENS if t not in VISIBLE],
        "model_max_length": max_length,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
