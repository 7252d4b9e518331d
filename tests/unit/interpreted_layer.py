"""A fused step of attention and of an MLP on a CPU, in Triton's interpreter, against the same layer
put together from plain torch. Prints "ok". A process of its own (see test_chain_kernels.py)."""

from __future__ import annotations

import torch
import triton_on_cpu  # noqa: F401  (before anything that imports Triton)

from sglang_glm53.host import activate

activate()  # SGLang is imported without a GPU

from types import SimpleNamespace  # noqa: E402

from sglang_glm53.kernels.fp8 import dequantise_blocks, dequantise_groups  # noqa: E402
from sglang_glm53.layers import attention, decode_chain  # noqa: E402
from sglang_glm53.layers.moe import GlmMLP  # noqa: E402
from sglang_glm53.layers.norm import GlmRMSNorm  # noqa: E402
from sglang_glm53.memory.quantise import dequantise_latents  # noqa: E402

HIDDEN, HEADS, NOPE, ROPE, V, Q_LORA, KV_LORA, ROWS = 256, 2, 192, 64, 256, 256, 512, 3


class Product(torch.nn.Module):
    """A linear layer with block-FP8 weights that takes quantised rows, as SGLang's do."""

    def __init__(self, outer: int, inner: int) -> None:
        super().__init__()
        self.weight = torch.randn(outer, inner).to(torch.float8_e4m3fn)
        self.weight_scale_inv = torch.rand(-(-outer // 128), -(-inner // 128)) * 0.1

    def dense(self) -> torch.Tensor:
        return dequantise_blocks(self.weight, self.weight_scale_inv, torch.float32)

    def forward(self, rows: decode_chain.Rows) -> tuple[torch.Tensor, None]:
        return (dequantise_groups(*rows) @ self.dense().T).bfloat16(), None


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Interleaved pairs of the last dimension; table: [T, rope] cosines, then sines."""
    cos, sin = (part.view(len(x), *[1] * (x.dim() - 2), -1) for part in table.chunk(2, dim=1))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def near(left: torch.Tensor, right: torch.Tensor, limit: float) -> None:
    apart = float((left.float() - right.float()).norm() / right.float().norm())
    assert apart < limit, apart


def check_norm() -> None:
    """The FP8 form travels with the tensor, and only where the chain is asked for."""
    norm = GlmRMSNorm(HIDDEN, eps=1e-5).bfloat16()
    x, residual = (torch.randn(ROWS, HIDDEN).bfloat16() for _ in range(2))
    wanted = norm.forward_native(x.clone(), residual.clone())
    decode_chain.fuses = lambda _: True  # there is no GPU to ask
    import sglang_glm53.layers.norm as module

    module.fuses = decode_chain.fuses
    normed, total = norm.forward_cuda(x, residual)
    near(normed, wanted[0], 1e-2)
    near(total, wanted[1], 1e-2)
    near(dequantise_groups(*decode_chain.attached(normed)), normed, 5e-2)
    assert decode_chain.attached(normed + 0) is None


def check_mlp() -> None:
    mlp = GlmMLP.__new__(GlmMLP)
    torch.nn.Module.__init__(mlp)
    mlp.gate_up_proj, mlp.down_proj = Product(512, HIDDEN), Product(HIDDEN, 256)
    norm = GlmRMSNorm(HIDDEN, eps=1e-5).bfloat16()
    x = norm.forward_cuda(torch.randn(ROWS, HIDDEN).bfloat16())
    gate, up = (x.float() @ mlp.gate_up_proj.dense().T).chunk(2, dim=1)
    wanted = (torch.nn.functional.silu(gate) * up) @ mlp.down_proj.dense().T
    near(mlp(x), wanted, 0.1)


def check_attention() -> None:
    """One step of a shared layer over a cache that holds earlier tokens, page-major."""
    page = 64 * 656 + 8448
    memory = torch.zeros(3 * page, dtype=torch.uint8)
    pages = memory.as_strided((3, 64, 656), (page, 656, 1))
    table = torch.rand(128, ROPE) * 2 - 1
    positions, slots = torch.tensor([5, 70, 9]), torch.tensor([64 + 5, 128 + 6, 64 + 9])
    q_norm, kv_norm = (GlmRMSNorm(n, eps=1e-5).bfloat16() for n in (Q_LORA, KV_LORA))
    layer = SimpleNamespace(
        layer_id=0,
        q_lora_rank=Q_LORA,
        kv_lora_rank=KV_LORA,
        qk_rope_head_dim=ROPE,
        v_head_dim=V,
        num_local_heads=HEADS,
        side_stream=None,
        next_skip_topk=True,
        q_a_layernorm=q_norm,
        kv_a_layernorm=kv_norm,
        rotary_emb=SimpleNamespace(cos_sin_cache=table),
        q_b_proj=Product(HEADS * (NOPE + ROPE), Q_LORA),
        kv_b_proj=Product(HEADS * (NOPE + V), KV_LORA),
        o_proj=Product(HIDDEN, HEADS * V),
        _reused=lambda selection: selection,
    )
    layer._fold_fused = lambda *args: attention.GlmAttention._fold_fused(layer, *args)
    scale = (NOPE + ROPE) ** -0.5

    def attend(q: torch.Tensor, k: None, v: None, batch: object, **options: object) -> torch.Tensor:
        assert k is None and v is None and options["save_kv_cache"] is False
        chosen = options["topk_indices"].long()
        rows = dequantise_latents(pages[chosen // 64, chosen % 64].flatten(0, 1), KV_LORA)
        rows = rows.view(*chosen.shape, -1)
        weights = (torch.einsum("thd,tkd->thk", q.float(), rows) * scale).softmax(-1)
        return torch.einsum("thk,tkd->thd", weights, rows[..., :KV_LORA]).bfloat16()

    layer.attn_mqa = attend
    attention.get_token_to_kv_pool = lambda: SimpleNamespace(latent_pages=lambda layer_id: pages)
    joined = torch.randn(ROWS, Q_LORA + KV_LORA + ROPE).bfloat16()
    selection = torch.stack([slots[[0, 2]], slots[[1, 1]], slots[[2, 0]]]).int()
    output, handed_down = attention.GlmAttention._forward_fused(
        layer, positions, joined, joined, SimpleNamespace(out_cache_loc=slots), selection
    )
    assert handed_down is selection

    def normed(x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    q_latent, latent, k_rope = joined.split([Q_LORA, KV_LORA, ROPE], dim=1)
    angles = table[positions]
    q = (normed(q_latent) @ layer.q_b_proj.dense().T).view(ROWS, HEADS, NOPE + ROPE)
    q_rope = rotate(q[..., NOPE:], angles)
    per_head = layer.kv_b_proj.dense().view(HEADS, NOPE + V, KV_LORA)
    keys = torch.einsum("tk,hnk->thn", normed(latent), per_head[:, :NOPE])
    values = torch.einsum("tk,hvk->thv", normed(latent), per_head[:, NOPE:])
    k_rope = rotate(k_rope.float(), angles)
    of_row = torch.tensor([[0, 2], [1, 1], [2, 0]])
    logits = torch.einsum("thn,tkhn->thk", q[..., :NOPE], keys[of_row])
    logits = logits + torch.einsum("thr,tkr->thk", q_rope, k_rope[of_row])
    weights = (logits * scale).softmax(-1)
    wanted = torch.einsum("thk,tkhv->thv", weights, values[of_row]).flatten(1)
    near(output, wanted @ layer.o_proj.dense().T, 0.1)


if __name__ == "__main__":
    torch.manual_seed(0)
    check_norm()
    check_mlp()
    check_attention()
    print("ok")
