"""What loading a rank's weights takes of the GPU's memory: the tensors, and what the allocator
keeps beside them.

SGLang makes all parameters, fills them, and splits each layer's kv_b into its two bf16 halves.
Where weights are random (`--load-format dummy`), each FP8 parameter is filled through an fp16 and
an FP8 copy on the GPU; the halves then come to lie in the copies' segments, which for that reason
stay. Where they are read from a checkpoint, copies are made on the CPU, and little is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from sglang_glm53.config import Glm53Config
from sglang_glm53.ledger.allocator import Allocator, Block
from sglang_glm53.ledger.topology import FP8_BLOCK, VOCAB_PADDING, Topology


@dataclass(frozen=True)
class Loaded:
    """Bytes by which the GPU's free memory falls, as SGLang's log has them ("mem usage").

    Attributes:
        target: of the model. draft: of the MTP layer with an embedding and a head of its own, which
            SGLang drops only after the cache was sized; 0 without MTP.
    """

    target: int
    draft: int

    @property
    def total(self) -> int:
        return self.target + self.draft


@dataclass(frozen=True)
class Tensor:
    """A parameter on a rank: its bytes, and whether random FP8 weights are written to it."""

    size: int
    filled_by_copy: bool = False


@cache
def loaded(config: Glm53Config, topology: Topology, *, mtp: bool, dummy: bool = False) -> Loaded:
    """What SGLang's log would say after loading.

    Args:
        mtp: the MTP layer is loaded too. dummy: weights are random.
    """
    memory = Allocator()
    layers = [
        (config.is_sparse(layer), config.runs_indexer(layer))
        for layer in range(config.num_hidden_layers)
    ]
    tensors: list[Tensor] = [_embedding(config, topology)]
    for sparse, full in layers:
        tensors.extend(_layer(config, topology, sparse=sparse, full=full))
    tensors.append(Tensor(config.hidden_size * _plain(topology)))
    if not config.tie_word_embeddings:
        tensors.append(_head(config, topology))
    _rope(memory, config)
    _load(memory, tensors, config, topology, layers=len(layers), dummy=dummy)
    target = memory.held
    if not mtp:
        return Loaded(target, 0)
    hidden, plain = config.hidden_size, _plain(topology)
    draft = [
        _embedding(config, topology),
        Tensor(2 * hidden * hidden * plain),
        *(Tensor(hidden * plain),) * 3,
        *_layer(config, topology, sparse=True, full=True),
        _head(config, topology),
    ]
    _load(memory, draft, config, topology, layers=1, dummy=dummy)
    return Loaded(target, memory.held - target)


def _load(
    memory: Allocator,
    tensors: Iterable[Tensor],
    config: Glm53Config,
    topology: Topology,
    *,
    layers: int,
    dummy: bool,
) -> None:
    tensors = list(tensors)
    for tensor in tensors:
        memory.take(tensor.size)
    if dummy:
        _fill(memory, [tensor.size for tensor in tensors if tensor.filled_by_copy])
    heads = config.num_attention_heads // topology.attn_tp
    row = heads * config.kv_lora_rank * _plain(topology)
    for _ in range(layers):
        # FP8 is brought to bf16 as a whole, then cut; bf16 is cut as it is.
        whole = None
        if topology.weights == "fp8":
            whole = memory.take(row * (config.qk_nope_head_dim + config.v_head_dim))
        memory.take(row * config.qk_nope_head_dim)
        memory.take(row * config.v_head_dim)
        if whole is not None:
            memory.give(whole)
    memory.empty_cache()


def _fill(memory: Allocator, sizes: list[int]) -> None:
    """SGLang model_loader/weight_utils.py: the FP8 copy lives until the next one is there."""
    copy: Block | None = None
    for size in sizes:
        wide = memory.take(2 * size)
        if copy is not None:
            memory.give(copy)
        copy = memory.take(size)
        memory.give(wide)
    if copy is not None:
        memory.give(copy)


def _rope(memory: Allocator, config: Glm53Config) -> None:
    """RoPE's table, float32; angles, cosines and sines are made first. All layers share it."""
    half = config.max_position_embeddings * config.qk_rope_head_dim // 2 * 4
    made = [memory.take(half) for _ in range(3)]
    memory.take(2 * half)
    for block in made:
        memory.give(block)


def _layer(
    config: Glm53Config, topology: Topology, *, sparse: bool, full: bool
) -> Iterator[Tensor]:
    """A layer's parameters on a rank, as SGLang makes them."""
    plain, hidden = _plain(topology), config.hidden_size
    heads = config.num_attention_heads // topology.attn_tp
    nope, v_dim, rope = config.qk_nope_head_dim, config.v_head_dim, config.qk_rope_head_dim
    latent = config.kv_lora_rank

    def projection(rows: int, columns: int, count: int = 1) -> Iterator[Tensor]:
        return _projection(topology, rows, columns, count)

    yield from projection(config.q_lora_rank + latent + rope, hidden)
    yield Tensor(config.q_lora_rank * plain)
    yield from projection(heads * (nope + rope), config.q_lora_rank)
    yield from projection(heads * (nope + v_dim), latent)
    yield from projection(hidden, heads * v_dim)
    yield Tensor(latent * plain)
    if full:
        index = config.index_head_dim
        yield from projection(config.index_n_heads * index, config.q_lora_rank)
        yield Tensor((index + config.index_n_heads) * hidden * plain)  # key and gates, one matrix
        yield Tensor(index * plain)
        yield Tensor(index * plain)
    if sparse:
        experts, inner = config.n_routed_experts // topology.ep, config.moe_intermediate_size
        yield Tensor(config.n_routed_experts * hidden * plain)
        yield Tensor(config.n_routed_experts * 4)
        yield from projection(2 * inner // topology.moe_tp, hidden, experts)
        yield from projection(hidden, inner // topology.moe_tp, experts)
        ranks = 1 if topology.a2a == "deepep" else topology.tp
        inner = config.n_shared_experts * inner // ranks
    else:
        inner = config.intermediate_size // (1 if topology.dense_tp else topology.tp)
    yield from projection(2 * inner, hidden)
    yield from projection(hidden, inner)
    yield Tensor(hidden * plain)
    yield Tensor(hidden * plain)


def _projection(topology: Topology, rows: int, columns: int, count: int) -> Iterator[Tensor]:
    """`count` matrices in one parameter, and their scales where they are FP8."""
    if topology.weights != "fp8":
        yield Tensor(count * rows * columns * _plain(topology))
        return
    yield Tensor(count * rows * columns, filled_by_copy=True)
    yield Tensor(count * -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK) * 4)


def _embedding(config: Glm53Config, topology: Topology) -> Tensor:
    return Tensor(_vocabulary(config) // topology.embed_ranks * _plain(topology))


def _head(config: Glm53Config, topology: Topology) -> Tensor:
    return Tensor(_vocabulary(config) // topology.head_ranks * _plain(topology))


def _vocabulary(config: Glm53Config) -> int:
    return -(-config.vocab_size // VOCAB_PADDING) * VOCAB_PADDING * config.hidden_size


def _plain(topology: Topology) -> int:
    return 4 if topology.weights == "fp32" else 2
