"""Rules on how SGLang loads this package, and on what else it loads."""

from __future__ import annotations

from difflib import get_close_matches

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.packages import ARCHITECTURE, GROUPS
from sglang_glm53.checks.reading import architectures
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict
from sglang_glm53.errors import Glm53Error
from sglang_glm53.tripwire import NAME, left_out
from sglang_glm53.watch import options as watch

LIST, PLATFORM, EXTERNAL = "SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_EXTERNAL_MODEL_PACKAGE"

# Every variable of ours, and the values that mean something; None: any.
OUR_VARIABLES: dict[str, tuple[str, ...] | None] = {
    "GLM53_STRICT": ("0", "1"),
    "GLM53_SERVE": ("ours", "stock"),
    "GLM53_ON_ERROR": ("stock",),
    "GLM53_ATTENTION": ("torch",),
    "GLM53_POOL": ("page", "layer"),
    "GLM53_DECODE": ("fused", "unfused"),
    "GLM53_PARSERS": ("ours", "stock"),
    "GLM53_SELFTEST": ("0", "1"),
    "GLM53_WATCH": None,
    "GLM53_DOCTOR": ("warn", "off"),
    "GLM53_DEBUG": ("0", "1"),
    "GLM53_PYTHON": None,
    "GLM53_LOAD_GROUPS": None,
    "GLM53_TRACE_DIR": None,
}


def _names(facts: Facts) -> list[str]:
    return [name for part in facts.environment.get(LIST, "").split(",") if (name := part.strip())]


def _left_out(facts: Facts) -> Verdict:
    if not left_out(facts.environment):
        return None
    set_ = [
        f"{name}={value}" for name in (LIST, PLATFORM) if (value := facts.environment.get(name))
    ]
    return {"set": " and ".join(set_)}


def _unknown_plugin(facts: Facts) -> Verdict:
    installed = {point.name for point in facts.entry_points}
    unknown = [name for name in _names(facts) if name not in installed]
    if not unknown:
        return None
    near = get_close_matches(unknown[0], installed, 1)
    return {
        "names": ", ".join(unknown),
        "installed": ", ".join(sorted(installed)) or "none",
        "near": f"; {near[0]} is meant?" if near else "",
    }


def _switched_off(facts: Facts) -> Verdict:
    names = _names(facts)
    others = {point.name: point.distribution for point in facts.entry_points}
    off = [f"{name} ({owner})" for name, owner in others.items() if name not in (*names, NAME)]
    return {"off": ", ".join(off), "all": ",".join(others)} if names and off else None


def _not_installed(facts: Facts) -> Verdict:
    missing = [
        group
        for group in GROUPS
        if not any(point.group == group and point.name == NAME for point in facts.entry_points)
    ]
    return {"groups": " and ".join(missing)} if missing else None


def _broken(facts: Facts) -> Verdict:
    broken = [point for point in facts.entry_points if point.problem]
    if not broken:
        return None
    shown = [f"{p.name} ({p.distribution}): {p.problem}" for p in broken]
    return {"shown": ", ".join(shown), "owner": broken[0].distribution}


def _variables(facts: Facts) -> Verdict:
    for name, value in sorted(facts.environment.items()):
        if not name.startswith("GLM53_"):
            continue
        if name not in OUR_VARIABLES:
            near = get_close_matches(name, OUR_VARIABLES, 1)
            cure = f"{near[0]} is meant?" if near else f"known: {', '.join(OUR_VARIABLES)}"
            return {"what": f"{name} is no variable of sglang-glm53", "do": cure}
        if name == watch.VARIABLE:
            try:
                watch.parse(value)
            except Glm53Error as error:
                what, _, cure = str(error).partition("; ")
                return {"what": what, "do": cure or "correct or unset it"}
        values = OUR_VARIABLES[name]
        if values is not None and value not in ("", *values):
            return {
                "what": f"{name} is {value!r}",
                "do": f"it can be {' or '.join(values)}; unset it otherwise",
            }
    return None


def _sglang_variables(facts: Facts) -> Verdict:
    """Near misses alone: SGLang reads some variables without declaring them."""
    for name in sorted(facts.environment):
        if name.startswith("SGLANG_") and name not in facts.variables:
            near = get_close_matches(name, facts.variables, 1, cutoff=0.9)
            if near:
                return {"name": name, "near": near[0]}
    return None


def _other_architecture(facts: Facts) -> Verdict:
    names = architectures(facts)
    return None if ARCHITECTURE in names else {"names": ", ".join(names) or "not named"}


RULES: tuple[Rule, ...] = (
    Rule(
        id="plugin-left-out",
        title="SGLang may load this package",
        severity=FAIL,
        reads=("environment",),
        condition=_left_out,
        message="{set} keeps SGLang from loading sglang-glm53",
        cure=f"add {NAME} to {LIST}, and unset {PLATFORM}",
        symptom="Stock SGLang: its own class serves without a word. With this package installed, "
        "the server ends with one line.",
        cause=f"{LIST} is an allow-list of entry point names, for both of SGLang's groups; "
        f"{PLATFORM} leaves out every other platform plugin.",
        source=("SGLang's plugin loader", "sgl-project/sglang#38464"),
        at_start=False,
    ),
    Rule(
        id="plugin-unknown",
        title=f"{LIST} names plugins that are installed",
        severity=WARN,
        reads=("environment", "entry_points"),
        condition=_unknown_plugin,
        message=f"{LIST} names {{names}}, which no installed package has{{near}}",
        cure="correct it; installed: {installed}",
        symptom="The plugin does nothing; only INFO lines of the log show an empty set.",
        cause="SGLang takes names that nobody has for an empty selection.",
        source=("SGLang's plugin loader, tried",),
    ),
    Rule(
        id="plugin-switched-off",
        title=f"{LIST} switches no other plugin off",
        severity=WARN,
        reads=("environment", "entry_points"),
        condition=_switched_off,
        message=f"{LIST} switches off {{off}}",
        cure=f"unset {LIST}, or name them too: {LIST}={{all}}",
        symptom="A front end that needs one of them (gRPC, ZMQ) does not start.",
        cause="An installed SGLang brings plugins of its own, and the list allows only who is "
        "named.",
        source=("SGLang's plugin loader, tried",),
    ),
    Rule(
        id="plugin-not-installed",
        title="this package's entry points are installed",
        severity=FAIL,
        reads=("entry_points",),
        condition=_not_installed,
        message="the entry point glm53 is missing from {groups}",
        cure="pip install sglang-glm53 into the server's own environment (a folder on PYTHONPATH "
        "has no entry points)",
        symptom="SGLang's own class serves.",
        cause="SGLang finds plugins by the metadata of installed packages.",
        source=("SGLang's plugin loader",),
        at_start=False,
    ),
    Rule(
        id="plugin-broken",
        title="every plugin's module is there",
        severity=WARN,
        reads=("entry_points",),
        condition=_broken,
        message="a plugin will not load: {shown}",
        cure="reinstall or uninstall {owner}",
        symptom="The server starts without the plugin; its exception stands in the log alone.",
        cause="SGLang logs whatever a plugin raises and goes on.",
        source=("SGLang's plugin loader, tried",),
    ),
    Rule(
        id="plugin-contested",
        title="no other plugin changes what this package changes",
        severity=WARN,
        reads=("contested",),
        condition=lambda facts: {"lines": "; ".join(facts.contested)} if facts.contested else None,
        message="another plugin changes the same: {lines}",
        cure=f"leave it out ({LIST}={NAME}), or uninstall sglang-glm53",
        symptom="Which of the two serves depends on the order in which they are installed.",
        cause="The plugin that registers last wins.",
        source=("sgl-project/sglang#38464", "sgl-project/sglang#26723"),
    ),
    Rule(
        id="plugin-external-models",
        title="no external model package is named",
        severity=WARN,
        reads=("environment",),
        condition=lambda facts: (
            {"package": package} if (package := facts.environment.get(EXTERNAL)) else None
        ),
        message=f"{EXTERNAL} names {{package}}; where it has {ARCHITECTURE}, this package's class "
        "replaces it",
        cure=f"unset {EXTERNAL}, or uninstall sglang-glm53 to serve that package's class",
        symptom="Another class serves than the variable says.",
        cause="SGLang reads the variable before it loads plugins, and a plugin may replace.",
        source=("sgl-project/sglang#13429",),
    ),
    Rule(
        id="catalog-drift",
        title="SGLang has what this package changes in it",
        severity=FAIL,
        reads=("catalog_problems",),
        condition=lambda facts: (
            {"first": facts.catalog_problems[0], "count": len(facts.catalog_problems)}
            if facts.catalog_problems
            else None
        ),
        message="{count} of the symbols that are changed are not as expected: {first}",
        cure="install a supported SGLang unchanged, or another release of sglang-glm53",
        symptom="Stock SGLang: a hook on a moved function does nothing and the server starts.",
        cause="The installed SGLang was patched, or is another version than its metadata says.",
        source=("SGLang's hook registry, tried", "patches/catalog.yaml"),
        at_start=False,
    ),
    Rule(
        id="our-variables",
        title="the GLM53 variables mean something",
        severity=WARN,
        reads=("environment",),
        condition=_variables,
        message="{what}",
        cure="{do}",
        symptom="The variable does nothing.",
        cause="A misspelt name or value.",
        source=("docs/compatibility.md",),
    ),
    Rule(
        id="sglang-variables",
        title="SGLang knows its variables that are set",
        severity=WARN,
        reads=("environment", "variables"),
        condition=_sglang_variables,
        message="the installed SGLang has no {name}",
        cure="{near} is nearest; correct or unset it",
        symptom="The variable does nothing.",
        cause="A misspelt name, or one of another release.",
        source=("SGLang's environ.py",),
        at_start=False,
    ),
    Rule(
        id="other-architecture",
        title="the checkpoint is one that this package serves",
        severity=WARN,
        reads=("raw_config",),
        condition=_other_architecture,
        message=f"the checkpoint's architecture is {{names}}; this package serves {ARCHITECTURE} "
        "alone",
        cure="SGLang's own class serves it; GLM-5.3-Flash is another architecture",
        symptom="SGLang serves the checkpoint as if this package were not there.",
        cause="GLM-5.3-Flash (glm5_next) and GLM-4.x have other layers.",
        source=("radixark/miles#3240",),
        at_start=False,
    ),
)
