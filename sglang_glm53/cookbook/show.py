"""A recipe in words: for the terminal and for docs/recipes.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sglang_glm53.cookbook import expect, resolved
from sglang_glm53.cookbook.command import (
    Command,
    choose,
    router_command,
    server_commands,
)
from sglang_glm53.cookbook.expect import Expected
from sglang_glm53.cookbook.recipe import MINIATURE, Part, Recipe, Server, Verified
from sglang_glm53.cookbook.resolved import Resolved
from sglang_glm53.features import RUNS, STANDS_DOWN

GIB = 2**30
LEAST_SUMMARY = 30  # characters of a summary that still say something
NOT_RUN = "not run here; see the sources"
UNKNOWN = "glm53 recipe check says"  # of a recipe of the user's own


def commands(
    recipe: Recipe,
    version: str,
    *,
    model: str | None = None,
    addresses: Mapping[str, str] | None = None,
) -> list[Command]:
    """Every command of the deployment, in the order in which they are started."""
    found = server_commands(recipe, version, model=model, addresses=addresses or {})
    router = router_command(recipe, addresses=addresses or {})
    return [*found, router] if router else found


def script_of(
    recipe: Recipe, version: str, role: str | None, node: int | None, **chosen: object
) -> str:
    """The same for one machine alone, as a shell takes it there; see `choose`."""
    found = commands(recipe, version, **chosen)  # type: ignore[arg-type]
    command = choose(recipe, found, role, node)
    return script(recipe, version, **chosen) if len(found) == 1 else command.shell()


def script(recipe: Recipe, version: str, **chosen: object) -> str:
    """The commands, each under a comment that says where it runs."""
    blocks = []
    if recipe.model == MINIATURE and not chosen.get("model"):
        blocks.append("# the checkpoint, once\nglm53 tiny miniature")
    several = len(found := commands(recipe, version, **chosen)) > 1  # type: ignore[arg-type]
    for command in found:
        title = f"# {command.title}\n" if several or blocks else ""
        blocks.append(title + command.shell())
    return "\n\n".join(blocks)


def hardware(recipe: Recipe) -> str:
    """ "8 x h200", "2 machines of 8 x h200", "prefill 8 x h200, decode 8 x h200"."""
    parts = []
    for server in recipe.servers:
        where = server.hardware
        text = f"{where.gpus} x {where.gpu}" if where.gpus else "no GPU"
        if where.nodes > 1:
            text = f"{where.nodes} machines of {text}"
        parts.append(f"{server.role} {text}" if len(recipe.servers) > 1 else text)
    return ", ".join(parts)


def classes(recipe: Recipe, version: str) -> str:
    """Which class serves, without reasons; of several servers once where it is the same."""
    told = [resolved.find(recipe, server.role, version) for server in recipe.servers]
    return ", ".join(dict.fromkeys(each.serves if each else "?" for each in told))


def table(recipes: Sequence[Recipe], version: str, width: int | None) -> list[str]:
    """One line a recipe, under a head, of at most `width` characters.

    What a recipe is for is left out where there is no room for it.
    """
    rows = [("NAME", "HARDWARE", "SERVES", "RUN HERE", "FOR")]
    for each in recipes:
        here = "yes" if each.verified else "no; a part" if each.parts else "no"
        rows.append((each.name, _short(each), classes(each, version), here, each.summary))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = []
    for *cells, summary in rows:
        line = "  ".join(f"{cell:<{size}}" for cell, size in zip(cells, widths, strict=True))
        room = len(summary) if width is None else width - len(line) - 2
        if room >= LEAST_SUMMARY or width is None:
            line += "  " + (summary if len(summary) <= room else summary[: room - 1] + "…")
        lines.append(line.rstrip()[:width])
    return lines


def _short(recipe: Recipe) -> str:
    """ "8 x h200", "2 x 8 x h200" for two machines, "4 + 8 x b200" for prefill and decode."""
    counts = " + ".join(
        (f"{server.hardware.nodes} x " if server.hardware.nodes > 1 else "")
        + str(server.hardware.gpus)
        for server in recipe.servers
    )
    gpus = dict.fromkeys(server.hardware.gpu for server in recipe.servers)
    return "no GPU" if set(gpus) == {"cpu"} else f"{counts} x {', '.join(gpus)}"


def serves(recipe: Recipe, server: Server, version: str) -> str:
    """Which class serves with that version of SGLang: what stands down, or what ours runs there."""
    told = resolved.find(recipe, server.role, version)
    return UNKNOWN if told is None else serves_as(told)


def serves_as(told: Resolved) -> str:
    """The same of a resolution."""
    rows = told.features(STANDS_DOWN) or told.features(RUNS)
    reasons = "; ".join(f"{row.name} ({row.reason})" for row in rows)
    return f"{told.serves}: {reasons}" if reasons else told.serves


def also_stands_down(recipe: Recipe, server: Server, version: str, other: str) -> str:
    """What stands down with the version `other` of SGLang besides what does with `version`."""
    told, there = (resolved.find(recipe, server.role, v) for v in (version, other))
    if told is None or there is None:
        return ""
    known = told.rows.get(STANDS_DOWN, ())
    return "; ".join(
        f"{row.name} ({row.reason})" for row in there.features(STANDS_DOWN) if row.name not in known
    )


def memory(recipe: Recipe, server: Server, version: str) -> Expected | str:
    """What the ledger says of the server, or why nothing."""
    told = resolved.find(recipe, server.role, version)
    if told is None:
        return UNKNOWN
    return expect.expected(recipe, server, told.args)


def memory_lines(found: Expected | str) -> list[str]:
    """The same in words."""
    if isinstance(found, str):
        return [found]
    group = "" if found.groups == 1 else f" in each of {found.groups} attention groups"
    fits = ", ".join(
        f"{count} of {context:,} tokens" for context, count in found.fits.items() if count
    )
    return [
        f"weights {found.weights_bytes / GIB:.1f} GiB a GPU, {found.cache_bytes / GIB:.1f} GiB "
        f"for the cache at --mem-fraction-static {found.fraction:g}",
        f"{found.token_bytes:,} bytes a token: {found.tokens:,} tokens{group}",
        f"requests at the same time: {fits}" if fits else "not even one request of 9,216 tokens",
        f"({ledger_command(found)})" if found.exact else
        "(by the ledger's formulas; glm53 ledger itself has no context parallelism)",
    ]  # fmt: skip


def ledger_command(found: Expected) -> str:
    """The command that gives the figures of a server: tokens, and requests of 9,216 tokens."""
    words = ["glm53 ledger", found.topology, f"--hardware {found.gpu}"]
    words += [f"--mem-fraction {found.fraction:g}", f"--context {expect.CONTEXTS[0]}"]
    return " ".join([*words, f"--mtp {found.mtp}"] if found.mtp else words)


def verified(recipe: Recipe) -> list[str]:
    """Runs of the deployment."""
    return _runs(recipe.verified) or [NOT_RUN]


def parts(recipe: Recipe) -> list[str]:
    """Runs of a part of it."""
    return _runs(recipe.parts)


def run_here(recipe: Recipe) -> str:
    """Whether the deployment was run here: "yes", or "no" and which part of it was."""
    if recipe.verified:
        return "yes"
    return "; ".join(["no", *(f"measured was {run.part}" for run in recipe.parts)])


def _runs(runs: Iterable[Verified | Part]) -> list[str]:
    return [
        f"{run.date}, SGLang {run.sglang}, {run.hardware}: `{run.command}`: {run.result}"
        for run in runs
    ]


def text(recipe: Recipe, version: str, **chosen: object) -> str:
    """Everything that there is to say of a recipe, for a terminal."""
    lines = [f"{recipe.name}: {recipe.summary}", f"{recipe.model}, {hardware(recipe)}", ""]
    lines += [script(recipe, version, **chosen), ""]
    for server in recipe.servers:
        suffix = f" ({server.role})" if len(recipe.servers) > 1 else ""
        lines += _block(f"serves{suffix}", [serves(recipe, server, version)])
        lines += _block(f"memory{suffix}", memory_lines(memory(recipe, server, version)))
    used = dict.fromkeys(flags(recipe))
    lines += _block("why", [f"{flag}: {recipe.why[flag]}" for flag in used])
    for name, added in recipe.options.items():
        words = " ".join(f"--{flag} {value}" for flag, value in added.items())
        lines += _block(f"option {name}", [words.replace(" True", "")])
    lines += _block("lives with", [f"{rule}: {why}" for rule, why in recipe.accepts.items()])
    lines += _block("needs", [f"{package}: {why}" for package, why in recipe.needs.items()])
    lines += _block("note", recipe.notes)
    lines += _block("published", [f"{row.figure} [{row.source}]" for row in recipe.published])
    lines += _block("source", recipe.sources)
    lines += _block("not as there", recipe.differs)
    lines += _block("verified", verified(recipe))
    lines += _block("a part of it", parts(recipe))
    return "\n".join(lines)


def flags(recipe: Recipe) -> Iterable[str]:
    """Flags and variables that have a reason, in their order."""
    for server in recipe.servers:
        yield from (flag for flag in (*server.arguments, *server.environment) if flag != "port")
    yield from (flag for flag in recipe.router if flag != "port")


def _block(title: str, entries: Iterable[str]) -> list[str]:
    """Entries under a title, wrapped."""
    import textwrap

    lines: list[str] = []
    for entry in entries:
        head = f"{title:<17} " if not lines else " " * 18
        wrapped = textwrap.wrap(entry, 80, break_on_hyphens=False, break_long_words=False) or [""]
        lines.append(head + wrapped[0])
        lines += [" " * 18 + line for line in wrapped[1:]]
    return lines
