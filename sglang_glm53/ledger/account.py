"""The whole account of one configuration: every sheet, pass and bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger import loading, memory, model, operators, roofline
from sglang_glm53.ledger.collectives import Collective, Pass, collectives, pass_rows
from sglang_glm53.ledger.formula import Figure, Number, Sheet
from sglang_glm53.ledger.hardware import Hardware
from sglang_glm53.ledger.operators import Operator, Shape
from sglang_glm53.ledger.outside import DISPATCH_LIMIT, Use, outside
from sglang_glm53.ledger.topology import Topology, Workload

MEM_FRACTION = 0.85


@dataclass(frozen=True)
class PassAccount:
    """One kind of pass of a step.

    Attributes:
        kind, times: which, and how often it runs in a step.
        rows: of the fullest rank.
        reads: bytes by part; None for a prefill, which is not bound by them.
        flops: of one rank, one pass. collectives: of one pass.
    """

    kind: Pass
    times: int
    rows: int
    reads: Sheet | None
    flops: Number
    collectives: list[Collective]


@dataclass(frozen=True)
class Step:
    """What happens between two visits of the scheduler.

    Attributes:
        passes: in order.
        bytes_read: of a rank, by part. bound: its time. tokens: that a request gets out
            of it; None where no accept length was given.
    """

    passes: list[PassAccount]
    bytes_by: dict[str, Number]
    bound: roofline.Bound
    tokens: float | None

    @property
    def bytes_read(self) -> Number:
        return sum(self.bytes_by.values())

    @property
    def flops(self) -> Number:
        return sum(each.times * each.flops for each in self.passes)

    @property
    def collectives(self) -> list[tuple[int, PassAccount, Collective]]:
        """Each row with how often its pass runs."""
        return [(each.times, each, row) for each in self.passes for row in each.collectives]

    @property
    def collective_count(self) -> int:
        return sum(times * row.count for times, _, row in self.collectives)

    @property
    def collective_bytes(self) -> Number:
        return sum(times * row.total_bytes for times, _, row in self.collectives)

    @property
    def busiest_bytes(self) -> Number:
        """One way through the busiest rank."""
        return sum(times * row.total_busiest for times, _, row in self.collectives)


@dataclass(frozen=True)
class Account:
    """Everything for one model, topology, workload and GPU. Checked when it is made.

    Attributes:
        mem_fraction: SGLang's --mem-fraction-static.
        dummy: weights are random (--load-format dummy), whose loading leaves more behind.
        free_bytes: of the GPU before loading, where others use it too.
    """

    config: Glm53Config
    topology: Topology
    workload: Workload
    hardware: Hardware
    mem_fraction: float = MEM_FRACTION
    dummy: bool = False
    free_bytes: float | None = None

    def __post_init__(self) -> None:
        self.topology.check(self.config)
        self.workload.check(self.config, self.topology)

    @cached_property
    def parameters(self) -> Sheet:
        return model.parameters(self.config)

    @cached_property
    def kv(self) -> Sheet:
        return model.cache(
            self.config,
            self.topology.kv,
            mtp=self.workload.drafts,
            page_tokens=self.workload.page,
        )

    @cached_property
    def stored(self) -> Sheet:
        return memory.stored(self.config, self.topology, mtp=self.workload.drafts)

    @cached_property
    def capacity(self) -> Sheet:
        return roofline.capacity(
            self.config,
            self.topology,
            self.workload,
            self.hardware,
            loaded=self.loaded.total,
            kv_token=self.kv["kv_bytes_per_token"],
            mem_fraction=self.mem_fraction,
            free=self.free_bytes,
        )

    @cached_property
    def loaded(self) -> loading.Loaded:
        """What loading takes of the free memory."""
        return loading.loaded(
            self.config, self.topology, mtp=self.workload.drafts, dummy=self.dummy
        )

    @property
    def fits(self) -> bool:
        """Whether the batch fits into the cache, all requests at this context."""
        return self.workload.batch <= self.capacity["concurrent"]

    @cached_property
    def beside(self) -> Sheet:
        """What is allocated beside weights and cache, if graphs are made for this batch and
        --context-length is this context."""
        work, requests = self.workload, memory.requests_here(self.topology, self.workload)
        use = Use(
            context=work.context,
            pool_tokens=self.capacity["pool_tokens"],
            requests=requests,
            graph_batch=requests,
            tokens=work.tokens if work.drafts else 1,
            steps=work.steps,
            chunk=work.chunk,
            dispatch_limit=DISPATCH_LIMIT if self.topology.a2a == "deepep" else 0,
        )
        return outside(
            self.config,
            self.topology,
            use,
            memory=self.capacity["memory"],
            outside=self.capacity["outside"],
        )

    @cached_property
    def decode(self) -> Step:
        """A plain decode step, without MTP."""
        reads = memory.decode_reads(self.config, self.topology, self.workload)
        return self._step([self._pass("decode", 1, reads)], tokens=1)

    @cached_property
    def mtp(self) -> Step | None:
        """A step with MTP: verification, the first draft, the later drafts."""
        if not self.workload.drafts:
            return None
        verify, first, later = memory.mtp_reads(self.config, self.topology, self.workload)
        passes = [
            self._pass("verify", 1, verify),
            self._pass("draft-extend", 1, first),
            self._pass("draft", self.workload.steps - 1, later),
        ]
        return self._step([each for each in passes if each.times], tokens=self.workload.accept)

    @property
    def step(self) -> Step:
        """The step that was asked for: with MTP if it drafts."""
        return self.mtp or self.decode

    @cached_property
    def prefill(self) -> list[PassAccount]:
        """The passes of one prompt, its last chunk perhaps shorter."""
        work, passes = self.workload, []
        for before in range(0, work.prompt, work.chunk):
            chunk = min(work.chunk, work.prompt - before)
            shape = operators.prefill_shape(
                self.config, chunk=chunk, before=before, routing=work.routing
            )
            part = Workload(prompt=chunk, chunk=chunk)
            rows = pass_rows("prefill", self.topology, part)
            found = collectives(self.config, self.topology, "prefill", rows)
            flops = self._layer_flops(shape, "prefill", 1)
            passes.append(PassAccount("prefill", 1, chunk, None, flops, found))
        return passes

    @cached_property
    def prefill_bound(self) -> roofline.Bound:
        """Of the whole prompt; its weights are read once a pass."""
        rows = min(self.workload.chunk, self.workload.prompt)
        base = memory.stored(self.config, self.topology, mtp=False)
        experts = memory.distinct_experts(base, rows, self.workload.routing)
        read = memory.reads(
            base, memory.READS, requests=0, context=0, selected=0, experts_read=experts
        )
        return roofline.bound(
            len(self.prefill) * read["total"],
            sum(each.flops for each in self.prefill),
            [(1, row) for each in self.prefill for row in each.collectives],
            self.hardware,
            self.topology.weights,
        )

    def layer(self, kind: operators.Kind) -> list[Operator]:
        """Operators of one layer of a plain decode step."""
        return operators.layer_operators(self.config, self.topology, kind, self._shape(1))

    @cached_property
    def break_even(self) -> Figure | None:
        """Accept length at which a step with MTP is as good as plain decoding, by its bound."""
        if self.mtp is None:
            return None
        sheet = Sheet(
            {"mtp_step_ms": self.mtp.bound.bound_ms, "decode_step_ms": self.decode.bound.bound_ms}
        )
        return sheet.figure(
            "break_even_accept",
            "mtp_step_ms / decode_step_ms",
            "tokens",
            "accept length at which MTP breaks even, by the bound",
            "both bounds without communication",
        )

    @cached_property
    def totals(self) -> Sheet:
        """The figures that people ask for first, with their formulas."""
        step = self.step
        sheet = Sheet(
            {
                "collective_bytes": step.collective_bytes,
                "busiest_bytes": step.busiest_bytes,
                "batch": self.workload.batch,
                "bound_ms": step.bound.bound_ms,
                "communication_ms": step.bound.communication.value,
            }
        )
        if step.tokens is None:  # an accept length must be measured; none is assumed
            return Sheet({})
        sheet = Sheet({"accept": step.tokens}, sheet)
        sheet.add(
            "collective_bytes_per_token",
            "collective_bytes / (batch * accept)",
            "B",
            "bytes of collectives for a generated token",
        )
        sheet.add(
            "tokens_per_second",
            "batch * accept / bound_ms * 1000",
            "tokens/s",
            "tokens a second at the bound, all ranks, collectives hidden; decode only",
        )
        sheet.add(
            "tokens_per_second_exposed",
            "batch * accept / (bound_ms + communication_ms) * 1000",
            "tokens/s",
            "the same with no collective hidden; decode only",
        )
        return sheet

    def figures(self) -> Iterator[Figure]:
        """Every figure, in the order of the report."""
        for sheet in (self.parameters, self.kv, self.stored):
            yield from sheet.figures.values()
        for each in self.step.passes:
            if each.reads is not None:
                yield from each.reads.figures.values()
        bound = self.step.bound
        yield from (bound.memory, bound.compute, bound.communication)
        if self.break_even is not None:
            yield self.break_even
        yield from self.totals.figures.values()
        yield from self.capacity.figures.values()
        yield from self.beside.figures.values()

    def _pass(self, kind: Pass, times: int, reads: Sheet) -> PassAccount:
        rows = pass_rows(kind, self.topology, self.workload)
        tokens = self.workload.tokens if kind in ("verify", "draft-extend") else 1
        return PassAccount(
            kind,
            times,
            max(rows.by_rank),
            reads,
            self._layer_flops(self._shape(tokens), kind, max(rows.logits)),
            collectives(self.config, self.topology, kind, rows),
        )

    def _shape(self, tokens: int) -> Shape:
        return operators.decode_shape(
            self.config,
            requests=memory.requests_here(self.topology, self.workload),
            tokens=tokens,
            all_rows=self.workload.batch * tokens,
            context=self.workload.context,
            routing=self.workload.routing,
        )

    def _layer_flops(self, shape: Shape, kind: Pass, logit_rows: int) -> Number:
        """FLOPs of one pass of a rank, lm_head included."""

        @cache
        def layer(name: operators.Kind) -> Number:
            found = operators.layer_operators(self.config, self.topology, name, shape)
            return sum(each.flops.value for each in found)

        base = model.names(self.config)
        rows = logit_rows if self.topology.dp_lm_head else logit_rows * self.topology.dp
        head = 2 * rows * base["hidden"] * base["vocab"] / self.topology.head_ranks
        if kind in ("draft", "draft-extend"):
            joined = 2 * shape.rows * 2 * base["hidden"] * base["hidden"]
            if kind == "draft" and self.config.index_share_for_mtp_iteration:
                return layer("shared") + joined + head
            return layer("full") + joined + head
        # The first layers are full and dense in GLM-5.3; another config may mix them otherwise.
        total: Number = head
        for index in range(self.config.num_hidden_layers):
            dense, full = not self.config.is_sparse(index), self.config.runs_indexer(index)
            if dense and not full:
                total += layer("shared") - layer("full") + layer("dense")
            else:
                total += layer("dense" if dense else "full" if full else "shared")
        return total

    def _step(self, passes: list[PassAccount], *, tokens: float | None) -> Step:
        by: dict[str, Number] = {}
        for each in passes:
            for name, figure in each.reads.figures.items() if each.reads else ():
                if name != "total":
                    by[figure.title] = by.get(figure.title, 0) + each.times * figure.value
        bound = roofline.bound(
            sum(by.values()),
            sum(each.times * each.flops for each in passes),
            [(each.times, row) for each in passes for row in each.collectives],
            self.hardware,
            self.topology.weights,
        )
        return Step(passes, by, bound, tokens)
