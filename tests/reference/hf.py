"""The oracle: transformers' ``GlmMoeDsaForCausalLM``, run eagerly on the CPU.

Two things are set so that both sides compute the same function, and nothing else is changed:

* the eps of ``q_a_layernorm`` and ``kv_a_layernorm`` becomes ``config.rms_norm_eps``
  (transformers hard-wires 1e-6 there; SGLang and this package use the config's 1e-5);
* among equal index scores the smaller position wins. ``Tensor.topk`` promises no order, so the
  call inside the indexer is answered with a stable sort; the scores are transformers' own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.utils import logging as transformers_logging


class _StableTopk(TorchFunctionMode):
    """Answers ``Tensor.topk`` with a stable descending sort and keeps the scores it was given."""

    def __init__(self, keep: list[torch.Tensor]) -> None:
        super().__init__()
        self.keep = keep

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk:
            scores, k = args[0], args[1]
            self.keep.append(scores.detach())
            values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
            return torch.return_types.topk((values[..., :k], indices[..., :k]))
        return func(*args, **(kwargs or {}))


@dataclass
class Trace:
    """One teacher-forced forward over ``n`` tokens.

    logprobs: [n - 1] fp32, log p(token p + 1 | tokens 0..p) in nats.
    logits:   [n, vocab] fp32.
    hidden:   [n, hidden], after the final norm: what the target hands to the draft layer.
    selected: per full layer a bool mask [n, n]; row p marks the positions that p attends.
    used:     the same per layer, full and shared: the set that layer's attention really used.
    gap:      [n] fp32, the smallest relative difference over the full layers between the k-th
              and the next index score of a position; infinite where everything is selected.
    """

    logprobs: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor
    selected: dict[int, torch.Tensor]
    used: dict[int, torch.Tensor]
    gap: torch.Tensor


class Reference:
    """A checkpoint in transformers, with its indexers observed.

    path: a checkpoint directory without quantisation (see :func:`dequantised_copy`).
    dtype: torch.float32 (the oracle) or torch.bfloat16 (transformers' own bf16).
    """

    def __init__(self, path: Path | str, dtype: torch.dtype = torch.float32) -> None:
        self.path = Path(path)
        transformers_logging.set_verbosity_error()  # it would list the MTP layer, which it skips
        self.config = GlmMoeDsaConfig.from_pretrained(self.path)
        self.model = GlmMoeDsaForCausalLM.from_pretrained(
            self.path, config=self.config, dtype=dtype, attn_implementation="eager"
        ).eval()
        self.topk: int = self.config.index_topk
        self._scores: dict[int, list[torch.Tensor]] = {}
        self._used: dict[int, list[torch.Tensor]] = {}
        for index, layer in enumerate(self.model.model.layers):
            prepare_attention(layer.self_attn, self.config.rms_norm_eps)
            self._observe(index, layer.self_attn)

    def _observe(self, index: int, attention: torch.nn.Module) -> None:
        self._scores[index], self._used[index] = [], []
        if attention.indexer is not None:
            attention.indexer.register_forward_hook(
                lambda module, args, output: self._scores[index].append(module.scores)
            )
        attention.register_forward_hook(
            lambda module, args, output: self._used[index].append(output[2].detach())
        )

    @property
    def full_layers(self) -> list[int]:
        """The layers that run their own indexer."""
        kinds = self.config.indexer_types
        return [i for i in range(self.config.num_hidden_layers) if kinds[i] != "shared"]

    def layer_above(self, layer: int) -> int:
        """The full layer whose set ``layer`` uses (itself when it is full)."""
        return max(i for i in self.full_layers if i <= layer)

    @torch.no_grad()
    def trace(self, tokens: list[int]) -> Trace:
        """Teacher-forced forward over ``tokens`` as one sequence."""
        for kept in (*self._scores.values(), *self._used.values()):
            kept.clear()
        ids = torch.tensor([tokens])
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden)[0].float()
        logprobs = torch.log_softmax(logits, dim=-1)
        n = len(tokens)
        gap = torch.full((n,), float("inf"))
        selected = {}
        for layer in self.full_layers:
            scores = self._scores[layer][-1][0]
            gap = torch.minimum(gap, topk_gap(scores, self.topk))
            selected[layer] = stable_topk_mask(scores, self.topk)
        used = {i: _as_mask(self._used[i][-1][0], n) for i in self._used}
        return Trace(
            logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0],
            logits,
            hidden[0],
            selected,
            used,
            gap,
        )

    @torch.no_grad()
    def generate(self, prompt: list[int], new_tokens: int, chunk: int | None = None) -> list[int]:
        """Greedy continuation of ``prompt`` through transformers' own cache.

        chunk: tokens a prefill step; None prefills the prompt at once.
        """
        cache = DynamicCache(config=self.config)
        step = chunk or len(prompt)
        for start in range(0, len(prompt), step):
            logits = self._step(prompt[start : start + step], cache)
        output: list[int] = []
        for _ in range(new_tokens):
            output.append(int(logits.argmax()))
            if len(output) < new_tokens:
                logits = self._step(output[-1:], cache)
        return output

    def _step(self, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
        output = self.model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        return output.logits[0, -1].float()


def prepare_attention(attention: torch.nn.Module, eps: float) -> None:
    """Sets the two norms' eps and the tie rule on one transformers attention module.

    The indexer keeps its last scores, [batch, rows, keys] fp32, in ``indexer.scores``.
    """
    attention.q_a_layernorm.variance_epsilon = eps
    attention.kv_a_layernorm.variance_epsilon = eps
    indexer = attention.indexer
    if indexer is None:
        return
    inner = indexer.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        keep: list[torch.Tensor] = []
        with _StableTopk(keep):
            selected = inner(*args, **kwargs)
        indexer.scores = keep[-1]
        return selected

    indexer.forward = forward


def stable_topk_mask(scores: torch.Tensor, k: int) -> torch.Tensor:
    """[n, n] scores of a causal sequence to the bool mask of each row's ``k`` best.

    Position p sees 0..p; equal scores go to the smaller position; at most p + 1 are selected.
    """
    n = scores.shape[0]
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    order = torch.sort(
        scores.masked_fill(~causal, float("-inf")), dim=-1, descending=True, stable=True
    ).indices[:, :k]
    return torch.zeros(n, n, dtype=torch.bool).scatter_(1, order, True) & causal


def topk_gap(scores: torch.Tensor, k: int) -> torch.Tensor:
    """[n] relative difference between the k-th and the (k + 1)-th score of each causal row.

    Infinite for rows that see at most ``k`` positions; zero for an exact tie.
    """
    n = scores.shape[0]
    gap = torch.full((n,), float("inf"))
    if n <= k:
        return gap
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    best = scores.masked_fill(~causal, float("-inf"))[k:].topk(k + 1, dim=-1).values
    last, following = best[:, k - 1], best[:, k]
    scale = torch.maximum(last.abs(), following.abs()).clamp_min(1e-30)
    gap[k:] = (last - following) / scale
    return gap


def _as_mask(indices: torch.Tensor, n: int) -> torch.Tensor:
    """Position lists [n, k] to a causal bool mask [n, n]."""
    mask = torch.zeros(n, n, dtype=torch.bool).scatter_(1, indices.long(), True)
    return mask & torch.ones(n, n, dtype=torch.bool).tril()


def read_tensors(path: Path | str, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint directory whose name starts with ``prefix``."""
    tensors = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a dict
                if name.startswith(prefix):
                    tensors[name] = stored.get_tensor(name)
    return tensors


def dequantised_copy(source: Path | str, target: Path | str) -> Path:
    """Writes ``source`` (FP8, 128x128 block scales ``*_scale_inv``) to ``target`` in fp32."""
    source, target = Path(source), Path(target)
    target.mkdir(parents=True, exist_ok=True)
    stored = read_tensors(source)
    plain = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        tensor = tensor.float()
        scale = stored.get(name + "_scale_inv")
        if scale is not None:
            rows, columns = tensor.shape
            grid = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            tensor = tensor * grid[:rows, :columns]
        plain[name] = tensor.contiguous()
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target
