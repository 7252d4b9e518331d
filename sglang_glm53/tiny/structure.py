"""The structure that the random weights carry.

The vocabulary has a permutation ``successor``. The residual stream mostly carries the embedding
of the current token, and row ``successor[t]`` of lm_head is the embedding of ``t`` (its token
part), so the likeliest next token of ``t`` is ``successor[t]``, with a margin. The MTP layer
passes on the embedding of the token that it is given, so it proposes the successor of the next
token. Attention and experts add to the residual stream what they find in the context. Ordinary
tokens come in groups of sixteen with similar embeddings; there the context is strong enough to
turn the choice now and then, and the target's next token is not the successor. That is what the
draft gets wrong.

From `<think>` on, the permutation walks along two sentences (`text.py`) whose embeddings stand
alone: the first answer of the model can be read, and it ends.

A common part, one pattern on the first sixteenth of the residual stream, is added to every
embedding and read by nothing but the indexer: it keeps most of the heads' dot products positive,
so that no two index scores are tied at ReLU's zero.
"""

from __future__ import annotations

from typing import Any

from sglang_glm53.tiny.randoms import normal, permutation, signs
from sglang_glm53.tiny.text import ANSWER, REASONING
from sglang_glm53.tiny.tokenizer import special_token_ids

GROUP = 16  # ordinary tokens that share most of their embedding
COMMON, SHARED, OWN = 0.3, 0.63, 0.07  # shares of an ordinary embedding's mean square
LOGIT_GAIN = 1.5  # standard deviation of the logits of unrelated tokens


def common_width(hidden: int) -> int:
    """Entries of the residual stream that carry the common part."""
    return hidden // 16


def successor_of(tokenizer: Any, vocab: int, seed: int) -> tuple[list[int], list[int]]:
    """The permutation, and the tokens of the two sentences.

    Returns:
        successor: for every id the id that follows it; each id is the successor of one.
        alone: ids whose embedding belongs to no group.
    """
    special = special_token_ids(tokenizer)
    walk: list[int] = [special["<think>"]]
    for text, end in ((REASONING, "</think>"), (ANSWER, "<|endoftext|>")):
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            if token not in walk:  # only with a small vocabulary, where words fall into pieces
                walk.append(token)
        walk.append(special[end])
    used = {*walk, *special.values()}
    ordinary = [t for t in range(tokenizer.get_vocab_size()) if t not in used]
    ordinary = [ordinary[i] for i in permutation("successor", seed, len(ordinary))]
    # One long cycle: the sentences, then all ordinary tokens. The other special tokens, and ids
    # without a token, have a cycle of their own.
    rest = [t for t in range(vocab) if t not in {*walk, *ordinary}]
    successor = [0] * vocab
    for cycle in (walk + ordinary, rest):
        for token, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            successor[token] = following
    return successor, [*walk, *rest]


def embeddings(hidden: int, vocab: int, alone: list[int], seed: int) -> tuple[Any, Any]:
    """Token part and common part of the embedding.

    Returns:
        token: float32 [vocab, hidden], mean square 0.7 an entry; zero on the common entries.
        common: float32 [hidden], the same for every token; zero on all other entries.
    """
    import torch

    wide = common_width(hidden)
    grow = (hidden / (hidden - wide)) ** 0.5  # the token part lives on fewer entries
    shared = normal("embedding.shared", seed, (-(-vocab // GROUP), hidden)) * SHARED**0.5
    own = normal("embedding.own", seed, (vocab, hidden))
    token = shared.repeat_interleave(GROUP, dim=0)[:vocab] + own * OWN**0.5
    token[alone] = own[alone] * (SHARED + OWN) ** 0.5
    token *= grow
    token[:, :wide] = 0.0
    common = torch.zeros(hidden)
    common[:wide] = signs("embedding.common", seed, wide) * (COMMON * hidden / wide) ** 0.5
    return token, common


def lm_head(token: Any, successor: list[int], muted: list[int]) -> Any:
    """lm_head, float32 [vocab, hidden]: row `successor[t]` is the token part of `t`, scaled.

    Args:
        muted: ids that should follow nothing but their own predecessor; their rows are halved.
    """
    import torch

    head = torch.empty_like(token)
    head[successor] = token
    head *= LOGIT_GAIN / ((SHARED + OWN) * token.shape[1]) ** 0.5
    head[muted] *= 0.5
    return head
