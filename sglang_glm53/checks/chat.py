"""Rules on the chat template, the parsers and what GLM-5.3 cannot be asked for."""

from __future__ import annotations

from sglang_glm53.checks.facts import Facts
from sglang_glm53.checks.rule import FAIL, WARN, Rule, Verdict

TOOLS, REASONING = "glm47", "glm45"
EFFORTS = ("low", "high", "max")
# What SGLang knows GLM-5.3's template by; with all of these, and without the switch of GLM-5.2.
SIGNATURE = ("[gMASK]<sop>", "Reasoning Effort:", "<tool_call>", "<arg_key>", "<arg_value>")
SWITCH = "enable_thinking"


def _is_glm53(template: str) -> bool:
    return SWITCH not in template and all(part in template for part in SIGNATURE)


def _edited_template(facts: Facts) -> Verdict:
    if (
        facts.environment.get("GLM53_PARSERS") != "stock"
        and facts.arg("reasoning_parser") != "auto"
    ):
        return None  # our parsers ask the rendered prompt (chat/serving.py)
    template = facts.chat_template
    if SIGNATURE[0] not in template or SWITCH in template or _is_glm53(template):
        return None
    return {"missing": next(part for part in SIGNATURE if part not in template)}


def _no_template(facts: Facts) -> Verdict:
    return facts.chat_template is None and not facts.arg("chat_template")


def _tool_parser(facts: Facts) -> Verdict:
    name = facts.arg("tool_call_parser")
    if name in (TOOLS, "auto", "response_template"):
        return None
    return {"is": f"is {name}" if name else "is not given"}


def _reasoning_parser(facts: Facts) -> Verdict:
    name = facts.arg("reasoning_parser")
    if name in (REASONING, "auto", "response_template", TOOLS):
        return None
    return {"is": f"is {name}" if name else "is not given"}


def _defaults(facts: Facts) -> dict:
    value = facts.arg("default_chat_template_kwargs")
    return value if isinstance(value, dict) else {}


def _thinking_off(facts: Facts) -> Verdict:
    if not _is_glm53(facts.chat_template):
        return None
    asked = _defaults(facts)
    for name in (SWITCH, "thinking"):
        if asked.get(name) is False:
            return {"what": f'"{name}": false'}
    effort = asked.get("reasoning_effort")
    if effort is not None and str(effort).lower() not in EFFORTS:
        return {"what": f'"reasoning_effort": "{effort}"'}
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        id="chat-template-missing",
        title="there is a chat template",
        severity=WARN,
        reads=("checkpoint", "raw_config"),
        condition=_no_template,
        message="the checkpoint has no chat template",
        cure="copy chat_template.jinja from the model's own repository, or give --chat-template",
        symptom="Chat requests are refused, or rendered by a template of another model.",
        cause="An incomplete download or conversion.",
        source=("sgl-project/sglang#22922",),
        at_start=False,
    ),
    Rule(
        id="chat-template-unknown",
        title="SGLang knows the chat template as GLM-5.3's",
        severity=WARN,
        reads=("args", "chat_template", "environment"),
        condition=_edited_template,
        message="SGLang does not know the chat template as GLM-5.3's: {missing!r} is missing",
        cure=f"put it back, or give --reasoning-parser {REASONING} and unset GLM53_PARSERS",
        symptom="Raw reasoning and a literal </think> in the answer.",
        cause="GLM-5.3 always thinks and its prompt opens <think>; SGLang tells by the template's "
        "text whether to expect that, and what `auto` stands for. Our parsers ask the prompt.",
        source=(
            "sgl-project/sglang#39227",
            "vllm-project/vllm#54744",
            "sgl-project/sglang#37645",
            "tried on SGLang",
        ),
    ),
    Rule(
        id="tool-call-parser",
        title="tool calls are parsed",
        severity=WARN,
        reads=("args",),
        condition=_tool_parser,
        message="--tool-call-parser {is}: tool calls of GLM-5.3 stay XML in the answer's text",
        cure=f"give --tool-call-parser {TOOLS}",
        symptom="<tool_call> in content, tool_calls empty.",
        cause="GLM-5's format has no line ends between key and value; the parser of GLM-4.5 "
        "expects them.",
        source=("sgl-project/sglang#19910", "sgl-project/sglang#19925"),
    ),
    Rule(
        id="reasoning-parser",
        title="reasoning is parsed",
        severity=WARN,
        reads=("args",),
        condition=_reasoning_parser,
        message="--reasoning-parser {is}: GLM-5.3 always thinks, and its thoughts stay in the "
        "answer's text",
        cure=f"give --reasoning-parser {REASONING}",
        symptom="The answer begins with the model's thoughts, then </think>.",
        cause="SGLang separates them only where it is asked to.",
        source=("sgl-project/sglang#39227", "SGLang's GLM-5.3 cookbook"),
    ),
    Rule(
        id="reasoning-parser-name",
        title="the reasoning parser exists",
        severity=FAIL,
        reads=("args",),
        condition=lambda facts: facts.arg("reasoning_parser") == TOOLS,
        message=f"--reasoning-parser {TOOLS}: that is the name of a tool parser",
        cure=f"give --reasoning-parser {REASONING} --tool-call-parser {TOOLS}",
        symptom="An error of the argument parser, or in the first request.",
        cause="The two families of parsers have other names for one model.",
        source=("sgl-project/sglang#26384",),
        at_start=False,
    ),
    Rule(
        id="thinking-cannot-be-switched-off",
        title="nothing is asked of the template that GLM-5.3 cannot do",
        severity=WARN,
        reads=("args", "chat_template"),
        condition=_thinking_off,
        message="{what} in --default-chat-template-kwargs: GLM-5.3 always thinks, with effort low, "
        "high or max; no thinking is answered with low, and anything else with max",
        cure='use \'{{"reasoning_effort": "low"}}\'',
        symptom="Long reasoning although it was switched off, or reasoning in the answer's text.",
        cause="enable_thinking was GLM-5.2's switch; GLM-5.3's template does not read it.",
        source=(
            "sgl-project/sglang#28454",
            "sgl-project/sglang#39227",
            "smg-project/smg#2538",
        ),
    ),
)
