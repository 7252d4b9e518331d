"""The account as one page: plots, tables and formulas. It needs no network and no script."""

from __future__ import annotations

from html import escape

from sglang_glm53 import __version__
from sglang_glm53.ledger import units
from sglang_glm53.ledger.account import Account
from sglang_glm53.ledger.charts import charts
from sglang_glm53.ledger.formula import Figure
from sglang_glm53.ledger.report import Table, tables
from sglang_glm53.ledger.svg import draw

STYLE = """
:root { color-scheme: light dark;
  --back: #fff; --front: #1a1d21; --muted: #5b6470; --line: #d9dee4; --card: #f6f8fa;
  --s1: #0b66c3; --s2: #c2410c; --s3: #0f766e; --s4: #7c3aed; --level: #b91c1c;
  --shade: #0004; }
@media (prefers-color-scheme: dark) { :root {
  --back: #14171b; --front: #e8ebee; --muted: #a2acb8; --line: #333b44; --card: #1c2127;
  --s1: #6cb2ff; --s2: #ff9d66; --s3: #4fd1c0; --s4: #c4a5ff; --level: #ff8080;
  --shade: #fff5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 20px 16px 60px; max-width: 1240px; background: var(--back);
  color: var(--front); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 34px 0 8px; }
p { margin: 4px 0 12px; max-width: 75ch; } .note { color: var(--muted); font-size: 13px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px;
  margin: 18px 0; }
.fact { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 12px; }
.fact b { display: block; font-size: 19px; } .fact span { color: var(--muted); font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr));
  gap: 16px; align-items: start; }
figure { margin: 0; padding: 12px; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: 6px; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--front); font-size: 12px;
  font-family: system-ui, sans-serif; paint-order: stroke; stroke: var(--card);
  stroke-width: 3px; } svg .muted { fill: var(--muted); font-size: 11.5px; }
svg .axis { fill: var(--muted); font-size: 12px; font-style: italic; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .line { fill: none; stroke-width: 2; } svg .level { stroke: var(--level); stroke-width: 1.5;
  stroke-dasharray: 5 3; }
svg rect.s1, svg .dot.s1 { fill: var(--s1); } svg .dot.s2 { fill: var(--s2); }
svg .dot.s3 { fill: var(--s3); } svg .dot.s4 { fill: var(--s4); }
svg .line.s1 { stroke: var(--s1); } svg .line.s2 { stroke: var(--s2); }
svg .line.s3 { stroke: var(--s3); } svg .line.s4 { stroke: var(--s4); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px;
  background: linear-gradient(to right, var(--back) 30%, transparent) left / 40px 100% local,
    linear-gradient(to left, var(--back) 30%, transparent) right / 40px 100% local,
    linear-gradient(to right, var(--shade), transparent) left / 14px 100% scroll,
    linear-gradient(to left, var(--shade), transparent) right / 14px 100% scroll;
  background-repeat: no-repeat; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: left; border-bottom: 1px solid var(--line);
  white-space: nowrap; } th { font-weight: 600; border-bottom: 2px solid var(--line); }
td.name { color: var(--muted); font: 12.5px ui-monospace, monospace; }
tr:last-child td { border-bottom: 0; } td.n, th.n { text-align: right; }
details { margin-top: 10px; } summary { cursor: pointer; font-weight: 600; }
code { font: 12.5px ui-monospace, monospace; overflow-wrap: anywhere; }
dl { margin: 8px 0; } dt { margin-top: 12px; font-weight: 600; } dd { margin: 2px 0 0 0; }
@media (max-width: 600px) {
  th, td { padding: 5px 8px; } td:first-child { white-space: normal; min-width: 8.5em; }
  .name { display: none; } /* they stand with the formulas */ }
.source { color: var(--muted); font-size: 12.5px; overflow-wrap: anywhere; }
"""


def page(account: Account) -> str:
    """The whole page."""
    topology, work = account.topology, account.workload
    mtp = f", MTP {work.steps}-1-{work.tokens}" if work.drafts else ""
    title = f"GLM-5.3 ledger: {topology.name}"
    plots = "".join(
        f"<figure><figcaption>{escape(chart.title)}</figcaption>{draw(chart)}</figure>"
        for chart in charts(account)
    )
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # Without it a browser asks for /favicon.ico.
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{work.batch:,} requests of {work.context:,} tokens{mtp}, {escape(topology.weights)} "
        f"weights, {escape(topology.kv)} cache, on {escape(account.hardware.title)}. "
        "GB is 10<sup>9</sup> bytes, GiB is 2<sup>30</sup>.</p>",
        f'<div class="facts">{_facts(account)}</div>',
        f'<div class="plots">{plots}</div>',
        *(_table(table) for table in tables(account)),
        _formulas(list(account.figures())),
        f'<p class="note">glm53 ledger, sglang-glm53 {__version__}</p>',
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _facts(account: Account) -> str:
    step = account.step
    facts = (
        (units.count(account.parameters["parameters_total"]), "parameters"),
        (units.count(account.parameters["parameters_active"]), "of them for a token"),
        (units.bytes_(account.kv["kv_bytes_per_token"]), "of cache a token"),
        (units.size(account.stored["stored_bytes"], 1), "of weights on a rank"),
        (units.milliseconds(step.bound.bound_ms), f"bound of a step, by {step.bound.limit}"),
        (f"{step.collective_count:,}", "collectives in a step"),
        (f"{account.capacity['pool_tokens']:,}", "tokens that a rank's cache holds"),
    )
    return "".join(
        f'<div class="fact"><b>{escape(value)}</b><span>{escape(text)}</span></div>'
        for value, text in facts
    )


def _table(table: Table) -> str:
    numeric = [
        all(not row[column] or row[column][0].isdigit() or row[column] == "-" for row in table.rows)
        and column > 0
        for column in range(len(table.head))
    ]

    kinds = [
        " class=n" if right else " class=name" if head == "name" else ""
        for right, head in zip(numeric, table.head, strict=True)
    ]

    def row(cells: tuple[str, ...], tag: str) -> str:
        pairs = zip(cells, kinds, strict=True)
        return (
            "<tr>"
            + "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in pairs)
            + "</tr>"
        )

    head = row(table.head, "th") if any(table.head) else ""
    body = "".join(row(cells, "td") for cells in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f"<h2>{escape(table.title)}</h2>"
        f'<div class="scroll" tabindex="0"><table>{head}{body}</table></div>{note}'
    )


def _formulas(figures: list[Figure]) -> str:
    entries = "".join(
        f"<dt>{escape(each.title)}: {escape(units.figure(each))}</dt>"
        f"<dd><code>{escape(each.name)} = {escape(each.formula)}</code></dd>"
        + (f"<dd><code>= {escape(each.numbers)}</code></dd>" if each.inputs else "")
        + (f'<dd class="source">{escape(each.source)}</dd>' if each.source else "")
        for each in figures
    )
    summary = f"<summary>{len(figures)} figures</summary>"
    return f"<h2>Formulas</h2><details>{summary}<dl>{entries}</dl></details>"
