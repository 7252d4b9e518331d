"""Rules on config.json and the tokenizer's files."""

from __future__ import annotations

from sglang_glm53.checks.arguments import as_written
from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.features import stands_down
from sglang_glm53.checks.packages import ARCHITECTURE
from sglang_glm53.checks.reading import architectures
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict

OVERRIDE = "--json-model-override-args"
SCHEDULE = ("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset")

# Ends of an assistant's turn in GLM's chat format: the next speaker's token.
TURN_ENDS = ("<|user|>", "<|observation|>")

# Weight-only integer schemes, whose checkpoints keep the shared expert in another precision.
INTEGER_SCHEMES = ("auto-round", "auto_round", "awq", "gptq", "w4afp8", "moe_wna16")


def _garbage(facts: Facts) -> Verdict:
    """Another architecture has other fields, and a rule of its own."""
    named = architectures(facts)
    if not facts.config_problem or (named and ARCHITECTURE not in named):
        return None
    what, _, todo = facts.config_problem.rpartition("; ")
    if not what:
        what, todo = facts.config_problem, "take config.json from the model's own repository"
    return {"what": what, "do": todo}


def _definition_missing(facts: Facts) -> Verdict:
    return {"filled": ", ".join(facts.config.filled)} if facts.config.filled else None


def _indexer_layout_missing(facts: Facts) -> Verdict:
    """Where SGLang's own class serves, nobody fills the field in."""
    lost = facts.raw_config.get("indexer_rope_interleave") is None
    down = stands_down(facts)
    return {"feature": down[0].name} if lost and down else None


def _override_ignored(facts: Facts) -> Verdict:
    override = as_written(facts.argv).get(field_of_override())
    if not isinstance(override, dict) or "indexer_types" in override:
        return None
    names = [name for name in SCHEDULE if override.get(name) is not None]
    return {"names": " and ".join(names)} if names else None


def field_of_override() -> str:
    return OVERRIDE.removeprefix("--").replace("-", "_")


def _tokenizer_class(facts: Facts) -> Verdict:
    from packaging.version import Version

    name = facts.tokenizer_config.get("tokenizer_class")
    version = facts.versions.get("transformers")
    if name != "TokenizersBackend" or version is None or Version(version).major >= 5:
        return None
    return {"version": version}


def _tokenizer_missing(facts: Facts) -> Verdict:
    if "tokenizer_path" in (facts.given or ()) or facts.arg("skip_tokenizer_init"):
        return None
    names = ("tokenizer.json", "tokenizer.model")
    return not any((facts.checkpoint / name).is_file() for name in names)


def _added_tokens(facts: Facts) -> dict[str, int]:
    """Token ids by text, of tokens that are added to the vocabulary."""
    added = facts.tokenizer_config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict):
        return {}
    return {
        str(token.get("content")): int(number)
        for number, token in added.items()
        if isinstance(token, dict) and str(number).isdecimal()
    }


def _beyond_vocabulary(facts: Facts) -> Verdict:
    beyond = {
        text: number
        for text, number in _added_tokens(facts).items()
        if number >= facts.config.vocab_size
    }
    if not beyond:
        return None
    text, number = next(iter(beyond.items()))
    return {"text": text, "number": number, "rows": facts.config.vocab_size}


def _turn_does_not_end(facts: Facts) -> Verdict:
    ends: set[int] = set()
    for content in (facts.raw_config, facts.generation_config or {}):
        eos = content.get("eos_token_id")
        ends.update([eos] if isinstance(eos, int) else eos or ())
    tokens = _added_tokens(facts)
    missing = [text for text in TURN_ENDS if text in tokens and tokens[text] not in ends]
    return {"missing": " and ".join(missing)} if missing else None


def _integer_shared_expert(facts: Facts) -> Verdict:
    declared = facts.raw_config.get("quantization_config") or {}
    method = str(declared.get("quant_method", "")).lower()
    if method not in INTEGER_SCHEMES or facts.arg("disable_shared_experts_fusion"):
        return None
    return {"method": method}


RULES: tuple[Rule, ...] = (
    Rule(
        id="config-garbage",
        title="config.json is GLM-5.3's",
        severity=FAIL,
        reads=("config_problem", "raw_config"),
        condition=_garbage,
        message="{what}",
        cure="{do}",
        symptom="A model that answers, and worse than it should: wrong positions selected, other "
        "experts chosen, a bias ignored; or an exception in a layer.",
        cause="SGLang takes a missing or changed field for the default of another model.",
        source=(
            "ml-explore/mlx-lm#1453",
            "sgl-project/sglang#21286",
            "sgl-project/sglang#21925",
            "SGLang's deepseek_v2.py, tried",
        ),
        at_start=False,
    ),
    Rule(
        id="config-definition-missing",
        title="config.json says what makes the model GLM-5.3",
        severity=WARN,
        reads=("config",),
        condition=_definition_missing,
        message="config.json lacks {filled}, which our classes take and SGLang's own do not",
        cure="take config.json from the model's own repository",
        symptom="An AttributeError, or answers that are worse above 2,048 tokens.",
        cause="transformers leaves these fields out when it saves a config again.",
        source=("huggingface/transformers#46842", "SGLang's deepseek_v2.py, tried"),
        at_start=False,
    ),
    Rule(
        id="config-indexer-layout",
        title="the indexer's RoPE layout is said where SGLang's own class serves",
        severity=FAIL,
        reads=("raw_config", "config", "args"),
        condition=_indexer_layout_missing,
        message="config.json lacks indexer_rope_interleave, and SGLang's own class serves "
        "({feature})",
        cure='put "indexer_rope_interleave": true into config.json, or give '
        f"{OVERRIDE} '{{{{\"indexer_rope_interleave\": true}}}}'",
        symptom="Good answers below 2,048 tokens; single-character errors or gibberish above.",
        cause="SGLang takes a missing field for DeepSeek's layout, so the indexer ranks wrong "
        "positions.",
        source=(
            "huggingface/transformers#46842",
            "ikawrakow/ik_llama.cpp#2099",
            "vllm-project/vllm-ascend#4641",
        ),
    ),
    Rule(
        id="config-override-ignored",
        title="an index schedule in the override takes effect",
        severity=FAIL,
        reads=("argv",),
        condition=_override_ignored,
        message=f"{{names}} in {OVERRIDE} does nothing: transformers fills in indexer_types, "
        "which wins",
        cure='put "indexer_types": null (or the list itself) beside it',
        symptom="No error and no change: every layer still runs its indexer.",
        cause="transformers fills indexer_types while it loads the config, before the override; "
        "SGLang reads that list first.",
        source=("sgl-project/sglang#21286", "sgl-project/sglang#21925", "tried"),
        at_start=False,
    ),
    Rule(
        id="tokenizer-class",
        title="transformers knows the tokenizer's class",
        severity=FAIL,
        reads=("tokenizer_config", "versions"),
        condition=_tokenizer_class,
        message="the tokenizer was saved by transformers 5; transformers here is {version}",
        cure="install transformers 5",
        symptom="The tokenizer, or a benchmark client's, cannot be loaded.",
        cause="TokenizersBackend is a class of transformers 5.",
        source=("NVIDIA/srt-slurm#20",),
    ),
    Rule(
        id="tokenizer-missing",
        title="the checkpoint has its tokenizer",
        severity=FAIL,
        reads=("checkpoint", "raw_config"),
        condition=_tokenizer_missing,
        message="the checkpoint's folder has no tokenizer.json",
        cure="copy it from the model's own repository, or give --tokenizer-path DIR",
        symptom="`Couldn't instantiate the backend tokenizer` after the config was read.",
        cause="An incomplete download or conversion.",
        source=("sgl-project/sglang#37621",),
        at_start=False,
    ),
    Rule(
        id="tokenizer-beyond-vocabulary",
        title="every added token has a row in the embedding",
        severity=FAIL,
        reads=("tokenizer_config", "config"),
        condition=_beyond_vocabulary,
        message="the tokenizer's {text} is token {number}; the embedding has {rows} rows",
        cure="take tokenizer_config.json and config.json from the same repository",
        symptom="An illegal memory access at the first request that has it; the server ends.",
        cause="The tokenizer is another model's.",
        source=("tried on SGLang",),
    ),
    Rule(
        id="turn-does-not-end",
        title="generation stops at the end of the assistant's turn",
        severity=WARN,
        reads=("tokenizer_config", "raw_config"),
        condition=_turn_does_not_end,
        message="{missing} is not among eos_token_id of config.json or generation_config.json",
        cure="take generation_config.json from the model's own repository",
        symptom="The model answers, then plays the user, or goes on after a tool call.",
        cause="GLM ends a turn with the next speaker's token, which SGLang must know as an end.",
        source=("GLM-5's chat template",),
    ),
    Rule(
        id="integer-shared-expert",
        title="the shared expert keeps its own precision",
        severity=WARN,
        reads=("raw_config", "args", "quantization"),
        condition=_integer_shared_expert,
        message="the checkpoint is {method}, and the shared expert would be fused under it",
        cure="give --disable-shared-experts-fusion",
        symptom="The first token is wrong, and log-probabilities are flat.",
        cause="The shared expert is stored in another precision than the routed ones.",
        source=("sgl-project/sglang#25261",),
    ),
)
