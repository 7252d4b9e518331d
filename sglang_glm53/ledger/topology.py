"""How the ranks share a model, and what a step of them holds.

The words are SGLang's options: `--tp-size`, `--ep-size`, `--attn-dp-size`, `--moe-a2a-backend`,
`--moe-dense-tp-size`, `--enable-dp-lm-head`, `--kv-cache-dtype`, `--speculative-num-steps`,
`--speculative-num-draft-tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error

VOCAB_PADDING = 64  # rows; SGLang pads the vocabulary before it splits it over ranks
FP8_BLOCK = 128

A2A = ("none", "deepep")
WEIGHTS = ("fp8", "bf16", "fp32")
ROUTINGS = ("even", "random")
DEVICES = ("cuda", "cpu")
# Form of the cache. `fp8`: FlashMLA's, of flashmla_kv and flashmla_sparse on Hopper; `fp8-raw`:
# without scales, of the trtllm and tilelang backends; `fp32`: this package's exact cache.
KV = ("fp8", "bf16", "fp8-raw", "fp32")


@dataclass(frozen=True)
class Topology:
    """Ranks and formats.

    Attributes:
        tp: ranks in all. ep: ranks that the experts are split over. dp: attention groups, each
            with its own requests.
        a2a: how tokens reach the experts: `none` (each rank computes its share of every token, a
            sum follows) or `deepep` (tokens are sent to the experts' ranks and back).
        dense_tp: 1 if every rank has the whole dense MLPs, 0 if they are split over all ranks.
        dp_lm_head: lm_head split over an attention group's ranks, not over all.
        weights: form of the projections. kv: form of the cache.
        device: `cuda`, with SGLang's custom all-reduce over NVLink, or `cpu`, without it.
    """

    tp: int = 1
    ep: int = 1
    dp: int = 1
    a2a: str = "none"
    dense_tp: int = 0
    dp_lm_head: int = 0
    weights: str = "fp8"
    kv: str = "fp8"
    device: str = "cuda"

    @property
    def attn_tp(self) -> int:
        """Ranks that share one request's attention heads."""
        return self.tp // self.dp

    @property
    def moe_tp(self) -> int:
        """Ranks that share one expert's inner dimension."""
        return self.tp // self.ep

    @property
    def embed_ranks(self) -> int:
        """Ranks that the embedding is split over: an attention group's."""
        return self.attn_tp

    @property
    def head_ranks(self) -> int:
        return self.attn_tp if self.dp_lm_head else self.tp

    @property
    def name(self) -> str:
        """As `parse` reads it, without what is the default."""
        parts = [f"tp={self.tp}"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "tp" and value != field.default:
                parts.append(f"{field.name}={value}")
        return ",".join(parts)

    def check(self, config: Glm53Config) -> None:
        """Refuse what no server can be.

        Raises:
            Glm53Error: one line that names the option.
        """
        for name in ("tp", "ep", "dp"):
            if getattr(self, name) < 1:
                raise Glm53Error(f"{name} is {getattr(self, name)}; give 1 or more")
        if self.dp > self.tp:
            raise Glm53Error(
                f"dp {self.dp} exceeds tp {self.tp}: attention groups share the tp ranks; "
                f"use at most dp={self.tp}"
            )
        if self.tp % self.dp:
            raise Glm53Error(
                f"dp {self.dp} does not divide tp {self.tp}; each attention group has tp / dp ranks"
            )
        if config.num_attention_heads % self.attn_tp:
            raise Glm53Error(
                f"tp / dp = {self.attn_tp} does not divide the {config.num_attention_heads} "
                "attention heads; use a divisor"
            )
        if self.ep > self.tp or self.tp % self.ep:
            raise Glm53Error(f"ep {self.ep} does not divide tp {self.tp}; use a divisor")
        if config.n_routed_experts % self.ep:
            raise Glm53Error(
                f"ep {self.ep} does not divide the {config.n_routed_experts} routed experts; "
                "use a divisor"
            )
        self._check_choice("a2a", A2A)
        self._check_choice("weights", WEIGHTS)
        self._check_choice("kv", KV)
        self._check_choice("device", DEVICES)
        self._check_choice("dense_tp", (0, 1))
        self._check_choice("dp_lm_head", (0, 1))
        if self.a2a == "deepep" and self.ep != self.tp:
            raise Glm53Error(
                f"a2a deepep sends tokens to whole experts on all {self.tp} ranks, but ep is "
                f"{self.ep}; use ep={self.tp}"
            )
        self._check_split("an expert's inner width", config.moe_intermediate_size, self.moe_tp)
        if self.a2a == "none":
            shared = config.moe_intermediate_size * config.n_shared_experts
            self._check_split("the shared expert's inner width", shared, self.tp)
        if not self.dense_tp and config.first_k_dense_replace:
            self._check_split("the dense MLP's inner width", config.intermediate_size, self.tp)
        if -(-config.vocab_size // VOCAB_PADDING) * VOCAB_PADDING % self.tp:
            raise Glm53Error(
                f"tp {self.tp} does not divide the padded vocabulary of {config.vocab_size} rows"
            )

    def _check_choice(self, name: str, choices: tuple[object, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise Glm53Error(f"{name} is {value!r}; use one of {', '.join(map(str, choices))}")

    def _check_split(self, what: str, width: int, ranks: int) -> None:
        if width % ranks:
            raise Glm53Error(f"{ranks} ranks do not divide {what}, {width}")
        if self.weights == "fp8" and ranks > 1 and width // ranks % FP8_BLOCK:
            raise Glm53Error(
                f"{what}, {width}, over {ranks} ranks is {width // ranks}, which cuts the "
                f"{FP8_BLOCK} wide blocks of FP8 weights; use fewer ranks for it (a larger ep)"
            )


@dataclass(frozen=True)
class Workload:
    """What the ranks are asked to do.

    Attributes:
        batch: requests of the whole deployment that decode at the same time.
        context: tokens that each has in the cache.
        prompt: tokens of one prompt. chunk: tokens of one prefill pass, at most.
        steps, tokens: draft steps and verified tokens of a step with MTP; 0 and 0 without.
        accept: tokens that a step with MTP yields; None: not known. Without MTP it is 1.
        routing: distinct experts of a pass: `even`, tokens are dealt to all experts in turn, or
            `random`, each choice is uniform; the expected number.
        page: tokens of a page.
    """

    batch: int = 32
    context: int = 131072
    prompt: int = 8192
    chunk: int = 8192
    steps: int = 0
    tokens: int = 0
    accept: float | None = None
    routing: str = "even"
    page: int = 64

    @property
    def drafts(self) -> bool:
        return self.tokens > 0

    def check(self, config: Glm53Config, topology: Topology) -> None:
        """Refuse what cannot be asked.

        Raises:
            Glm53Error: one line that names the option.
        """
        for name in ("batch", "context", "prompt", "chunk", "page"):
            if getattr(self, name) < 1:
                raise Glm53Error(f"{name} is {getattr(self, name)}; give 1 or more")
        longest = config.max_position_embeddings
        for name in ("context", "prompt"):
            if getattr(self, name) > longest:
                raise Glm53Error(
                    f"{name} {getattr(self, name)} exceeds the model's {longest} positions"
                )
        if self.page != 64:
            raise Glm53Error(f"page is {self.page}; the index cache of SGLang has pages of 64")
        if self.routing not in ROUTINGS:
            raise Glm53Error(f"routing is {self.routing!r}; use one of {', '.join(ROUTINGS)}")
        if bool(self.steps) != bool(self.tokens):
            raise Glm53Error("MTP needs draft steps and verified tokens; give both, as in 5-1-6")
        if self.tokens and self.tokens != self.steps + 1:
            raise Glm53Error(
                f"MTP {self.steps}-1-{self.tokens}: {self.steps} drafts in a chain are verified "
                f"with {self.steps + 1} tokens; use {self.steps}-1-{self.steps + 1}"
            )
        if self.tokens and not config.num_nextn_predict_layers:
            raise Glm53Error("the config has no MTP layer (num_nextn_predict_layers is 0)")
        if self.accept is not None and not 1 <= self.accept <= max(1, self.tokens):
            raise Glm53Error(
                f"accept length {self.accept:g} is not between 1 and {max(1, self.tokens)}, the "
                "tokens of a step"
            )


# Deployments on eight GPUs (tp8 and dp8-deepep are those of SGLang's cookbook), and one rank alone.
PRESETS: Mapping[str, Topology] = {
    "tp8": Topology(tp=8),
    "tp8-ep8": Topology(tp=8, ep=8),
    "tp8-deepep": Topology(tp=8, ep=8, a2a="deepep"),
    "dp8": Topology(tp=8, dp=8),
    "dp8-ep8": Topology(tp=8, ep=8, dp=8),
    "dp8-deepep": Topology(tp=8, ep=8, dp=8, a2a="deepep"),
    "tp1": Topology(),
}


def parse(text: str, base: Topology | None = None) -> Topology:
    """A topology from a preset's name, from `tp=8,ep=8,dp=8,a2a=deepep`, or both in this order.

    Raises:
        Glm53Error: a word that is neither.
    """
    topology = base or Topology()
    numbers = {field.name for field in fields(Topology) if isinstance(field.default, int)}
    for index, word in enumerate(filter(None, (part.strip() for part in text.split(",")))):
        if "=" not in word and index == 0 and word in PRESETS:
            topology = replace(PRESETS[word], weights=topology.weights, kv=topology.kv)
            continue
        name, _, value = word.partition("=")
        if name not in {field.name for field in fields(Topology)} or not value:
            raise Glm53Error(
                f"topology {text!r}: {word!r} is neither a preset ({', '.join(PRESETS)}) nor "
                f"{', '.join(f'{field.name}=...' for field in fields(Topology))}"
            )
        if name in numbers:
            try:
                topology = replace(topology, **{name: int(value)})
            except ValueError:
                raise Glm53Error(f"topology {text!r}: {name} takes a number") from None
        else:
            topology = replace(topology, **{name: value})
    return topology
