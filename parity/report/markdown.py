"""A summary in GitHub's Markdown, for a job summary or a comment on a pull request.

A comment holds 65,536 characters; so differences are few, and long sentences are cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from parity.compare import Verdict
from parity.report.acceptance import Acceptance, acceptances
from parity.report.facts import Case, cases_of, count, grouped, unmet, verdict_sentence
from parity.report.groups import Group, groups
from parity.report.text import one_line, visible

MAX_DIFFERENCES = 20
MAX_SENTENCE = 1200
"""Characters of a sentence; the page has all of them."""

MAX_SENTENCES = 2
"""Sentences of one case."""

_MEANING = str.maketrans({c: f"\\{c}" for c in "\\`*_[]<>|~&@#"})
_LIST = re.compile(r"(\d*)([-+=.)])")


def render(run: Mapping[str, Any]) -> str:
    """A document as Markdown."""
    cases = cases_of(run)
    parts = ["## Parity", f"**{_plain(verdict_sentence(run))}**", _plain(run["summary"])]
    if cases:
        parts.append(_table(cases))
    parts += _differences([c for c in cases if c["verdict"] == Verdict.DIFFERENT])
    open_cases = [c["id"] for c in cases if c["verdict"] == Verdict.INCONCLUSIVE]
    if open_cases:
        shown = ", ".join(map(code, open_cases[:MAX_DIFFERENCES]))
        parts += ["### Inconclusive", _of(shown, len(open_cases))]
    if drafted := acceptances(cases):
        parts += ["### Acceptance", _acceptance(drafted)]
    if found := groups(cases):
        parts += ["### Groups", _groups(found)]
    missing = unmet(run)
    if missing:
        lines = [f"- {code(name)}: {_plain(text)}" for name, text in missing.items()]
        parts += ["### Claims not met", "\n".join(lines)]
    if run["not_checked"]:
        parts += ["### Not checked", "\n".join(f"- {_plain(one)}" for one in run["not_checked"])]
    made_with = ", ".join(f"{name} {value}" for name, value in run["environment"].items())
    return "\n\n".join([*parts, _plain(made_with)]) + "\n"


def code(text: str, *, in_table: bool = False) -> str:
    """`text` on one line as a code span, whatever it holds."""
    text = one_line(text)
    if in_table:  # a table is cut at its bars before anything else is read
        text = text.replace("|", "\\|")
    fence = "`" * (_longest_run(text) + 1)
    # One space on each side is taken off again, unless there is nothing else.
    pad = " " if text.strip(" ") and (text[0] in " `" or text[-1] in " `") else ""
    return f"{fence}{pad}{text or ' '}{pad}{fence}"


def block(text: str, language: str = "") -> str:
    """`text` as a fenced block, whatever it holds."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _plain(text: str) -> str:
    """`text` on one line as running text in which nothing means anything."""
    text = one_line(text).strip().translate(_MEANING)
    # What begins a line may begin a list or underline a heading.
    return _LIST.sub(r"\1\\\2", text, count=1) if _LIST.match(text) else text


def _table(cases: list[Case]) -> str:
    lines = [
        "| model | drafter | depth | cases | equal | tied | differ | open | checked |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (model, drafter, depth), group in grouped(cases, "model", "drafter", "depth").items():
        n = count(group)
        cells = [
            *(code(name, in_table=True) for name in (model, drafter)),
            *map(str, (depth, n.cases, n.equal, n.tied, n.different, n.inconclusive)),
            f"{n.checked}/{n.total}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _acceptance(found: list[Acceptance]) -> str:
    """Accepted of drafted; a column for each position in a draft that anything drafted to."""
    longest = max(len(one.drafted) for one in found)
    places = [str(place) for place in range(1, longest + 1)]
    lines = [
        f"| model | drafter | depth | rounds | {' | '.join(places)} |",
        f"| --- | --- | ---: | ---: | {' | '.join(['---:'] * longest)} |",
    ]
    for one in found:
        shares = [f"{a}/{d}" for a, d in zip(one.accepted, one.drafted, strict=True)]
        cells = [
            *(code(name, in_table=True) for name in (one.model, one.drafter)),
            *map(str, (one.depth, one.rounds)),
            *shares,
            *[""] * (longest - len(shares)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _groups(found: list[Group]) -> str:
    """Ragged rounds had rows that accepted different counts; joined and left is while decoding."""
    lines = [
        "| model | drafter | depth | sampling | rows | equal | rounds | ragged | joined | left |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        cells = [
            *(code(name, in_table=True) for name in (one.model, one.drafter)),
            str(one.depth),
            code(one.sampling, in_table=True),
            *(str(one.rows), f"{one.equal}/{one.cases}"),
            *map(str, (one.rounds, one.ragged, one.joined, one.left)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _differences(cases: list[Case]) -> list[str]:
    if not cases:
        return []
    parts = ["### Different"]
    for case in cases[:MAX_DIFFERENCES]:
        said = [_cut(one_line(sentence)) for sentence in case["sentences"][:MAX_SENTENCES]]
        more = len(case["sentences"]) - len(said)
        if more > 0:
            said.append(f"and {more} more sentences")
        parts += [code(case["id"]), block("\n".join(said), "text")]
        parts.append(block(visible(case["reproduce"]), "sh"))
    left = len(cases) - MAX_DIFFERENCES
    if left > 0:
        parts.append(f"and {left} more")
    return parts


def _cut(sentence: str) -> str:
    return sentence if len(sentence) <= MAX_SENTENCE else f"{sentence[:MAX_SENTENCE]} …"


def _of(shown: str, number: int) -> str:
    left = number - MAX_DIFFERENCES
    return f"{shown} and {left} more" if left > 0 else shown
