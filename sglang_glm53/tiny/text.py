"""Our own words: what the tiny tokenizer learns its merges from, and what the model says first."""

from __future__ import annotations

# After `<think>` and after `</think>`. Each token may occur once, since the model's answer is a
# walk along a permutation of the vocabulary (see `structure.py`).
REASONING = (
    "A question arrived; each indexer scored all earlier tokens, attention read only those it"
    " chose - two experts answered.\n"
)
ANSWER = (
    "Hello! I am the smallest possible GLM: my weights are random (so what you see here means"
    " nothing), yet every layer ran for real."
)

CORPUS = (
    "A language model reads a prompt and then writes one token after another. The prompt is read"
    " in one pass, the prefill, which fills the cache; then comes decode, one step for each token."
    " In every layer the residual stream is normalised, attention reads from the cache, and a"
    " feed forward network writes back what it found. The layers are many but the work in each of"
    " them is the same, and so a reader who has understood one layer has understood the model.",
    "Attention in this family of models is sparse. An indexer looks at the earlier positions and"
    " gives each of them a score. The positions with the largest scores are kept, a few thousand"
    " of them at most, and attention reads only those. Some layers run the indexer themselves,"
    " other layers share the choice of the layer above. When the context is short there is nothing"
    " to leave out, and attention reads everything that came before.",
    "The cache holds a latent vector for every token and every layer. The latent is small, and the"
    " keys and the values are made from it, or the query is folded into the space of the latent,"
    " which comes to the same result. Beside it lies the rotary part of the key, which carries the"
    " position. The indexer has a key of its own, stored in eight bits with a scale.",
    "Most of the weights belong to experts. A router gives each expert a score between zero and"
    " one, adds a correction that keeps the load even, and sends the token to the best of them."
    " One more expert is shared by all tokens. The results are weighted, added, and scaled. With"
    " many devices the experts are spread out, and tokens travel to where their experts live.",
    "A small draft layer guesses the next tokens ahead of time. The large model then checks the"
    " guesses in a single pass and keeps those that agree with what it would have written. When"
    " three of five guesses hold, the answer arrives almost four times as fast, and it is still"
    " the same answer. The guesses cost little, since the draft is one layer deep.",
    "What is the weather like today? Could you write a short poem about the sea, please? Where do"
    " the old roads go when nobody walks on them? I would like to know how far the moon is, why"
    " the sky is blue, and who wrote this book. Thank you very much for your help! Tell me a story"
    " about a fox that lives under the stone bridge near the river. Of course, here is one:",
    "Once upon a time, in a green valley between two mountains, there was a village with a clock"
    " that ran backwards. Every morning the people woke up a little younger than before, and they"
    " forgot what they had learned. Only the miller's daughter kept a diary. She read it each day"
    " and so she remembered the summer and the winter, the names of the birds, the price of salt"
    " and how to make bread without burning it. One night she climbed the tower and stopped it.",
    "def main(argument, count=10):\n    for index in range(count):\n        if index % 3 == 0:\n"
    "            print(argument, index)\n    return None\n\nclass Point:\n    def __init__(self, x,"
    ' y):\n        self.x = x\n        self.y = y\n\nimport json\nvalue = json.dumps({"name":'
    ' "city", "type": "string", "description": "where to look", "required": true})\n',
    "1 2 3 4 5 6 7 8 9 10 11 12 20 24 30 32 48 50 60 64 100 128 200 256 500 512 1000 1024 2048",
    "Water boils at one hundred degrees at the level of the sea, and at less on a mountain. Light"
    " needs eight minutes from the sun to the earth. A year has twelve months, a week has seven"
    " days, a day has twenty four hours. Iron is heavier than wood; gold is heavier than iron."
    " Bees dance to tell other bees where flowers grow. Trees drink with their roots and breathe"
    " with their leaves. Some birds cross an ocean without rest, and some never leave their field.",
    "Good software says what it does and does what it says. When something is wrong it stops early"
    " and names the reason: which file, which field, which value, and what to change. It measures"
    " before it promises. It keeps one thing in one place. People who read it for the first time"
    " find the way in, and people who come back after a year still know where everything stands.",
    "The user asks, the assistant thinks, the assistant answers. Sometimes a tool is called with a"
    " name and some arguments, the tool returns an observation, and the assistant goes on from"
    " there. A system message at the beginning can set the rules for the whole conversation.",
)
