"""Rules on the packages of compiled kernels: theirs and the CUDA that they are built for."""

from __future__ import annotations

import re

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.reading import nvidia, older, satisfies
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict

# Packages whose compiled code SGLang calls in GLM-5.3's forward pass on an NVIDIA GPU.
# With the module of each: a build of somebody's own has it under another package's name.
KERNELS = {
    "sglang-kernel": "sgl_kernel",
    "sgl-deep-gemm": "deep_gemm",
    "sgl-flash-mla": "flash_mla",
    "flashinfer-python": "flashinfer",
}


# Distributions that bring the same module, of which the one installed last wins.
SAME_MODULE = (
    ("sgl_kernel", "sglang-kernel", "sgl-kernel"),
    ("deep_gemm", "sgl-deep-gemm", "deep-gemm"),
    ("flash_mla", "sgl-flash-mla", "flash-mla"),
    ("deep_ep", "sgl-deep-ep", "deep-ep"),
)


# FlashInfer releases whose fused all-reduce + RMSNorm lost accuracy: first, and first without.
INACCURATE_FUSION = ("0.6.12", "0.6.15")


def _cuda_of_kernels(facts: Facts) -> Verdict:
    """SGLang's pins name the CUDA major version of their wheels: `nvshmem4py-cu13`."""
    majors = {found[1] for name in facts.pins if (found := re.search(r"-cu(\d\d)$", name))}
    has = facts.torch_cuda.split(".")[0]
    if not majors or has in majors:
        return None
    return {"has": facts.torch_cuda, "wanted": max(majors)}


def missing_or_older(facts: Facts, name: str) -> bool:
    """Whether a kernel package is not there, or before the version that SGLang asks for."""
    has, wanted = facts.versions.get(name), facts.pins.get(name)
    if wanted is None:
        return False
    if has is None:
        return KERNELS[name] not in facts.modules
    exact = wanted.removeprefix("==")
    return older(has, exact) if exact != wanted else not satisfies(has, wanted)


def _kernels(facts: Facts) -> Verdict:
    wrong = [name for name in KERNELS if nvidia(facts) and missing_or_older(facts, name)]
    if not wrong:
        return None
    shown = [
        f"{name} is {facts.versions.get(name) or 'missing'} (SGLang asks for "
        f"{facts.pins[name] or 'any'})"
        for name in wrong
    ]
    fixes = " ".join(f'"{name}{facts.pins[name]}"' for name in wrong)
    return {"wrong": ", ".join(shown), "fixes": fixes}


def _deepep(facts: Facts) -> Verdict:
    """DeepEP comes as SGLang's own package, or built by hand as deep-ep."""
    wanted = facts.pins.get("sgl-deep-ep")
    if facts.arg("moe_a2a_backend", "none") != "deepep" or not wanted:
        return None
    has, own = facts.versions.get("sgl-deep-ep"), facts.versions.get("deep-ep")
    if has is not None and own is None:
        return None if satisfies(has, wanted) else {"has": f"sgl-deep-ep {has}", "wanted": wanted}
    return {"has": f"a build of its own ({own})", "wanted": wanted} if own else None


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
    if not version or older(version, first) or not older(version, without):
        return None
    return {"version": version} if facts.arg("flashinfer_allreduce_fusion_backend") else None


RULES: tuple[Rule, ...] = (
    Rule(
        id="cuda-of-kernels",
        title="PyTorch and the kernel wheels are built for one CUDA",
        severity=FAIL,
        reads=("pins", "torch_cuda", "device"),
        condition=lambda facts: _cuda_of_kernels(facts) if nvidia(facts) else None,
        message="torch is built for CUDA {has}, SGLang's kernel wheels for CUDA {wanted}",
        cure="install torch for CUDA {wanted} (its wheels end with +cu{wanted}x)",
        symptom="`import deep_gemm` or `import sgl_kernel` cannot load a CUDA library.",
        cause="The wheels link against the libraries of one CUDA major version.",
        source=("sgl-project/sglang#25069",),
        at_start=False,
    ),
    Rule(
        id="kernel-packages",
        title="the kernel packages are those that SGLang asks for",
        severity=FAIL,
        reads=("versions", "pins", "modules", "device"),
        condition=_kernels,
        message="{wrong}",
        cure="pip install --no-deps {fixes}",
        symptom="A missing operator, a wrong argument count, or a crash in the first request.",
        cause="SGLang calls these packages by signatures that change from release to release.",
        source=("SGLang's package metadata",),
    ),
    Rule(
        id="deepep-version",
        title="DeepEP is the one that SGLang asks for",
        severity=WARN,
        reads=("versions", "pins", "args"),
        condition=_deepep,
        message="DeepEP is {has}; SGLang asks for sgl-deep-ep{wanted}",
        cure='pip install "sgl-deep-ep{wanted}" alone, or build DeepEP at a commit that knows '
        "GLM-5's shapes",
        symptom="A crash in the first dispatch; after a rebuild, minutes of compilation.",
        cause="An older DeepEP has no kernel for the hidden size and the experts.",
        source=("sgl-project/sglang#28893",),
    ),
    Rule(
        id="same-module",
        title="no two packages bring the same kernel module",
        severity=WARN,
        reads=("versions",),
        condition=_same_module,
        message="{found}; the one installed last wins, and removing one breaks the other",
        cure="pip uninstall -y {drop} {keep} and install {keep} again, as SGLang asks for it",
        symptom="An operator is missing although the right version is installed.",
        cause="The packages were renamed; an upgrade leaves the old one in place.",
        source=("the packages' contents",),
    ),
    Rule(
        id="flashinfer-parts",
        title="FlashInfer's packages have one version",
        severity=WARN,
        reads=("versions",),
        condition=_flashinfer_parts,
        message="{found} beside flashinfer-python {base}",
        cure="pip install {fixes}",
        symptom="An older FlashInfer refuses to be imported; a newer one compiles what the other "
        "package would have brought.",
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
)
