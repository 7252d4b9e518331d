"""What the ranks send each other, and when.

Derived from SGLang's layer boundary (layers/layer_boundary/), layers/dp_attention.py,
layers/logits_processor.py and layers/vocab_parallel_embedding.py of 0.5.23; `glm53 trace` holds it
against what runs. Attention and FFN return partial sums. The next stage completes them:

* attention of one group, no dispatcher: an all-reduce each, where the next stage reads;
* attention DP without a dispatcher: the FFN runs on every rank's rows. They are gathered before it
  and its sum is brought back: by all-gather and reduce-scatter of equal parts, or by all-reduce of
  one buffer with a place for each rank's rows (on the way back by reduce-scatter of unequal parts
  where ep = dp = tp). Prefill takes the second way; so does a plain decode step on GPUs while
  SGLang's custom all-reduce holds the buffer. Where an attention group has several ranks, the
  gather completes its sum as well;
* a dispatcher (DeepEP): each rank brings its own rows of a MoE layer to the experts and gets them
  back summed. Nothing is gathered or scattered over attention DP there; the dense layers still do.

`bytes` is the whole tensor: an all-reduce's, an all-gather's result, a reduce-scatter's input; for
dispatch and combine what all ranks send together. `sent` is what the rank that sends most sends,
`received` what the one that receives most receives: in a ring both are its share, 2 (n - 1) / n of
an all-reduce, (n - 1) / n of the others. The rows of one prompt lie on one attention group, so of a
prefill's combine a rank sends little and one receives nearly all. The larger of the two, `busiest`,
takes the time.

DeepEP's low-latency mode (decode, verify, draft) sends a row once for each of its experts. Its
normal mode (prefill) sends it once for each rank that has one of them, and gets it back summed:
ep (1 - (1 - 1 / ep) ** top_k) times, 5.25 on eight ranks, if the router chooses uniformly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger.formula import Figure, Number, Sheet
from sglang_glm53.ledger.hardware import Hardware
from sglang_glm53.ledger.memory import weight_names
from sglang_glm53.ledger.topology import Topology, Workload

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "dispatch", "combine"]
Pass = Literal["prefill", "decode", "verify", "draft-extend", "draft", "draft-prefill"]
DRAFT_PASSES = ("draft-extend", "draft", "draft-prefill")
EXTEND_PASSES = ("prefill", "draft-prefill")

# Buffers up to this size SGLang's custom all-reduce takes (SGLANG_CUSTOM_ALL_REDUCE_V2_MAX_SIZE_KB,
# 16 MiB; on Hopper the tuned sizes are no smaller).
CUSTOM_ALL_REDUCE_BYTES = 16 * 2**20

_SENT = {
    "all-reduce": "2 * (group - 1) / group * bytes",
    "all-gather": "(group - 1) / group * bytes",
    "reduce-scatter": "(group - 1) / group * bytes",
    # Of what all ranks send together, a rank dispatches its own rows, and its experts give back an
    # even share; what stays on the rank is not sent.
    "dispatch": "bytes * most_rows / routed_rows * (group - 1) / group",
    "combine": "bytes / group * (1 - least_rows / routed_rows)",
}
_RECEIVED = {
    **_SENT,
    "dispatch": _SENT["combine"],
    "combine": _SENT["dispatch"],
}


@dataclass(frozen=True)
class Collective:
    """One row of the account.

    Attributes:
        where: the place, and the layers (`layers 3-77`) or none.
        group: `tp`, `attn_tp` or `ep`. ranks: its size.
        count: times a pass. shape: of the whole tensor, rows first.
        bytes, sent, received: of one, as the module's text says. source: file of SGLang.
    """

    where: str
    layers: str
    kind: Kind
    group: str
    ranks: int
    count: int
    shape: tuple[int, ...]
    bytes: Figure
    sent: Figure
    received: Figure
    source: str

    @property
    def total_bytes(self) -> Number:
        return self.count * self.bytes.value

    @property
    def busiest(self) -> Number:
        """Bytes of one in the busier direction of the busiest rank; they take the time."""
        return max(self.sent.value, self.received.value)

    @property
    def total_busiest(self) -> Number:
        return self.count * self.busiest

    def crossing(self, gpus: int) -> Number:
        """Bytes of one, one way through a rank's network port, where so many GPUs share a link.

        A ring leaves each machine once; its bytes are spread over the ports of all its GPUs. Of
        dispatch and combine what goes to ranks of other machines, through the busiest rank's own
        port. An attention group's ranks are neighbours.
        """
        if self.ranks <= gpus:
            return 0
        if self.kind in ("dispatch", "combine"):
            return self.busiest * (self.ranks - gpus) / (self.ranks - 1)
        return self.busiest / gpus

    def by_network(self, hardware: Hardware) -> bool:
        """Whether the network takes longer than the link within the machine."""
        crosses = self.crossing(hardware.gpus) / hardware.network.best_known
        return crosses > self.busiest / hardware.link.best_known

    def milliseconds(self, hardware: Hardware) -> float:
        """All of them one after another: the slower of link and network, and a launch latency
        each."""
        seconds = self.busiest / hardware.link.best_known
        if self.by_network(hardware):
            seconds = self.crossing(hardware.gpus) / hardware.network.best_known
        return self.count * (seconds + hardware.launch_latency.best_known) * 1e3


@dataclass(frozen=True)
class Rows:
    """Rows of one pass.

    Attributes:
        by_rank: tokens of each attention group, in order.
        logits: of these, the rows whose logits are computed.
    """

    by_rank: tuple[int, ...]
    logits: tuple[int, ...]


def pass_rows(kind: Pass, topology: Topology, workload: Workload) -> Rows:
    """Rows of a pass when the requests are spread evenly over the attention groups.

    A prefill pass holds one chunk of one request, on the first group; the others are idle.
    """
    groups = topology.dp
    if kind in EXTEND_PASSES:
        tokens = min(workload.prompt, workload.chunk)
        idle = (0,) * (groups - 1)
        return Rows((tokens, *idle), (1, *idle))
    each = workload.tokens if kind in ("verify", "draft-extend") else 1
    share = [(workload.batch + groups - 1 - rank) // groups for rank in range(groups)]
    rows = tuple(requests * each for requests in share)
    if kind == "draft-extend" and topology.device == "cuda":
        # Its graph picks each request's last accepted row before lm_head
        # (speculative/eagle_draft_extend_cuda_graph_runner.py); without it all rows go through.
        return Rows(rows, tuple(share))
    return Rows(rows, rows)


def collectives(
    config: Glm53Config,
    topology: Topology,
    kind: Pass,
    rows: Rows,
) -> list[Collective]:
    """The collectives of one pass, in the order in which they first occur.

    Args:
        kind: which pass; draft passes are of the MTP layer alone.
        rows: what each attention group brings.
    """
    return _Pass(config, topology, kind, rows).run()


class _Pass:
    def __init__(self, config: Glm53Config, topology: Topology, kind: Pass, rows: Rows) -> None:
        self.config, self.topology, self.kind = config, topology, kind
        row = config.hidden_size * (4 if topology.weights == "fp32" else 2)
        self.padded = _padding(kind, topology, rows.by_rank, row)
        self.sheet = Sheet(
            {
                **weight_names(config, topology),
                "rows": self.padded.own,
                "all_rows": self.padded.every,
                # Padding is not dispatched; an attention group's ranks share its rows.
                "routed_rows": sum(rows.by_rank),
                "most_rows": -(-max(rows.by_rank) // topology.attn_tp),
                "least_rows": min(rows.by_rank) // topology.attn_tp,
                "logit_rows": max(rows.logits),
                "all_logit_rows": sum(rows.logits),
            }
        )
        self.found: list[Collective] = []

    def run(self) -> list[Collective]:
        draft = self.kind in DRAFT_PASSES
        moe = 1 if draft else self.sheet["moe_layers"]
        dense = 0 if draft else self.sheet["dense_layers"]
        self.embedding()
        if self.topology.dp > 1:
            self.attention_dp(int(dense), int(moe))
        elif self.topology.a2a == "deepep":
            self.one_group_deepep(int(dense), int(moe))
        else:
            self.one_group(int(dense + moe))
        self.head()
        return self.found

    def add(
        self,
        where: str,
        kind: Kind,
        group: str,
        count: int,
        formula: str,
        shape: str,
        source: str,
        layers: str = "",
    ) -> None:
        ranks = {
            "tp": self.topology.tp,
            "attn_tp": self.topology.attn_tp,
            "ep": self.topology.ep,
        }[group]
        if ranks == 1 or count == 0:
            return
        sheet = Sheet({"group": ranks}, self.sheet)
        sizes = tuple(int(sheet.figure("", part).value) for part in shape.split(","))
        if 0 in sizes:  # nobody has a row
            return
        size = sheet.add("bytes", formula, "B", f"{where}: {kind}", source)
        sent = sheet.figure("sent", _SENT[kind], "B", f"{where}: sent by a rank, at most", "ring")
        received = sheet.figure(
            "received", _RECEIVED[kind], "B", f"{where}: received by a rank, at most", "ring"
        )
        self.found.append(
            Collective(
                where, layers, kind, group, ranks, count, sizes, size, sent, received, source
            )
        )

    def layers(self, first: int, count: int) -> str:
        if self.kind in DRAFT_PASSES:
            return "MTP layer"
        last = first + count - 1
        return f"layer {first}" if count == 1 else f"layers {first}-{last}"

    def embedding(self) -> None:
        self.add(
            "embedding",
            "all-reduce",
            "attn_tp",
            1,
            "rows * hidden * plain",
            "rows, hidden",
            "layers/vocab_parallel_embedding.py forward; over attention's ranks "
            "(get_embedding_tp_kwargs)",
        )

    def one_group(self, layers: int) -> None:
        size, shape = "rows * hidden * plain", "rows, hidden"
        entry = "layers/layer_boundary/prepare.py _reduce_update_read, before the FFN's norm"
        self.add(
            "attention output", "all-reduce", "attn_tp", layers, size, shape, entry,
            self.layers(0, layers),
        )  # fmt: skip
        owed = "layers/layer_boundary/exit.py _defers_sum: completed before the next layer's norm"
        self.add(
            "FFN output", "all-reduce", "tp", layers, size, shape, owed, self.layers(0, layers)
        )

    def one_group_deepep(self, dense: int, moe: int) -> None:
        """The residual of MoE layers lies on each rank's share of the rows."""
        size, shape = "rows * hidden * plain", "rows, hidden"
        self.one_group(dense)
        where = self.layers(dense, moe)
        self.add(
            "attention output", "reduce-scatter", "attn_tp", moe, size, shape,
            "layers/layer_boundary/prepare.py _attn_tp_reduce_scatter_update_read", where,
        )  # fmt: skip
        self.deepep(moe, where)
        self.add(
            "next attention's input", "all-gather", "attn_tp", moe, size, shape,
            "layers/layer_boundary/ops.py attn_tp_gather_input; the last layer's at its exit",
            where,
        )  # fmt: skip

    def deepep(self, moe: int, where: str) -> None:
        normal = self.kind in EXTEND_PASSES
        copies = "ep * (1 - (1 - 1 / ep) ** top_k)" if normal else "top_k"
        shape = f"routed_rows * {copies}, hidden"
        values = f"routed_rows * {copies} * hidden"
        scales = f"{values} / 128 * 4"
        mode = (
            "normal mode sends a row once for each rank that has one of its experts, the expected "
            "number if each choice is uniform"
            if normal
            else "low latency sends a row once for each expert"
        )
        fp8 = self.topology.weights == "fp8"
        self.add(
            "experts", "dispatch", "ep", moe,
            f"{values} + {scales}" if fp8 else f"{values} * plain", shape,
            "layers/moe/token_dispatcher/deepep.py _dispatch_core: FP8 rows with a float32 scale "
            f"for each 128 values; {mode}", where,
        )  # fmt: skip
        self.add(
            "experts", "combine", "ep", moe, f"{values} * plain", shape,
            f"layers/moe/token_dispatcher/deepep.py _combine_core; {mode}", where,
        )  # fmt: skip

    def attention_dp(self, dense: int, moe: int) -> None:
        deepep = self.topology.a2a == "deepep"
        if deepep:
            if not self.topology.dense_tp:
                self.gather_and_scatter(dense, 0, sparse=False)
            else:
                self.own_rows(dense, 0, dispatched=False)
            self.own_rows(moe, dense, dispatched=True)
            return
        if self.topology.dense_tp:
            self.own_rows(dense, 0, dispatched=False)
            self.gather_and_scatter(moe, dense, sparse=True)
        else:
            self.gather_and_scatter(dense + moe, 0, sparse=True)

    def own_rows(self, layers: int, first: int, *, dispatched: bool) -> None:
        """FFNs that each rank runs on its own rows: its share of its attention group's."""
        where = self.layers(first, layers)
        size, shape = "rows * hidden * plain", "rows, hidden"
        self.add(
            "attention output", "reduce-scatter", "attn_tp", layers, size, shape,
            "layers/layer_boundary/prepare.py _attn_tp_reduce_scatter_update_read", where,
        )  # fmt: skip
        if dispatched:
            self.deepep(layers, where)
        self.add(
            "next attention's input", "all-gather", "attn_tp", layers, size, shape,
            "layers/layer_boundary/ops.py attn_tp_gather_input", where,
        )  # fmt: skip

    def gather_and_scatter(self, layers: int, first: int, *, sparse: bool) -> None:
        where = self.layers(first, layers)
        one, every = "rows * hidden * plain", "all_rows * hidden * plain"
        one_shape, every_shape = "rows, hidden", "all_rows, hidden"
        gather = "layers/dp_attention.py _dp_gather_via_all_gather"
        if self.padded.equal:
            self.add(
                "attention output", "reduce-scatter", "attn_tp", layers, one, one_shape,
                gather + ": also completes attention's sum", where,
            )  # fmt: skip
            self.add(
                "FFN input, attention DP", "all-gather", "tp", layers, every, every_shape,
                gather, where,
            )  # fmt: skip
        else:
            self.add(
                "FFN input, attention DP", "all-reduce", "tp", layers, every, every_shape,
                "layers/dp_attention.py _dp_gather_via_all_reduce: also completes attention's sum",
                where,
            )  # fmt: skip
        topology = self.topology
        unequal_parts = topology.a2a == "none" and topology.tp == topology.dp == topology.ep
        if self.padded.equal or unequal_parts:
            self.add(
                "FFN output, attention DP", "reduce-scatter", "tp", layers, every, every_shape,
                "layers/layer_boundary/exit.py _select_dp_reduce_scatter", where,
            )  # fmt: skip
            if self.padded.equal:
                self.add(
                    "FFN output, attention DP", "all-gather", "attn_tp", layers, one, one_shape,
                    "layers/dp_attention.py dp_reduce_scatter_tensor", where,
                )  # fmt: skip
        else:
            self.add(
                "FFN output, attention DP", "all-reduce", "tp", layers, every, every_shape,
                "layers/layer_boundary/ops.py all_reduce_to_dp_local; then a copy", where,
            )  # fmt: skip

    def head(self) -> None:
        source = "layers/logits_processor.py _get_logits"
        group = "attn_tp" if self.topology.dp_lm_head else "tp"
        rows = "logit_rows"
        if self.topology.dp > 1 and not self.topology.dp_lm_head:
            rows = "all_logit_rows"
            # Always in the form for uneven rows (dp_padding_mode=SUM_LEN).
            self.add(
                "lm_head input, attention DP",
                "all-reduce",
                "tp",
                1,
                f"{rows} * hidden * plain",
                f"{rows}, hidden",
                source + ": _gather_dp_attn_hidden_states",
            )
        self.add(
            "logits",
            "all-gather",
            group,
            1,
            f"{rows} * vocab_padded * plain",
            f"{rows}, vocab_padded",
            source,
        )


@dataclass(frozen=True)
class _Padding:
    """own: rows of the fullest group, as padded. every: rows of the gathered buffer. equal: whether
    every group has a place of the same size (SGLang's MAX_LEN) or of its own (SUM_LEN)."""

    own: int
    every: int
    equal: bool


def _padding(kind: Pass, topology: Topology, by_rank: tuple[int, ...], row_bytes: int) -> _Padding:
    """layers/dp_attention.py get_dp_padding_mode and _decode_sum_len_fits_custom_all_reduce."""
    # Rows are padded to a multiple of attention's ranks, except where nothing asks for it.
    unit = topology.attn_tp if topology.dp > 1 or topology.a2a != "none" else 1
    rows = [-(-count // unit) * unit for count in by_rank]
    longest, together = max(rows), sum(rows)
    if topology.dp == 1:
        return _Padding(longest, longest, True)
    summed = kind in EXTEND_PASSES or (
        # A plain decode step, of a server without speculation.
        kind == "decode"
        and topology.device == "cuda"
        and topology.a2a == "none"
        and min(by_rank) > 0
        and together * row_bytes <= CUSTOM_ALL_REDUCE_BYTES
    )
    if not summed and together * 2 >= longest * topology.dp:
        return _Padding(longest, longest * topology.dp, True)
    return _Padding(longest, together, False)
