"""Rules on versions: SGLang, PyTorch, the driver, transformers."""

from __future__ import annotations

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.kernels import KERNELS, missing_or_older
from sglang_glm53.checks.reading import nvidia, older, satisfies, written
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict
from sglang_glm53.compat.versions import SUPPORTED

# transformers: the first with glm_moe_dsa, and the first whose indexer rotates interleaved pairs.
KNOWS_GLM, INTERLEAVES = "5.2.0", "5.13.0"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _pinned(specifier: str) -> str:
    """The version of an exact pin, "" of another one."""
    return specifier.removeprefix("==") if specifier.startswith("==") else ""


def _sglang(facts: Facts) -> Verdict:
    version = facts.versions.get("sglang")
    supported = " or ".join(SUPPORTED)
    if version in SUPPORTED:
        return None
    return {"has": f"is {version}" if version else "is not installed", "supported": supported}


def _torch(facts: Facts) -> Verdict:
    has, wanted = facts.versions.get("torch"), _pinned(facts.pins.get("torch", ""))
    if not wanted or (has and _minor(has) == _minor(wanted)):
        return None
    return {"has": has or "not installed", "wanted": wanted}


def _driver(facts: Facts) -> Verdict:
    has, wanted = facts.driver_cuda.split(".")[0], facts.torch_cuda.split(".")[0]
    if written(facts, "device") == "cpu" or int(has) >= int(wanted):
        return None
    return {"has": facts.driver_cuda, "wanted": facts.torch_cuda}


def _told(facts: Facts, name: str) -> bool:
    """Whether another rule tells of this package."""
    if not nvidia(facts):
        return False
    if name == "torch":
        return bool(_torch(facts))
    return name in KERNELS and missing_or_older(facts, name)


def _other_pins(facts: Facts) -> Verdict:
    wrong = {
        name: (has, wanted)
        for name, wanted in facts.pins.items()
        if (has := facts.versions.get(name)) is not None
        and not satisfies(has, wanted)
        and not _told(facts, name)
    }
    if not wrong:
        return None
    shown = [f"{name} is {has} (asked for: {wanted})" for name, (has, wanted) in wrong.items()]
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    fixes = " ".join(f'"{name}{wanted}"' for name, (_, wanted) in wrong.items())
    return {"wrong": ", ".join(shown[:4]) + more, "fixes": fixes}


def _no_architecture(facts: Facts) -> Verdict:
    version = facts.versions.get("transformers")
    if version is not None and not older(version, KNOWS_GLM):
        return None
    return {
        "has": f"is {version}" if version else "is not installed",
        "wanted": facts.pins.get("transformers", f">={INTERLEAVES}"),
        "first": KNOWS_GLM,
    }


def _half_split(facts: Facts) -> Verdict:
    version = facts.versions.get("transformers")
    if version is None or older(version, KNOWS_GLM) or not older(version, INTERLEAVES):
        return None
    return {
        "version": version,
        "first": INTERLEAVES,
        "wanted": facts.pins.get("transformers", f">={INTERLEAVES}"),
    }


RULES: tuple[Rule, ...] = (
    Rule(
        id="sglang-version",
        title="SGLang is a supported version",
        severity=FAIL,
        reads=("versions",),
        condition=_sglang,
        message="SGLang {has}; this release was tested with {supported}",
        cure="install one of them, or the release of sglang-glm53 for your SGLang",
        symptom="The server ends at start with one line; an older sglang-glm53 on a newer SGLang "
        "would fail inside a layer.",
        cause="SGLang's internals change with every release; only the named ones were tested.",
        source=("SGLang's releases, read side by side",),
        at_start=False,
    ),
    Rule(
        id="torch-version",
        title="PyTorch is the version that SGLang's kernels are built for",
        severity=FAIL,
        reads=("versions", "pins", "device"),
        condition=lambda facts: _torch(facts) if nvidia(facts) else None,
        message="torch is {has}; SGLang and its kernel packages are built for {wanted}",
        cure="pip install torch=={wanted}",
        symptom="`undefined symbol` while sgl_kernel or flash_mla is imported.",
        cause="Compiled extensions follow PyTorch's C++ ABI, which changes between minor versions; "
        "another package's requirements replaced torch.",
        source=("SGLang's package metadata",),
        at_start=False,
    ),
    Rule(
        id="driver-version",
        title="the NVIDIA driver runs PyTorch's CUDA",
        severity=FAIL,
        reads=("driver_cuda", "torch_cuda"),
        condition=_driver,
        message="the driver runs CUDA up to {has}; torch is built for {wanted}",
        cure="update the NVIDIA driver, or use an image for CUDA {has}",
        symptom="PyTorch warns of an old driver and sees no GPU; a server then starts on the CPU.",
        cause="A driver runs CUDA of its own major version and older ones.",
        source=("NVIDIA's CUDA compatibility rules",),
    ),
    Rule(
        id="other-pins",
        title="the other packages are those that SGLang asks for",
        severity=WARN,
        reads=("versions", "pins", "modules", "device"),
        condition=_other_pins,
        message="{wrong}",
        cure="pip install {fixes}",
        symptom="Anything from a warning to a tokenizer that loads differently.",
        cause="Another package's requirements replaced them after SGLang was installed.",
        source=("SGLang's package metadata",),
    ),
    Rule(
        id="transformers-without-glm",
        title="transformers knows glm_moe_dsa",
        severity=FAIL,
        reads=("versions", "pins"),
        condition=_no_architecture,
        message="transformers {has}; glm_moe_dsa is in {first} and later",
        cure='pip install "transformers{wanted}"',
        symptom="`KeyError: 'glm_moe_dsa'` before a weight is read; a client cannot load the "
        "tokenizer.",
        cause="The model type and the tokenizer's class came with transformers 5.",
        source=("sgl-project/sglang#19408", "zai-org/GLM-5#22", "NVIDIA/srt-slurm#20"),
    ),
    Rule(
        id="transformers-half-split-indexer",
        title="transformers rotates the indexer as GLM does",
        severity=WARN,
        reads=("versions", "pins"),
        condition=_half_split,
        message="transformers {version} rotates the indexer's halves; GLM's rotates interleaved "
        "pairs (right from {first} on)",
        cure='pip install "transformers{wanted}"; do not save or judge a checkpoint with this one',
        symptom="Good answers below 2,048 tokens, single wrong characters or gibberish above; a "
        "comparison with transformers that never agrees.",
        cause="Its reference implementation had DeepSeek's layout, and a config saved by it lacks "
        "the field that says so.",
        source=(
            "huggingface/transformers#46842",
            "ikawrakow/ik_llama.cpp#2099",
            "ml-explore/mlx-lm#1453",
        ),
    ),
)
