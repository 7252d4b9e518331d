"""The operators of one layer on one rank: shapes, FLOPs, bytes, arithmetic intensity.

A multiply and an add are two FLOPs. `weights` and `cache` are the bytes that the operator must read
once; `activations` what it reads and writes beside them, each tensor once. Elementwise work (norms,
RoPE, SiLU, quantisation) is listed by its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger.formula import Figure, Number, Sheet
from sglang_glm53.ledger.memory import distinct_experts, layer_weights, weight_names
from sglang_glm53.ledger.topology import Topology

Form = Literal["absorbed", "expanded"]
Kind = Literal["dense", "full", "shared"]
KINDS: tuple[Kind, ...] = ("dense", "full", "shared")

ATTENTION = "layers/attention.py"
INDEXER = "layers/indexer.py"
MOE = "layers/moe.py"
BOUNDARY = "layers/boundary.py"


@dataclass(frozen=True)
class Operator:
    """One row.

    Attributes:
        name, file: what it is and where our code calls it.
        shape: of the product `M x K -> N`, with the number of products before it where there are
            several; of an elementwise operator, its tensor.
        flops, weights, cache, activations: figures, of one rank and one layer.
        modules: of ours that multiply by a weight matrix for it; several stand side by side.
        product: rows, depth and width of that product; of both empty where it is another thing.
    """

    name: str
    file: str
    shape: str
    flops: Figure
    weights: Figure
    cache: Figure
    activations: Figure
    modules: tuple[str, ...] = ()
    product: tuple[int, int, int] | None = None

    @property
    def bytes(self) -> Number:
        return self.weights.value + self.cache.value + self.activations.value

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops.value / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Shape:
    """Rows that a layer sees.

    Attributes:
        rows: tokens on this rank. all_rows: tokens of all ranks. requests: sequences on this rank.
        context: tokens that each has in the cache, these rows included.
        scored, attended: pairs of a row and a position that the indexer scores and that attention
            reads, over all rows.
        form: absorbed (over selected latents) or expanded (dense, a prefill of short requests).
        seeds: whether an expanded pass selects all the same, as the draft's seed needs; it only
            stores its index keys otherwise.
        routing: as in `topology.Workload`.
    """

    rows: int
    all_rows: int
    requests: int
    context: int
    scored: int
    attended: int
    form: Form = "absorbed"
    routing: str = "even"
    seeds: bool = False

    @property
    def selects(self) -> bool:
        return self.form == "absorbed" or self.seeds


def decode_shape(
    config: Glm53Config,
    *,
    requests: int,
    tokens: int,
    all_rows: int,
    context: int,
    routing: str = "even",
) -> Shape:
    """A pass with `tokens` rows of each request, each of which sees the whole context."""
    rows = requests * tokens
    selected = min(context, config.index_topk)
    return Shape(
        rows, all_rows, requests, context, rows * context, rows * selected, routing=routing
    )


def prefill_shape(config: Glm53Config, *, chunk: int, before: int, routing: str = "even") -> Shape:
    """A pass over `chunk` tokens of one prompt that has `before` tokens in the cache already.

    Row i sees before + i + 1 positions. Attention is dense while the prompt is no longer than
    index_topk, else it reads at most index_topk of them.
    """
    end, most = before + chunk, config.index_topk
    scored = (before + 1 + end) * chunk // 2
    if end <= most:
        return Shape(chunk, chunk, 1, end, 0, scored, form="expanded", routing=routing)
    short = max(0, most - before)  # rows that see less than index_topk
    attended = (before + 1 + before + short) * short // 2 + (chunk - short) * most
    return Shape(chunk, chunk, 1, end, scored, attended, routing=routing)


def layer_operators(
    config: Glm53Config, topology: Topology, kind: Kind, shape: Shape
) -> list[Operator]:
    """Operators of one layer in the order in which they run.

    Args:
        kind: `dense` (full indexer, dense MLP), `full` and `shared` (MoE with and without indexer).
    """
    return _Layer(config, topology, shape).run(kind)


class _Layer:
    def __init__(self, config: Glm53Config, topology: Topology, shape: Shape) -> None:
        sheet = Sheet(weight_names(config, topology))
        layer_weights(sheet)
        deepep = topology.a2a == "deepep"
        on_own_rows = deepep or topology.dp == 1
        self.sheet = Sheet(
            {
                "rows": shape.rows,
                "all_rows": shape.all_rows,
                "requests": shape.requests,
                "context": shape.context,
                "scored": shape.scored,
                "attended": shape.attended,
                "selected": min(shape.context, config.index_topk),
                # The rows that a rank's FFN computes; DeepEP: its share of them.
                "ffn_rows": -(-shape.rows // (topology.attn_tp if deepep else 1))
                if on_own_rows
                else shape.all_rows,
                "dense_rows": shape.rows
                if topology.dense_tp or topology.dp == 1
                else shape.all_rows,
                "routed_rows": shape.all_rows * config.num_experts_per_tok / topology.ep,
                "distinct": distinct_experts(sheet, shape.all_rows, shape.routing),
            },
            sheet,
        )
        self.shape, self.device = shape, topology.device
        self.found: list[Operator] = []

    def run(self, kind: Kind) -> list[Operator]:
        self.norm("add and RMSNorm", "rows", "hidden", BOUNDARY, tensors=4)
        self.attention(selects=kind != "shared")
        if kind == "dense":
            self.norm("add and RMSNorm", "rows", "hidden", BOUNDARY, tensors=4)
            self.dense()
        else:
            self.norm("add and RMSNorm", "rows", "hidden", BOUNDARY, tensors=4)
            self.moe()
        return self.found

    def attention(self, *, selects: bool) -> None:
        self.gemm(
            "A projections",
            "rows",
            "hidden",
            "q_lora + kv_lora + rope",
            ATTENTION,
            module="self_attn.fused_qkv_a_proj_with_mqa",
        )
        self.norm("RMSNorm of the query latent", "rows", "q_lora", ATTENTION)
        self.norm("RMSNorm of the KV latent", "rows", "kv_lora", ATTENTION)
        if selects and self.shape.selects:
            self.indexer()
        elif selects:
            self.index_keys()
        self.gemm(
            "q_b: queries",
            "rows",
            "q_lora",
            "heads_here * (nope + rope)",
            ATTENTION,
            module="self_attn.q_b_proj",
        )
        self.norm("RoPE of queries and key", "rows", "(heads_here + 1) * rope", ATTENTION)
        if self.shape.form == "expanded":
            self.gemm(
                "kv_b: keys, values",
                "rows",
                "kv_lora",
                "heads_here * (nope + v_dim)",
                ATTENTION,
                module="self_attn.kv_b_proj",
            )
            self.row(
                "dense attention",
                f"{self.n('heads_here')} heads, {self.n('rows')} rows, causal",
                flops="2 * heads_here * (nope + rope + v_dim) * attended",
                cache="requests * context * latent_token",
                activations="rows * heads_here * (nope + rope + v_dim) * 2 * plain",
                file=ATTENTION,
            )
        else:
            self.gemm(
                "W_UK: fold queries", "rows", "nope", "kv_lora", ATTENTION, "heads_here", "plain"
            )
            self.row(
                "sparse attention over latents",
                f"{self.n('heads_here')} heads, {self.n('rows')} x {self.n('selected')} selected",
                flops="2 * heads_here * (kv_lora + rope + kv_lora) * attended",
                cache="requests * selected * latent_token",
                activations="rows * heads_here * (2 * kv_lora + rope) * plain",
                file="backends/torch_dsa.py, on a GPU SGLang's DSA backend",
            )
            self.gemm(
                "W_UV: unfold values", "rows", "kv_lora", "v_dim", ATTENTION, "heads_here", "plain"
            )
        self.gemm(
            "o_proj", "rows", "heads_here * v_dim", "hidden", ATTENTION, module="self_attn.o_proj"
        )

    def indexer(self) -> None:
        self.gemm(
            "indexer: queries",
            "rows",
            "q_lora",
            "index_heads * index_dim",
            INDEXER,
            module="self_attn.indexer.wq_b",
        )
        self.key_and_gates("index_dim + index_heads")
        self.row(
            "indexer: scores",
            f"{self.n('index_heads')} heads, {self.n('rows')} x {self.n('context')} keys",
            flops="2 * index_heads * index_dim * scored",
            cache="requests * context * index_token",
            activations="rows * (index_heads * index_dim + 4 * context)",
            file="layers/index_select.py",
        )
        self.row(
            "indexer: top-k",
            f"{self.n('rows')} x {self.n('context')} to {self.n('index_topk')}",
            activations="rows * (4 * context + 4 * index_topk)",
            file="layers/index_select.py",
        )

    def index_keys(self) -> None:
        """Keys for later queries; on a GPU the gates come with them, in one product."""
        self.key_and_gates("index_dim + index_heads" if self.device == "cuda" else "index_dim")

    def key_and_gates(self, wide: str) -> None:
        gates = "hidden * index_heads * plain" if "heads" in wide else "0"
        self.row(
            "indexer: key and gates",
            self.product("rows", "hidden", wide),
            flops=f"2 * rows * hidden * ({wide})",
            weights=f"hidden * index_dim * w_index_key + {gates}",
            activations=f"rows * (hidden + {wide}) * plain",
            file=INDEXER,
            # One matrix on a GPU, two on a CPU.
            modules=(
                "self_attn.indexer.wk",
                "self_attn.indexer.weights_proj",
                "self_attn.indexer.wk_weights_proj",
            ),
            product=("rows", "hidden", wide),
        )

    def dense(self) -> None:
        inner = "dense_inner / dense_ranks"
        self.gemm(
            "dense MLP: gate and up",
            "dense_rows",
            "hidden",
            f"2 * {inner}",
            MOE,
            module="mlp.gate_up_proj",
        )
        self.norm("SiLU and product", "dense_rows", inner, MOE, tensors=3)
        self.gemm("dense MLP: down", "dense_rows", inner, "hidden", MOE, module="mlp.down_proj")

    def moe(self) -> None:
        self.gemm("router", "ffn_rows", "hidden", "experts", MOE, width="plain", module="mlp.gate")
        self.row(
            "top-8 of the router" if self.sheet["top_k"] == 8 else "top-k of the router",
            f"{self.n('ffn_rows')} x {self.n('experts')}",
            activations="ffn_rows * (4 * experts + 8 * top_k)",
            file=MOE,
        )
        inner = "expert_inner / moe_tp"
        for name, wide, deep in (
            ("routed experts: gate and up", f"2 * {inner}", "hidden"),
            ("routed experts: down", "hidden", inner),
        ):
            self.row(
                name,
                f"{self.n('distinct')} experts, {self.product('routed_rows', deep, wide)}",
                flops=f"2 * routed_rows * ({deep}) * ({wide})",
                weights=f"distinct * ({deep}) * ({wide}) * w",
                activations=f"routed_rows * (({deep}) + ({wide})) * plain",
                file=MOE,
            )
        if self.sheet["shared_experts"]:
            inner = "shared_experts * expert_inner / shared_ranks"
            self.gemm(
                "shared expert: gate and up",
                "ffn_rows",
                "hidden",
                f"2 * {inner}",
                MOE,
                module="mlp.shared_experts.gate_up_proj",
            )
            self.norm("SiLU and product", "ffn_rows", inner, MOE, tensors=3)
            self.gemm(
                "shared expert: down",
                "ffn_rows",
                inner,
                "hidden",
                MOE,
                module="mlp.shared_experts.down_proj",
            )

    def gemm(
        self,
        name: str,
        rows: str,
        deep: str,
        wide: str,
        file: str,
        products: str = "1",
        width: str = "w",
        module: str = "",
    ) -> None:
        several = "" if products == "1" else f"{self.n(products)} of "
        self.row(
            name,
            several + self.product(rows, deep, wide),
            flops=f"2 * {products} * {rows} * ({deep}) * ({wide})",
            weights=f"{products} * ({deep}) * ({wide}) * {width}",
            activations=f"{products} * {rows} * (({deep}) + ({wide})) * plain",
            file=file,
            modules=(module,) if module else (),
            product=(rows, deep, wide),
        )

    def norm(self, name: str, rows: str, wide: str, file: str, tensors: int = 2) -> None:
        self.row(
            name,
            f"{self.n(rows)} x {self.n(wide)}",
            activations=f"{tensors} * {rows} * ({wide}) * plain",
            file=file,
        )

    def row(
        self,
        name: str,
        shape: str,
        *,
        file: str,
        flops: str = "0",
        weights: str = "0",
        cache: str = "0",
        activations: str = "0",
        modules: tuple[str, ...] = (),
        product: tuple[str, str, str] | None = None,
    ) -> None:
        figure = self.sheet.figure
        sizes = None
        if modules and product:
            sizes = tuple(int(figure("", formula).value) for formula in product)
        self.found.append(
            Operator(
                name,
                file,
                shape,
                figure("flops", flops, "FLOP", f"{name}: FLOPs", file),
                figure("weights", weights, "B", f"{name}: weights", file),
                figure("cache", cache, "B", f"{name}: cache", file),
                figure("activations", activations, "B", f"{name}: activations", file),
                modules,
                sizes,  # type: ignore[arg-type]
            )
        )

    def n(self, formula: str) -> str:
        value = self.sheet.figure("", formula).value
        return f"{value:,.4g}" if isinstance(value, float) and value % 1 else f"{int(value)}"

    def product(self, rows: str, deep: str, wide: str) -> str:
        return f"{self.n(rows)} x {self.n(deep)} -> {self.n(wide)}"
