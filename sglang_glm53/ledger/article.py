"""The hand-made account that this project started from, held against the ledger.

An article walked one request through SGLang on eight H200 and counted as it went. Here is each of
its figures with the ledger's formula beside it: those that are right, and those that are not, with
the reason. `tests/unit/test_ledger_article.py` holds both; docs/request-path.md prints them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger import memory, model, units
from sglang_glm53.ledger.account import Account
from sglang_glm53.ledger.collectives import Collective, Rows, collectives
from sglang_glm53.ledger.formula import Figure, Number, Sheet
from sglang_glm53.ledger.glm53 import config_json
from sglang_glm53.ledger.hardware import load
from sglang_glm53.ledger.topology import PRESETS, Topology, Workload

BATCH, CONTEXT, LONGEST, PROMPT = 32, 131072, 1048576, 8192
MTP_TOKENS = 6


@dataclass(frozen=True)
class Claim:
    """One figure of the article.

    Attributes:
        topic: what is counted. words: as it is written there, in English.
        said: the article's number, in `figure`'s unit; None for a statement.
        digit: one unit of its last written digit; the article rounds, or cuts.
        figure: ours. why: what is right where the article is not; empty where it is right.
    """

    topic: str
    words: str
    said: float | None
    digit: float
    figure: Figure | None
    why: str = ""
    shown: str = ""

    @property
    def is_right(self) -> bool:
        return not self.why

    @property
    def agrees(self) -> bool:
        """Whether the numbers are the same to the last digit that the article writes."""
        assert self.said is not None and self.figure is not None
        return abs(self.figure.value - self.said) < self.digit

    @property
    def here(self) -> str:
        """Our number, for people."""
        if self.shown or self.figure is None:
            return self.shown
        return units.figure(self.figure)


class Claims:
    """All of them; made once."""

    def __init__(self) -> None:
        self.config = Glm53Config.from_hf(config_json())
        self.hardware = load("h200")
        self.workload = Workload(batch=BATCH, context=CONTEXT, prompt=PROMPT, chunk=PROMPT)
        self.found: list[Claim] = []
        self.sheet = Sheet(
            {
                "batch": BATCH,
                "long": CONTEXT,
                "longest": LONGEST,
                "prompt": PROMPT,
                "chunk": 32768,
                "tokens": MTP_TOKENS,
                "raw_latent": 576,
                "w": model.FP8_WIDTH,
                "plain": 2,
                "link": self.hardware.link.datasheet,
                "network": self.hardware.network.datasheet,
                "bandwidth": self.hardware.bandwidth.best_known,
                **{name: value for name, value in model.cache(self.config, "fp8").items()},
            },
            model.parameters(self.config),
        )
        self._parameters()
        self._cache()
        self._computation()
        self._collectives()
        self._memory_and_time()
        self._statements()

    # --- what the claims need ---

    def account(self, topology: str | Topology, **work: Number) -> Account:
        if isinstance(topology, str):
            topology = PRESETS[topology]
        return Account(self.config, topology, replace(self.workload, **work), self.hardware)

    @cached_property
    def deepep(self) -> Account:
        return self.account("dp8-deepep")

    def rows(
        self, topology: str, kind: str, rows: int, logits: int | None = None
    ) -> list[Collective]:
        shared = PRESETS[topology]
        each = -(-rows // shared.dp)
        logit_rows = each if logits is None else logits
        return collectives(
            self.config,
            shared,
            kind,  # type: ignore[arg-type]
            Rows((each,) * shared.dp, (logit_rows,) * shared.dp),
        )

    def right(
        self, topic: str, words: str, said: float, digit: float, formula: str, unit: str
    ) -> None:
        figure = self.sheet.figure(topic, formula, unit, topic)
        self.found.append(Claim(topic, words, said, digit, figure))

    def wrong(
        self,
        topic: str,
        words: str,
        said: float,
        digit: float,
        formula: str,
        unit: str,
        why: str,
        **names: Number,
    ) -> None:
        figure = Sheet(names, self.sheet).figure(topic, formula, unit, topic)
        self.found.append(Claim(topic, words, said, digit, figure, why))

    def statement(self, topic: str, words: str, here: str, why: str) -> None:
        self.found.append(Claim(topic, words, None, 0, None, why, here))

    # --- the claims ---

    def _parameters(self) -> None:
        unit = "parameters"
        for topic, words, said, digit, formula in (
            ("A projections of a layer", "16.12M", 16.12e6, 0.01e6, "a_projections"),
            ("query up-projection of a layer", "33.55M", 33.55e6, 0.01e6, "q_b"),
            ("KV up-projection of a layer", "14.68M", 14.68e6, 0.01e6, "kv_b"),
            ("output projection of a layer", "100.66M", 100.66e6, 0.01e6, "o_proj"),
            ("attention of a layer", "about 165M", 165e6, 1e6, "attention"),
            ("attention of all layers", "about 12.9B", 12.9e9, 0.1e9, "attention_total"),
            ("indexer of a full layer", "about 9.4M", 9.4e6, 0.1e6, "indexer"),
            ("all indexers", "about 0.20B", 0.20e9, 0.01e9, "indexer_total"),
            ("one expert", "37.75M", 37.75e6, 0.01e6, "expert"),
            ("routed experts of a layer", "9.66B", 9.66e9, 0.01e9, "routed"),
            ("all routed experts", "about 724B", 724e9, 1e9, "routed_total"),
            ("shared experts", "about 2.8B", 2.8e9, 0.1e9, "shared_total"),
            ("dense MLP of a layer", "226.5M", 226.5e6, 0.1e6, "dense_mlp"),
            ("dense MLPs", "0.68B", 0.68e9, 0.01e9, "dense_total"),
            (
                "routed experts that a token meets",
                "22.7B",
                22.7e9,
                0.1e9,
                "moe_layers * top_k * expert",
            ),
            ("the model", "near 744B", 744e9, 1e9, "parameters_total"),
            ("parameters that a token meets", "about 40B", 40e9, 1e9, "parameters_active"),
        ):
            self.right(topic, words, said, digit, formula, unit)
        self.right("full indexer layers", "21", 21, 1, "full_layers", "layers")
        self.right("shared indexer layers", "57", 57, 1, "shared_layers", "layers")

    def _cache(self) -> None:
        self.right(
            "latent elements of a token", "44,928", 44928, 1, "latent_elements_token", "elements"
        )
        for topic, words, said, digit, formula in (
            ("index keys read at 128K", "352 MB", 352e6, 1e6, "full_layers * long * 128"),
            ("index keys read at 1M", "2.8 GB", 2.8e9, 0.1e9, "full_layers * longest * 128"),
        ):
            self.right(topic, words, said, digit, formula, "B")
        self.right("index keys of a page", "8,448 B", 8448, 1, "index_page", "B")
        why = (
            "flashmla_kv, which the article's command asks for, stores 512 B in FP8, four float32 "
            "scales and the RoPE key in bf16; 576 B is the trtllm layout; bf16, Hopper's default, "
            "is 1,152 B"
        )
        self.wrong("latent of a token and layer in FP8", "576 B", 576, 1, "latent_token", "B", why)
        self.wrong(
            "cache of a token in FP8", "44.9 kB", 44.9e3, 100, "kv_bytes_per_token", "B",
            "656 B a layer, and the index keys of 21 layers",
        )  # fmt: skip
        self.wrong(
            "cache of 1M tokens in FP8", "about 47 GB", 47e9, 1e9, "longest * latents_token", "B",
            "656 B a layer; with the index keys 56.6 GB",
        )  # fmt: skip
        self.wrong(
            "latents of a page and layer", "36,864 B", 36864, 1, "latent_page", "B", "656 B a token"
        )
        self.wrong(
            "latents that a decoded token reads, a layer", "1.2 MB", 1.2e6, 0.1e6,
            "index_topk * latent_token", "B", "656 B a token",
        )  # fmt: skip
        self.wrong(
            "latents that a decoded token reads", "about 92 MB", 92e6, 1e6,
            "layers * index_topk * latent_token", "B", "656 B a token",
        )  # fmt: skip
        self.wrong(
            "index keys, of the latents", "6 %", 6, 0.5,
            "index_keys_token / latents_token * 100", "%",
            "of the larger latents",
        )  # fmt: skip

    def _computation(self) -> None:
        self.right(
            "latent q·k of a token and layer", "134M FLOPs", 134e6, 1e6,
            "2 * heads * kv_lora * index_topk", "FLOP",
        )  # fmt: skip
        self.right(
            "kv_b of a chunk of 32,768", "0.96 TFLOPs", 0.96e12, 0.01e12,
            "2 * chunk * kv_lora * heads * (nope + v_dim)", "FLOP",
        )  # fmt: skip
        self.wrong(
            "a token's FLOPs, its weights alone", "83.3 GFLOPs", 83.3e9, 0.1e9,
            "2 * parameters_active_layers", "FLOP",
            "the article takes all 78 layers for MoE layers, leaves out shared expert and indexer, "
            "and puts the latent q·k in; lm_head is 1.9 GFLOP more",
        )  # fmt: skip
        self.wrong(
            "a token's attention over 2,048 latents", "2 × 67.1M a layer", 2 * 67.1e6 * 78, 1e9,
            "layers * 2 * heads * index_topk * (kv_lora + rope + kv_lora)", "FLOP",
            "q·k is over 576 values, and probabilities times latents is as much again",
        )  # fmt: skip
        self.wrong(
            "a token's index scores at 128K", "left out", 0, 1,
            "full_layers * 2 * index_heads * index_dim * long", "FLOP",
            "as much as attention itself at this length, and it grows with the context",
        )  # fmt: skip
        rate = self.hardware.fp8_flops.datasheet
        self.wrong(
            "FP8 peak of an H200", "about 4 PFLOPS", 4e15, 1e15, "dense_peak", "FLOP/s",
            "dense; 3,958 TFLOPS are with 2:4 sparsity", dense_peak=int(rate),
        )  # fmt: skip

    def _collectives(self) -> None:
        tp = self.rows("tp8", "prefill", PROMPT, 1)
        reduces = [row for row in tp if row.where in ("attention output", "FFN output")]
        self._counted("all-reduces of attention and FFN, TP 8", "156", reduces, 156)
        decode = self.rows("dp8-deepep", "decode", BATCH)
        experts = [row for row in decode if row.where == "experts"]
        self._counted("dispatches and combines of a step", "at least 150", experts, 150)
        self.right(
            "an all-reduce of 8,192 tokens", "96 MB, which are MiB", 96 * 2**20, 2**20,
            "prompt * hidden * plain", "B",
        )  # fmt: skip
        self.wrong(
            "all-reduces of 8,192 tokens, TP 8", "about 15 GB", 15e9, 0.5e9,
            "2 * layers * prompt * hidden * plain", "B", "156 × 96 MiB; MiB were added up as MB",
        )  # fmt: skip
        gather = self.rows("dp8", "decode", BATCH)
        moved = [row for row in gather if row.where.startswith("FFN")]
        self._counted("gathers and scatters of a step, DP 8", "156", moved, 156)
        self.right("a gather of 32 rows", "393 KB", 393e3, 1e3, "batch * hidden * plain", "B")
        self.right(
            "gathers and scatters of a step", "61 MB", 61e6, 1e6,
            "2 * layers * batch * hidden * plain", "B",
        )  # fmt: skip
        self.right(
            "a gather of 192 rows",
            "about 2.4 MB",
            2.4e6,
            0.1e6,
            "tokens * batch * hidden * plain",
            "B",
        )
        self.right(
            "logits of 192 rows", "about 59 MB", 59e6, 1e6, "tokens * batch * vocab * plain", "B"
        )
        padded = "1.5 MiB a layer were taken for MB"
        scales = "; the float32 scales of the FP8 rows are 3.7 MB more"
        self.wrong(
            "dispatch of a step, 32 rows", "about 113 MB", 113e6, 1e6,
            "moe_layers * batch * top_k * hidden", "B", padded + scales,
        )  # fmt: skip
        self.wrong(
            "combine of a step, 32 rows", "about 226 MB", 226e6, 1e6,
            "moe_layers * batch * top_k * hidden * plain", "B", padded,
        )  # fmt: skip
        self.right(
            "dispatch and combine of 8,192 tokens", "about 90 GB", 90e9, 1e9,
            "moe_layers * prompt * top_k * hidden * (1 + plain)", "B",
        )  # fmt: skip
        self.wrong(
            "dispatch and combine with MTP, a layer", "about 2 MB", 2e6, 1e6,
            "tokens * batch * top_k * hidden * (1 + plain)", "B",
            "192 rows, eight experts each; the sum over the layers, 2.1 GB, is right",
        )  # fmt: skip
        step = self.deepep.decode
        self.wrong(
            "collectives for a generated token, DP 8 with DeepEP", "12.5 MB", 12.5e6, 0.1e6,
            "collective_bytes / batch", "B",
            "gather and DeepEP are added up there, but a layer has one or the other: DeepEP in the "
            "75 MoE layers, gather and scatter in the 3 dense ones",
            collective_bytes=step.collective_bytes,
        )  # fmt: skip

    def _counted(self, topic: str, words: str, rows: list[Collective], said: int) -> None:
        sheet = Sheet({f"row_{index}": row.count for index, row in enumerate(rows)})
        formula = " + ".join(f"row_{index}" for index in range(len(rows)))
        self.found.append(Claim(topic, words, said, 1, sheet.figure(topic, formula, "", topic)))

    def _memory_and_time(self) -> None:
        self.right(
            "routed experts of a rank, EP 8", "91 GB", 91e9, 1e9, "routed_total * w / 8", "B"
        )
        stored = self.deepep.stored["stored_bytes"]
        self.wrong(
            "loaded weights of a rank", "about 109 GB", 109e9, 1e9, "stored", "B",
            "kv_b is there twice, as loaded and in bf16 halves; embedding and lm_head are bf16. "
            "With --moe-dense-tp-size 1 and --enable-dp-lm-head it is "
            + units.memory(
                memory.stored(
                    self.config, replace(PRESETS["dp8-deepep"], dense_tp=1, dp_lm_head=1), mtp=False
                )["stored_bytes"]
            )
            + ", measured on the slice 106.66 GiB",
            stored=stored,
        )  # fmt: skip
        self.wrong(
            "lm_head, whole", "0.95 GB", 0.95e9, 0.01e9, "lm_head * plain", "B",
            "it is bf16, as the FP8 checkpoint keeps it; eight copies are 13.3 GB more than one",
        )  # fmt: skip
        self.wrong(
            "A projections of a layer, stored", "25 MB", 25e6, 1e6, "a_projections * w", "B",
            "what the article adds is the indexer, which 21 layers have",
        )  # fmt: skip
        self.wrong(
            "replicated A projections and indexers, 8 ranks", "15.6 GB", 15.6e9, 0.1e9,
            "8 * (layers * a_projections * w + full_layers * (index_query * w"
            " + (index_key + index_gates) * plain))", "B",
            "25 MB in 78 layers there; of these, 7/8 are the price of replication",
        )  # fmt: skip
        tp = self.account("tp8")
        reduces = [
            row
            for each in tp.prefill
            for row in each.collectives
            if row.where in ("attention output", "FFN output")
        ]
        self.wrong(
            "156 all-reduces of 8,192 tokens", "19 ms", 19, 1, "sent / link * 1000", "ms",
            "a ring sends 2 × 7/8 of the message, and NVLink's 900 GB/s counts both directions",
            sent=sum(row.total_busiest for row in reduces),
        )  # fmt: skip
        dispatched = [row for _, _, row in self.deepep.decode.collectives if row.where == "experts"]
        self.wrong(
            "dispatch and combine of a step, 32 rows", "0.4 ms", 0.4, 0.1,
            "sent / link * 1000", "ms",
            "the article sends all ranks' bytes over one link; a rank sends an eighth of them, "
            "less what stays; 150 launch latencies are 0.75 ms",
            sent=sum(row.total_busiest for row in dispatched),
        )  # fmt: skip
        self.wrong(
            "DeepEP of 8,192 tokens between machines", "300 GB", 300e9, 1e9,
            "moe_layers * prompt * top_k * hidden * (1 + plain)", "B",
            "its own 90 GB, two lines before; at most, since a row goes once to each machine",
        )  # fmt: skip
        self.wrong(
            "the same over 50 GB/s", "6 s", 6, 1,
            "moe_layers * prompt * top_k * hidden * (1 + plain) / network", "s",
            "through one port; a machine has one for each GPU",
        )  # fmt: skip
        self.wrong(
            "reading a rank's experts", "19 ms", 19, 1,
            "routed_total * w / 8 / bandwidth * 1000", "ms",
            "4.8 TB/s is the datasheet's; 4.24 were measured",
        )  # fmt: skip
        self.wrong(
            "a step's bound, 32 rows", "23 ms", 23, 1, "bound_ms", "ms",
            "at the measured bandwidth, with the cache of 128K tokens a request",
            bound_ms=self.deepep.decode.bound.bound_ms,
        )  # fmt: skip
        longest = [
            self.account(name, context=LONGEST).capacity["concurrent"]
            for name in ("tp8", "dp8-deepep")
        ]
        self.wrong(
            "requests of 1M tokens on eight H200", "about 5", 5, 1, "at_tp + at_dp", "requests",
            "eight ranks' free memory does not add up: with TP 8 every rank holds the whole cache, "
            "with DP 8 one rank holds it alone, and 56.6 GB fit on neither at "
            "--mem-fraction-static 0.85",
            at_tp=longest[0], at_dp=longest[1],
        )  # fmt: skip
        one = Topology(ep=1)
        mtp = {"steps": 5, "tokens": 6, "context": 2304}
        alone = replace(self.workload, batch=1, **mtp)
        rank = Account(self._slice(), one, alone, self.hardware)
        many = self.account("dp8-deepep", **mtp)
        assert rank.break_even is not None and many.break_even is not None
        self.found.append(
            Claim(
                "accept length at which 5-1-6 breaks even",
                "about 2",
                2.0,
                0.5,
                rank.break_even,
                "it depends on the batch, since more rows reach more experts: "
                f"{rank.break_even.value:.1f} for one request on a rank slice, "
                f"{many.break_even.value:.2f} for 32 on eight ranks",
                f"{rank.break_even.value:.1f} and {many.break_even.value:.2f}",
            )
        )

    def _slice(self) -> Glm53Config:
        return replace(self.config, n_routed_experts=self.config.n_routed_experts // 8)

    def _statements(self) -> None:
        say = self.statement
        say(
            "where attention's sum is completed, TP",
            "reduce-scatter in attn_boundary.finish",
            "all-reduce in ffn_boundary.prepare",
            "deferred to where the FFN's norm reads it; reduce-scatter where rows are split",
        )
        say(
            "TP and EP with DeepEP",
            "all-reduce after o_proj",
            "reduce-scatter before the experts, all-gather before the next attention",
            "each rank dispatches its own share of the rows",
        )
        say(
            "DP attention with DeepEP, a MoE layer",
            "all-gather, dispatch, combine, reduce-scatter",
            "dispatch, combine",
            "each rank's rows go to the experts from where they are",
        )
        say(
            "around an FFN under attention DP",
            "all-gather and reduce-scatter",
            "so with MTP; in prefill and plain decode all-reduces of one buffer, with EP 8 a "
            "reduce-scatter on the way back",
            "a prefill's rows are uneven; in decode SGLang prefers its custom all-reduce",
        )
        say(
            "lm_head under attention DP",
            "whole on every rank",
            "split over all ranks, unless --enable-dp-lm-head",
            "so hidden states and logits are gathered over all ranks",
        )
        say(
            "cache under TP",
            "its pages are split over the ranks",
            "every rank holds all of it",
            "one latent serves all heads",
        )
        say(
            "form of attention in prefill",
            "expanded (MHA)",
            "expanded up to 2,048 tokens, absorbed and sparse beyond",
            "SGLang's DSA backend decides by the longest request of the pass; where a prefill "
            "graph replays it is always absorbed",
        )
        say(
            "the fused all-reduce and norm",
            "a ring that norms chunk by chunk",
            "one-shot or two-shot over symmetric memory",
            "flashinfer's trtllm kernel on Hopper",
        )
        say(
            "fused_norm_rope with has_indexer",
            "norms, RoPE and cache in one kernel",
            "separate kernels",
            "that kernel belongs to another model's path",
        )
        say(
            "what keeps index keys in the prefix cache",
            "PageInterleaveDSATokenToKVPool",
            "any DSA pool: one page id for both",
            "the interleaved pool needs trtllm and disaggregation, so it does not run on Hopper",
        )
        say(
            "the MTP layer's code",
            "glm4_moe_nextn.py",
            "deepseek_nextn.py; here models/glm_moe_dsa_nextn.py",
            "GlmMoeDsaForCausalLMNextN",
        )


def claims() -> list[Claim]:
    """Every claim, right ones first within their subject."""
    return Claims().found
