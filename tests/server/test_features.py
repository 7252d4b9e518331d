"""What the table of features calls running and no other test runs: on a CPU, against transformers.

Pipeline and expert parallelism; a head split over attention ranks; prefill and decode in one pass;
hidden states and routed experts in the answer; weights updated from disk and from memory.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests
import torch

from .comparing import NEAR_TIE, TOLERANCE, largest_difference, settled_prompt
from .conftest import FLOAT32, RETURNED
from .harness import Server, ServerPool
from .test_parallel import NEW, SEEDS

if TYPE_CHECKING:
    from reference.hf import Reference

pytestmark = pytest.mark.server

RANKS = {
    "pipeline": ("--pp-size", "2"),
    "experts": ("--tp-size", "2", "--ep-size", "2"),
    "split head": (
        *("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--enable-dp-lm-head"),
    ),
    "mixed chunks": ("--chunked-prefill-size", "64", "--enable-mixed-chunk"),
}


@pytest.fixture
def prompts(tiny_checkpoint: Callable[..., Path], reference: Callable) -> list[list[int]]:
    model = reference(tiny_checkpoint())
    return [settled_prompt(model, length, NEW, seed) for length, seed in SEEDS.items()]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(arguments, marks=pytest.mark.server(f"ranks {name}"), id=name)
        for name, arguments in RANKS.items()
    ],
)
def test_as_one_rank_computes_it(
    arguments: tuple[str, ...],
    servers: ServerPool,
    plain_runs: Callable,
    tiny_checkpoint: Callable[..., Path],
    prompts: list[list[int]],
) -> None:
    """Same tokens, log-probabilities within 1e-5; alone and together."""
    expected, _ = plain_runs(prompts, NEW)
    server = servers.get(tiny_checkpoint(), *FLOAT32, *arguments)
    server.flush()
    answers = [server.generate([prompt], NEW)[0] for prompt in prompts]
    server.flush()
    answers += server.generate(prompts, NEW)
    worst = max(
        largest_difference(answer, plain)
        for answer, plain in zip(answers, expected * 2, strict=True)
    )
    print(f"largest |delta log-probability| {worst:.2e}")
    assert worst <= 1e-5


# --- what comes back beside the tokens ---------------------------------------------------------


@pytest.fixture
def server(servers: ServerPool, tiny_checkpoint: Callable[..., Path]) -> Server:
    """One server for all that needs no more ranks."""
    return servers.get(tiny_checkpoint(), *FLOAT32, *RETURNED)


def ask(server: Server, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """One greedy request; its meta_info."""
    body = {**server.request(prompt, NEW), **fields}
    reply = requests.post(server.url + "/generate", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.server("returned")
def test_hidden_states_in_the_answer(
    server: Server, tiny_checkpoint: Callable[..., Path], reference: Callable
) -> None:
    """Those after the final norm, of every prompt token and of every token but the last."""
    model = reference(tiny_checkpoint())
    prompt = settled_prompt(model, 200, NEW, seed=2200)
    server.flush()
    reply = ask(server, prompt, return_hidden_states=True)
    states = reply["meta_info"]["hidden_states"]
    given = torch.tensor([*states[0], *states[1:]])
    expected = model.trace(prompt + reply["output_ids"]).hidden[: len(prompt) + NEW - 1]
    assert given.shape == expected.shape
    worst = float((given - expected).abs().max() / expected.abs().max())
    print(f"largest difference {worst:.2e} of the largest value")
    assert worst <= TOLERANCE


@pytest.mark.server("returned")
def test_routed_experts_in_the_answer(
    server: Server, tiny_checkpoint: Callable[..., Path], reference: Callable
) -> None:
    """The experts that each MoE layer of transformers chooses for the same tokens."""
    model = reference(tiny_checkpoint())
    prompt = settled_prompt(model, 200, NEW, seed=2200)
    server.flush()
    reply = ask(server, prompt, return_routed_experts=True)
    packed = base64.b64decode(reply["meta_info"]["routed_experts"])
    config, rows = model.config, len(prompt) + NEW - 1
    chosen = torch.frombuffer(bytearray(packed), dtype=torch.int32).long()
    chosen = chosen.reshape(rows, config.num_hidden_layers, config.num_experts_per_tok)
    with routed(model) as routes:
        trace = model.trace(prompt + reply["output_ids"])
    assert routes, "transformers has no MoE layer"
    clear = trace.gap[:rows] >= NEAR_TIE
    for layer, expected in routes.items():
        mine, theirs = chosen[:, layer].sort().values, expected[:rows].sort().values
        assert torch.equal(mine[clear], theirs[clear]), f"layer {layer}"


class routed:  # noqa: N801 - a context manager that reads like a word
    """Notes which experts each MoE layer of a reference chooses: {layer: [tokens, k]}."""

    def __init__(self, model: Reference) -> None:
        self.model, self.hooks = model, []

    def __enter__(self) -> dict[int, torch.Tensor]:
        routes: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.model.model.model.layers):
            if (gate := getattr(layer.mlp, "gate", None)) is not None:
                self.hooks.append(
                    gate.register_forward_hook(
                        lambda _m, _a, output, i=index: routes.__setitem__(i, output[2])
                    )
                )
        return routes

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


# --- weights -----------------------------------------------------------------------------------


@pytest.fixture
def put_back(server: Server, tiny_checkpoint: Callable[..., Path]) -> Iterator[None]:
    """The next test finds the first weights, whatever this one left."""
    yield
    update(server, tiny_checkpoint())


def update(server: Server, folder: Path) -> None:
    reply = requests.post(
        server.url + "/update_weights_from_disk", json={"model_path": str(folder)}, timeout=300
    )
    assert reply.status_code == 200 and reply.json()["success"], reply.text


@pytest.mark.server("returned")
def test_weights_from_disk(
    server: Server, tiny_checkpoint: Callable[..., Path], reference: Callable, put_back: None
) -> None:
    """The same, another seed's, and the first again: each time what transformers computes."""
    for folder in (tiny_checkpoint(), tiny_checkpoint(seed=1), tiny_checkpoint()):
        update(server, folder)
        model = reference(folder)
        prompt = settled_prompt(model, 200, NEW, seed=12_300)
        (answer,) = server.generate([prompt], NEW)
        trace = model.trace(answer.sequence)
        assert answer.tokens == model.generate(prompt, NEW)
        worst = max(abs(v - float(trace.logprobs[i - 1])) for i, v in answer.logprobs.items())
        assert worst <= TOLERANCE, f"{folder}: {worst:.2e}"


@pytest.mark.server("returned")
def test_weights_from_memory(
    server: Server, tiny_checkpoint: Callable[..., Path], reference: Callable, put_back: None
) -> None:
    """Some tensors alone; a tensor that the model does not have changes nothing."""
    from reference.hf import read_tensors

    folder = tiny_checkpoint()
    model = reference(folder)
    prompt = settled_prompt(model, 100, NEW, seed=2400)
    (first,) = server.generate([prompt], NEW)
    names = (
        "model.layers.3.self_attn.kv_b_proj.weight",
        "model.layers.4.mlp.experts.2.up_proj.weight",
    )
    tensors = {name: read_tensors(folder, name)[name].float() for name in names}
    reply = send(server, {name: -tensor for name, tensor in tensors.items()})
    assert reply.ok, reply.text
    (turned,) = server.generate([prompt], NEW)
    assert turned.logprobs != first.logprobs
    refused = send(server, {"model.layers.3.nothing.weight": torch.zeros(1)})
    assert not refused.ok and "nothing.weight is not a tensor of this" in refused.text
    (still,) = server.generate([prompt], NEW)
    assert still.tokens == turned.tokens
    assert send(server, tensors).ok
    (again,) = server.generate([prompt], NEW)
    assert largest_difference(again, first) <= 1e-5


def send(server: Server, tensors: dict[str, torch.Tensor]) -> requests.Response:
    """Hand tensors over through shared memory."""
    import torch.multiprocessing
    from sglang.srt.utils import MultiprocessingSerializer

    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        payload = MultiprocessingSerializer.serialize(list(tensors.items()))
        body = {"serialized_named_tensors": [base64.b64encode(payload).decode()]}
        assert requests.post(server.url + "/begin_weight_update", json={}, timeout=60).ok
        reply = requests.post(server.url + "/update_weights_from_tensor", json=body, timeout=300)
        assert requests.post(server.url + "/end_weight_update", json={}, timeout=60).ok
        return reply
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
