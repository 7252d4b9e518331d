"""The bound of a step, what MTP must accept to pay, and how much context fits.

The bound is the larger of bytes over bandwidth and FLOPs over peak; the collectives' time stands
beside it, since how much of it hides behind computation is not a matter of counting.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger.collectives import Collective
from sglang_glm53.ledger.formula import Figure, Number, Sheet
from sglang_glm53.ledger.hardware import Hardware
from sglang_glm53.ledger.topology import Topology, Workload


@dataclass(frozen=True)
class Bound:
    """Milliseconds of one step of a rank.

    Attributes:
        memory: reading its bytes. compute: its FLOPs at the FP8 (or bf16) peak.
        communication: its collectives one after another, not overlapped.
    """

    memory: Figure
    compute: Figure
    communication: Figure

    @property
    def bound_ms(self) -> float:
        return float(max(self.memory.value, self.compute.value))

    @property
    def limit(self) -> str:
        return "memory" if self.memory.value >= self.compute.value else "compute"

    @property
    def with_communication_ms(self) -> float:
        return self.bound_ms + float(self.communication.value)


def bound(
    bytes_read: Number,
    flops: Number,
    collectives: list[tuple[int, Collective]],
    hardware: Hardware,
    weights: str,
) -> Bound:
    """The bound of a step that reads and computes this much.

    Args:
        collectives: each with how often its pass runs in the step.
        weights: form of the projections; FP8 ones are multiplied in FP8.
    """
    peak = hardware.fp8_flops if weights == "fp8" else hardware.bf16_flops
    speed = hardware.bandwidth
    slow = [(times, row) for times, row in collectives if row.by_network(hardware)]
    on_link = sum(times * row.total_busiest for times, row in collectives)
    on_link -= sum(times * row.total_busiest for times, row in slow)
    on_network = sum(times * row.count * row.crossing(hardware.gpus) for times, row in slow)
    launches = sum(times * row.count for times, row in collectives)
    sheet = Sheet(
        {
            "bytes_read": bytes_read,
            "flops": flops,
            "bandwidth": speed.best_known,
            "peak": peak.best_known,
            "on_link": on_link,
            "on_network": on_network,
            "launches": launches,
            "link": hardware.link.best_known,
            "network": hardware.network.best_known,
            "latency": hardware.launch_latency.best_known,
        }
    )
    return Bound(
        sheet.figure(
            "memory_ms",
            "bytes_read / bandwidth * 1000",
            "ms",
            "reading",
            f"{speed.origin}: {speed.source}",
        ),
        sheet.figure(
            "compute_ms", "flops / peak * 1000", "ms", "computing", f"{peak.origin}: {peak.source}"
        ),
        sheet.figure(
            "communication_ms",
            "(on_link / link + on_network / network + launches * latency) * 1000",
            "ms",
            "collectives, not overlapped",
            f"{hardware.link.origin}: {hardware.link.source}; network: {hardware.network.source}; "
            "each collective at the slower of both; launch latency: "
            f"{hardware.launch_latency.source}",
        ),
    )


def capacity(
    config: Glm53Config,
    topology: Topology,
    workload: Workload,
    hardware: Hardware,
    *,
    loaded: Number,
    kv_token: Number,
    mem_fraction: float,
    free: Number | None = None,
) -> Sheet:
    """What fits beside the weights: SGLang's rule for the size of its pool.

    The pool gets what is free after loading, less the share of what was free before it that
    `--mem-fraction-static` leaves for activations, graphs and workspaces.

    Args:
        loaded: bytes by which loading lowers the free memory, the draft's included.
        free: bytes that are free before loading; default: all that the driver and the rank's own
            context leave.
    """
    before = hardware.before_loading
    names: dict[str, Number] = {
        "memory": hardware.memory_bytes.best_known,
        "before_loading": before.of(topology.tp),
        "fraction": mem_fraction,
        "loaded": loaded,
        "kv_token": kv_token,
        "page_tokens": workload.page,
        "context": workload.context,
        "groups": topology.dp,
        "longest": config.max_position_embeddings,
    }
    if free is not None:
        names["given"] = free
    sheet = Sheet(names)
    rule = "SGLang mem_cache/kv_cache_configurator.py _profile_available_bytes"
    origin = f"{hardware.memory_bytes.origin}: {hardware.memory_bytes.source}; {before.source}"
    sheet.add(
        "free_before",
        "memory - before_loading" if free is None else "given",
        "B",
        "free before loading",
        origin if free is None else "given",
    )
    sheet.add("free_after", "free_before - loaded", "B", "free after loading", "ledger/loading.py")
    sheet.add(
        "outside", "free_before * (1 - fraction)", "B", "kept free of weights and cache", rule
    )
    sheet.add("pool_bytes", "max(0, free_after - outside)", "B", "room for the cache", rule)
    sheet.add(
        "pool_tokens",
        "floor(pool_bytes / kv_token / page_tokens) * page_tokens",
        "tokens",
        "tokens that a rank's cache holds",
        rule,
    )
    paged = "ceil({} / page_tokens) * page_tokens"
    sheet.add(
        "concurrent",
        f"groups * floor(pool_tokens / ({paged.format('context')}))",
        "requests",
        "requests of this context at the same time, all ranks",
        "each attention group has its own requests; its ranks hold the same latents",
    )
    sheet.add(
        "concurrent_longest",
        f"groups * floor(pool_tokens / ({paged.format('longest')}))",
        "requests",
        "requests of the longest context",
    )
    return sheet
