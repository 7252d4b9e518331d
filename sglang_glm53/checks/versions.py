"""Rules on versions: SGLang, PyTorch, the driver, the kernel packages, transformers."""

from __future__ import annotations

import re

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.reading import on_gpu
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict
from sglang_glm53.compat.versions import SUPPORTED

# Packages whose compiled code SGLang calls in GLM-5.3's forward pass on an NVIDIA GPU.
KERNELS = ("sglang-kernel", "sgl-deep-gemm", "sgl-flash-mla", "flashinfer-python")

# Distributions that bring the same module, of which the one installed last wins.
SAME_MODULE = (
    ("sgl_kernel", "sglang-kernel", "sgl-kernel"),
    ("deep_gemm", "sgl-deep-gemm", "deep-gemm"),
    ("flash_mla", "sgl-flash-mla", "flash-mla"),
    ("deep_ep", "sgl-deep-ep", "deep-ep"),
)

# transformers: the first with glm_moe_dsa, and the first whose indexer rotates interleaved pairs.
KNOWS_GLM, INTERLEAVES = "5.2.0", "5.13.0"

# FlashInfer releases whose fused all-reduce + RMSNorm lost accuracy: first, and first without.
INACCURATE_FUSION = ("0.6.12", "0.6.15")


def _older(version: str, than: str) -> bool:
    from packaging.version import Version

    return Version(version) < Version(than)


def _satisfies(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


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


def _nvidia(facts: Facts) -> bool:
    """Whether an NVIDIA GPU serves, whose kernel packages then count."""
    return facts.device == "cuda" and on_gpu(facts)


def _torch(facts: Facts) -> Verdict:
    has, wanted = facts.versions.get("torch"), _pinned(facts.pins.get("torch", ""))
    if not wanted or (has and _minor(has) == _minor(wanted)):
        return None
    return {"has": has or "not installed", "wanted": wanted}


def _cuda_of_kernels(facts: Facts) -> Verdict:
    """SGLang's pins name the CUDA major version of their wheels: `nvshmem4py-cu13`."""
    majors = {found[1] for name in facts.pins if (found := re.search(r"-cu(\d\d)$", name))}
    has = facts.torch_cuda.split(".")[0]
    if not majors or has in majors:
        return None
    return {"has": facts.torch_cuda, "wanted": max(majors)}


def _driver(facts: Facts) -> Verdict:
    has, wanted = facts.driver_cuda.split(".")[0], facts.torch_cuda.split(".")[0]
    return (
        {"has": facts.driver_cuda, "wanted": facts.torch_cuda} if int(has) < int(wanted) else None
    )


def _kernels(facts: Facts) -> Verdict:
    if not _nvidia(facts):
        return None
    wrong = []
    for name in KERNELS:
        has, wanted = facts.versions.get(name), facts.pins.get(name)
        if wanted is not None and (has is None or not _satisfies(has, wanted)):
            wrong.append(f"{name} is {has or 'missing'} (SGLang asks for {wanted or 'any'})")
    return {"wrong": ", ".join(wrong)} if wrong else None


def _other_pins(facts: Facts) -> Verdict:
    told = {"torch", *(KERNELS if _nvidia(facts) else ())}
    wrong = {
        name: (has, wanted)
        for name, wanted in facts.pins.items()
        if (has := facts.versions.get(name)) is not None
        and not _satisfies(has, wanted)
        and not (name in told and (name != "torch" or _torch(facts)))
    }
    if not wrong:
        return None
    shown = [f"{name} is {has} (asked for: {wanted})" for name, (has, wanted) in wrong.items()]
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    fixes = " ".join(f'"{name}{wanted}"' for name, (_, wanted) in wrong.items())
    return {"wrong": ", ".join(shown[:4]) + more, "fixes": fixes}


def _same_module(facts: Facts) -> Verdict:
    both = [
        (module, names)
        for module, *names in SAME_MODULE
        if all(facts.versions.get(name) for name in names)
    ]
    if not both:
        return None
    found = [f"{' and '.join(names)} both bring {module}" for module, names in both]
    return {
        "found": ", ".join(found),
        "drop": " ".join(names[1] for _, names in both),
        "keep": " ".join(names[0] for _, names in both),
    }


def _flashinfer_parts(facts: Facts) -> Verdict:
    base = facts.versions.get("flashinfer-python")
    parts = {
        name: version
        for name in ("flashinfer-cubin", "flashinfer-jit-cache")
        if (version := facts.versions.get(name)) and base and version != base
    }
    if not parts:
        return None
    found = ", ".join(f"{name} {version}" for name, version in parts.items())
    return {"found": found, "base": base, "fixes": " ".join(f"{name}=={base}" for name in parts)}


def _fusion_accuracy(facts: Facts) -> Verdict:
    version = facts.versions.get("flashinfer-python")
    first, without = INACCURATE_FUSION
    if not version or _older(version, first) or not _older(version, without):
        return None
    return {"version": version} if facts.arg("flashinfer_allreduce_fusion_backend") else None


def _no_architecture(facts: Facts) -> Verdict:
    version = facts.versions.get("transformers")
    if version is not None and not _older(version, KNOWS_GLM):
        return None
    return {
        "has": f"is {version}" if version else "is not installed",
        "wanted": facts.pins.get("transformers", f">={INTERLEAVES}"),
        "first": KNOWS_GLM,
    }


def _half_split(facts: Facts) -> Verdict:
    version = facts.versions.get("transformers")
    if version is None or _older(version, KNOWS_GLM) or not _older(version, INTERLEAVES):
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
        condition=lambda facts: _torch(facts) if _nvidia(facts) else None,
        message="torch is {has}; SGLang and its kernel packages are built for {wanted}",
        cure="pip install torch=={wanted}",
        symptom="`undefined symbol` while sgl_kernel or flash_mla is imported.",
        cause="Compiled extensions follow PyTorch's C++ ABI, which changes between minor versions; "
        "another package's requirements replaced torch.",
        source=("sgl-project/sglang#10602", "SGLang's package metadata"),
    ),
    Rule(
        id="cuda-of-kernels",
        title="PyTorch and the kernel wheels are built for one CUDA",
        severity=FAIL,
        reads=("pins", "torch_cuda", "device"),
        condition=lambda facts: _cuda_of_kernels(facts) if _nvidia(facts) else None,
        message="torch is built for CUDA {has}, SGLang's kernel wheels for CUDA {wanted}",
        cure="install torch for CUDA {wanted} (its wheels end with +cu{wanted}x)",
        symptom="`import deep_gemm` or `import sgl_kernel` cannot load a CUDA library.",
        cause="The wheels link against the libraries of one CUDA major version.",
        source=("sgl-project/sglang#25069",),
    ),
    Rule(
        id="driver-version",
        title="the NVIDIA driver runs PyTorch's CUDA",
        severity=FAIL,
        reads=("driver_cuda", "torch_cuda"),
        condition=_driver,
        message="the driver runs CUDA up to {has}; torch is built for {wanted}",
        cure="update the NVIDIA driver, or use an image for CUDA {has}",
        symptom="`The NVIDIA driver on your system is too old`; PyTorch sees no GPU.",
        cause="A driver runs CUDA of its own major version and older ones.",
        source=("NVIDIA's CUDA compatibility rules",),
    ),
    Rule(
        id="kernel-packages",
        title="the kernel packages are those that SGLang asks for",
        severity=FAIL,
        reads=("versions", "pins", "device"),
        condition=_kernels,
        message="{wrong}",
        cure="install what the installed SGLang asks for: pip install --force-reinstall --no-deps "
        "with those versions",
        symptom="A missing operator, a wrong argument count, or a crash in the first request.",
        cause="SGLang calls these packages by signatures that change from release to release.",
        source=("sgl-project/sglang#28893", "SGLang's package metadata"),
    ),
    Rule(
        id="other-pins",
        title="the other packages are those that SGLang asks for",
        severity=WARN,
        reads=("versions", "pins", "device"),
        condition=_other_pins,
        message="{wrong}",
        cure="pip install {fixes}",
        symptom="Anything from a warning to a tokenizer that loads differently.",
        cause="Another package's requirements replaced them after SGLang was installed.",
        source=("SGLang's package metadata",),
    ),
    Rule(
        id="same-module",
        title="no two packages bring the same kernel module",
        severity=FAIL,
        reads=("versions",),
        condition=_same_module,
        message="{found}; the one installed last wins, and removing one breaks the other",
        cure="pip uninstall -y {drop} {keep} and install {keep} again, as SGLang asks for it",
        symptom="An operator is missing although the right version is installed.",
        cause="The packages were renamed; an upgrade leaves the old one in place.",
        source=("sgl-project/sglang#28893", "the packages' contents"),
    ),
    Rule(
        id="flashinfer-parts",
        title="FlashInfer's packages have one version",
        severity=FAIL,
        reads=("versions",),
        condition=_flashinfer_parts,
        message="{found} beside flashinfer-python {base}",
        cure="pip install {fixes}",
        symptom="FlashInfer refuses to be imported, or compiles every kernel at the first request.",
        cause="Its kernels come in packages of their own, which pip does not keep at one version.",
        source=("FlashInfer's own version check",),
    ),
    Rule(
        id="flashinfer-fusion-accuracy",
        title="FlashInfer's fused all-reduce is an accurate one",
        severity=WARN,
        reads=("versions", "args"),
        condition=_fusion_accuracy,
        message="the fused all-reduce of FlashInfer {version} lost accuracy",
        cure="install the FlashInfer that SGLang asks for, or give "
        "--enforce-disable-flashinfer-allreduce-fusion",
        symptom="GSM8K falls from 0.84 to 0.78 with the fusion on.",
        cause="A regression in the kernel's numerics, hidden at first by a failure that switched "
        "it off.",
        source=("sgl-project/sglang#30945", "sgl-project/sglang#30875", "sgl-project/sglang#30580"),
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
