"""The servers that are started, as few as reach every condition, and how much each is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gpu.children import side_environment
from server.harness import Server

from .recall import Plan
from .switch import Switch

SEED = 4
COPY_LENGTH = 256  # tokens: longer than index_topk

PARSERS = ("--reasoning-parser", "glm45", "--tool-call-parser", "glm47")
MTP = (
    *("--speculative-algorithm", "EAGLE"),
    *("--speculative-num-steps", "5"),
    *("--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "6"),
)
# Both are said: SGLang would size the cache by the chunk and the machine's memory.
MEMORY = ("--mem-fraction-static", "0.5", "--max-total-tokens")
CACHE = (*MEMORY, "18560")  # two prompts of the longest context
# One prompt of the longest context and little else: whatever comes next pushes it out.
SMALL_CACHE = (*MEMORY, "9280")
WHOLE = ("--chunked-prefill-size", "8256")  # no prompt is longer
CHUNKS = ("--chunked-prefill-size", "2048")
CHUNKS_OF_TWO = ("--chunked-prefill-size", "8192")  # attention ranks share it out
DENSE_TOPK = 8448  # no prompt is longer: attention is dense
TP = ("--tp-size", "2")
DP = (*TP, "--dp-size", "2", "--enable-dp-attention")
# Every 16th decode step one of several running requests is retracted.
RETRACT = (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "16"))
SELECTIONS = ("--enable-return-indexer-topk", "--enable-metrics")


@dataclass(frozen=True)
class Setting:
    """One server.

    reaches: the conditions that its measurements are taken under, for the report.
    gpus: that it needs, on a GPU.
    """

    name: str
    reaches: str
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    gpus: int = 1

    @property
    def speculates(self) -> bool:
        return "--speculative-algorithm" in self.arguments

    @property
    def is_dense(self) -> bool:
        """Whether attention reads everything; such a server is asked for recall alone."""
        return self.name == "dense"

    @property
    def evicts(self) -> bool:
        """Whether the cache is so small that prompts push each other out."""
        return SMALL_CACHE[-1] in self.arguments

    @property
    def retracts(self) -> bool:
        return "SGLANG_TEST_RETRACT" in dict(self.environment)

    @property
    def shows_selections(self) -> bool:
        return SELECTIONS[0] in self.arguments

    @property
    def chats(self) -> bool:
        return PARSERS[0] in self.arguments

    @property
    def ranks(self) -> int:
        """Attention data-parallel ranks, each with a cache of its own."""
        return 2 if "--enable-dp-attention" in self.arguments else 1


PLAIN = Setting(
    "plain",
    "chunks of 2,048, hits, eviction, retraction, no MTP",
    (*CHUNKS, *SMALL_CACHE, *SELECTIONS, *PARSERS),
    RETRACT,
)
WITH_MTP = Setting(
    "mtp",
    "whole prefill, hits, eviction, retraction, MTP 5-1-6",
    (*WHOLE, *SMALL_CACHE, *MTP, *PARSERS),
    RETRACT,
)
WHOLE_PLAIN = Setting("whole", "whole prefill, hits, no MTP", (*WHOLE, *CACHE, *PARSERS))
DENSE = Setting(
    "dense",
    "whole prefill, dense attention",
    (*WHOLE, *CACHE, "--json-model-override-args", json.dumps({"index_topk": DENSE_TOPK})),
)
# SGLang's top-k kernels select 2,048 at most; its dense prefill takes any length it is told to.
DENSE_ON_GPU = Setting(
    "dense",
    "whole prefill, dense attention",
    (*WHOLE, *CACHE),
    (("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "16384"),),
)
TP_2 = Setting("tp2", "TP 2, chunks of 2,048", (*TP, *CHUNKS, *CACHE), gpus=2)
TP_2_MTP = Setting("tp2-mtp", "TP 2, MTP 5-1-6", (*TP, *WHOLE, *CACHE, *MTP), gpus=2)
DP_2 = Setting("dp2", "attention DP 2", (*DP, *CHUNKS_OF_TWO, *CACHE), gpus=2)
DP_2_MTP = Setting(
    "dp2-mtp", "attention DP 2, MTP 5-1-6", (*DP, *CHUNKS_OF_TWO, *CACHE, *MTP), gpus=2
)
SETTINGS = (PLAIN, WITH_MTP, WHOLE_PLAIN, DENSE, TP_2, TP_2_MTP, DP_2, DP_2_MTP)
# A captured decode graph each for one request and for up to eight; several servers share a GPU.
ON_GPU = (
    *("--dtype", "bfloat16", "--mem-fraction-static", "0.7", "--max-running-requests", "8"),
    *("--cuda-graph-bs-decode", "1", "8", "--cuda-graph-backend-prefill", "disabled"),
)
CACHE_ON_GPU = ("--max-total-tokens", "65536")  # where the setting names none


@dataclass(frozen=True)
class Amount:
    """How much is asked of one server.

    recall: fresh prompts and hits. again: haystacks a context asked once more after eviction.
    selected: recall prompts whose selection is read, a context. copies: passages. chats:
    conversations. full: whether what CI leaves out is run.
    """

    recall: Plan
    again: int
    selected: int
    copies: int
    chats: int
    full: bool = False


def amount(prompts: int) -> Amount:
    """What is asked for `prompts` recall prompts a context.

    Up to ten (CI), five questions share their records: on two cores a prompt of 8,192 tokens is 6
    to 8 seconds. From eleven on each has records of its own, and a hit on top.
    """
    if prompts <= 10:
        plan = Plan(haystacks=max(2, -(-prompts // 5)), hits=4)
        return Amount(plan, again=1, selected=1, copies=3, chats=8)
    plan = Plan(haystacks=prompts, hits=1)
    fifth, third = -(-prompts // 5), -(-prompts // 3)
    return Amount(plan, again=fifth, selected=min(third, 24), copies=12, chats=60, full=True)


def launch(
    setting: Setting,
    model: Path,
    folder: Path,
    *,
    switchable: bool = False,
    arguments: tuple[str, ...] = (),
    side: str = "ours",
) -> tuple[Server, Switch]:
    """Start a setting's server, and see who serves; the caller stops it.

    Args:
        folder: of its log, made if it is not there.
        switchable: install the planted faults, all off.
        arguments: beside the setting's.
        side: "ours" or "stock".
    """
    switch = Switch(folder / "faults")
    variables = {**dict(setting.environment), **side_environment(side)}
    if switchable:
        variables |= switch.environment()
    given = (*setting.arguments, *arguments, "--sleep-on-idle")
    server = Server(model, given, folder, probe=False, environment=variables)
    server.start()
    try:
        block = server.get("/server_info")["internal_states"][0]["glm53"]
        assert block["serving"] == side, f"asked for {side}, but {block['serving']} serves: {block}"
    except BaseException:
        server.kill()
        raise
    return server, switch
