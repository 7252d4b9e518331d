"""The article's figures: each that is right is held, each that is not differs; and the document."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger import docs
from sglang_glm53.ledger.account import Account
from sglang_glm53.ledger.article import Claim, Claims
from sglang_glm53.ledger.collectives import Rows, collectives
from sglang_glm53.ledger.glm53 import config_json
from sglang_glm53.ledger.hardware import load
from sglang_glm53.ledger.model import cache, parameters
from sglang_glm53.ledger.topology import PRESETS, Workload

CONFIG = Glm53Config.from_hf(config_json())
PARAMETERS = parameters(CONFIG)
CLAIMS = Claims().found


def of(topology: str, **work: int) -> Account:
    shape = {"batch": 32, "context": 131072, "prompt": 8192, "chunk": 8192, **work}
    return Account(CONFIG, PRESETS[topology], Workload(**shape), load("h200"))


def where(one: Account, start: str, kind: str | None = None) -> list:
    return [
        row
        for _, _, row in one.decode.collectives
        if row.where.startswith(start) and kind in (None, row.kind)
    ]


def total(rows: list) -> float:
    return sum(row.total_bytes for row in rows)


# Each figure by hand first, then what the ledger's own sheets and rows say.
FIGURES: list[tuple[str, float, float, Callable[[], float]]] = [
    ("A projections", 6144 * (2048 + 512 + 64), 16.12e6, lambda: PARAMETERS["a_projections"]),
    ("Q", 2048 * 64 * (192 + 64), 33.55e6, lambda: PARAMETERS["q_b"]),
    ("KV", 512 * 64 * (192 + 256), 14.68e6, lambda: PARAMETERS["kv_b"]),
    ("O", 64 * 256 * 6144, 100.66e6, lambda: PARAMETERS["o_proj"]),
    ("an expert", 3 * 6144 * 2048, 37.75e6, lambda: PARAMETERS["expert"]),
    ("256 experts", 256 * 3 * 6144 * 2048, 9.66e9, lambda: PARAMETERS["routed"]),
    ("75 layers", 75 * 256 * 3 * 6144 * 2048, 724e9, lambda: PARAMETERS["routed_total"]),
    ("full layers", 3 + 18, 21, lambda: PARAMETERS["full_layers"]),
    ("shared layers", 78 - 21, 57, lambda: PARAMETERS["shared_layers"]),
    ("elements", 576 * 78, 44928, lambda: cache(CONFIG, "bf16")["latent_elements_token"]),
    (
        "latent q·k",
        2 * 64 * 512 * 2048,
        134.2e6,
        # The operator is q·k over 576 and the sum over 512: 1088 in all.
        lambda: (
            [o for o in of("tp1", batch=1).layer("full") if "sparse" in o.name][0].flops.value
            * 512
            / 1088
        ),
    ),
    (
        "experts of a rank",
        75 * 32 * 3 * 6144 * 2048 * (1 + 4 / 16384),
        90.6e9,
        lambda: of("dp8-deepep").stored["stored_routed"],
    ),
    ("collectives, TP", 2 * 78, 156, lambda: of("tp8").decode.collective_count - 2),
    ("with embedding and logits", 2 * 78 + 2, 158, lambda: of("tp8").decode.collective_count),
    (
        "collectives, DeepEP",
        2 * 75,
        150,
        lambda: sum(r.count for r in where(of("dp8-deepep"), "exp")),
    ),
    (
        "an all-reduce of 8,192 tokens",
        8192 * 6144 * 2,
        100.7e6,
        lambda: of("tp8").prefill[0].collectives[1].bytes.value,
    ),
    (
        "all of them",
        156 * 8192 * 6144 * 2,
        15.7e9,
        lambda: total([r for r in of("tp8").prefill[0].collectives if "output" in r.where]),
    ),
    (
        "a DP gather",
        32 * 6144 * 2,
        393216,
        lambda: where(of("dp8"), "FFN input")[0].bytes.value,
    ),
    ("DP gather and scatter", 156 * 32 * 6144 * 2, 61.3e6, lambda: total(where(of("dp8"), "FFN"))),
    (
        "dispatch",
        75 * 32 * 8 * 6144,
        118.0e6,
        # Without the float32 scale that goes with each 128 values.
        lambda: total(where(of("dp8-deepep"), "experts", "dispatch")) / (1 + 4 / 128),
    ),
    (
        "combine",
        75 * 32 * 8 * 6144 * 2,
        235.9e6,
        lambda: total(where(of("dp8-deepep"), "experts", "combine")),
    ),
    (
        "index keys, 128K",
        21 * 131072 * 128,
        352e6,
        lambda: of("tp1", batch=1).decode.bytes_by["index keys"] * 128 / 132,
    ),
    (
        "index keys, 1M",
        21 * 1048576 * 128,
        2.82e9,
        lambda: of("tp1", batch=1, context=2**20).decode.bytes_by["index keys"] * 128 / 132,
    ),
    (
        "with scales, 128K",
        21 * 131072 * 132,
        363e6,
        lambda: of("tp1", batch=1).decode.bytes_by["index keys"],
    ),
    (
        "with scales, 1M",
        21 * 1048576 * 132,
        2.91e9,
        lambda: of("tp1", batch=1, context=2**20).decode.bytes_by["index keys"],
    ),
    (
        "logits of 32 x 6 rows",
        6 * 32 * 154880 * 2,
        59.5e6,
        lambda: collectives(CONFIG, PRESETS["tp8"], "verify", Rows((192,), (192,)))[-1].bytes.value,
    ),
]


@pytest.mark.parametrize(
    ("name", "by_hand", "said", "ledger"), FIGURES, ids=[f[0] for f in FIGURES]
)
def test_a_figure_that_is_right(
    name: str, by_hand: float, said: float, ledger: Callable[[], float]
) -> None:
    """By hand, to the digits that were said, and from the ledger's sheets and rows."""
    assert by_hand == pytest.approx(said, rel=0.0015)
    assert ledger() == pytest.approx(by_hand, rel=1e-12)


def test_which_layers_are_full() -> None:
    assert CONFIG.full_layers == (0, 1, 2, *range(6, 75, 4))


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.said is not None], ids=lambda c: c.topic)
def test_a_claim_is_right_or_has_a_reason(claim: Claim) -> None:
    assert claim.agrees == claim.is_right, (claim.said, claim.figure.value)


@pytest.mark.parametrize(
    ("topic", "value"),
    [
        # Those that the article has wrong, each by hand.
        ("latent of a token and layer in FP8", 512 + 4 * 4 + 64 * 2),
        ("cache of a token in FP8", 78 * 656 + 21 * 132),
        ("latents of a page and layer", 64 * 656),
        ("a token's FLOPs, its weights alone", 2 * 39_347_364_864),
        ("a token's attention over 2,048 latents", 78 * 2 * 64 * 2048 * (576 + 512)),
        ("FP8 peak of an H200", 1979e12),
        ("all-reduces of 8,192 tokens, TP 8", 156 * 8192 * 6144 * 2),
        ("dispatch of a step, 32 rows", 75 * 32 * 8 * 6144),
        ("combine of a step, 32 rows", 75 * 32 * 8 * 6144 * 2),
        ("dispatch and combine with MTP, a layer", 192 * 8 * 6144 * 3),
        (
            "collectives for a generated token, DP 8 with DeepEP",
            # 75 layers of dispatch, with scales, and combine; 3 of gather and scatter; the head's.
            (75 * 32 * 8 * (6144 + 48 * 4 + 2 * 6144) + 7 * 393216 + 32 * 154880 * 2) / 32,
        ),
        ("lm_head, whole", 154880 * 6144 * 2),
        ("A projections of a layer, stored", 6144 * 2624 * (1 + 4 / 16384)),
        ("156 all-reduces of 8,192 tokens", 156 * 2 * 7 / 8 * 8192 * 6144 * 2 / 450e9 * 1e3),
        ("DeepEP of 8,192 tokens between machines", 75 * 8192 * 8 * 6144 * 3),
        ("the same over 50 GB/s", 75 * 8192 * 8 * 6144 * 3 / 50e9),
        ("requests of 1M tokens on eight H200", 0),
    ],
)
def test_what_is_right_instead(topic: str, value: float) -> None:
    (claim,) = [each for each in CLAIMS if each.topic == topic]
    assert claim.figure.value == pytest.approx(value, rel=1e-12)
    assert claim.why and not claim.agrees


# --- docs/request-path.md ------------------------------------------------------------------------


def test_the_document_is_not_stale() -> None:
    built = docs.build()
    kept = (docs.DOCS / docs.TARGET).read_text()
    assert built == kept, "run `python -m sglang_glm53.ledger.docs`"
    assert "{{" not in built
    for claim in CLAIMS:
        assert claim.topic in built and claim.words in built


def test_an_unknown_value_in_the_text_is_one_line(tmp_path) -> None:
    (tmp_path / docs.SOURCE).write_text("a {{nonsense}} b")
    with pytest.raises(Glm53Error, match="asks for 'nonsense'"):
        docs.build(tmp_path)
    with pytest.raises(Glm53Error, match="cannot read"):
        docs.build(tmp_path / "nowhere")
