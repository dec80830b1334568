"""The Markdown summary: read by a Markdown parser, whatever is said in it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from parity.cases import DRAFTERS, READERS
from parity.compare import Verdict
from parity.report import page
from parity.report.markdown import MAX_DIFFERENCES, block, code, render
from parity.report.text import one_line, visible
from parity.runner import Claim
from parity.trace import Round
from tests.parity.fakes import case
from tests.parity.runs import NAMES, TEXTS, broken, equal, parted, run_of, run_saying, tied

MARKDOWN = MarkdownIt("commonmark").enable("table").enable("strikethrough")
COMMENT_LIMIT = 65_536


def parsed(run: dict[str, Any]) -> list[Token]:
    """The tokens of a summary, inline ones in their place."""
    return flat(render(run))


def flat(text: str) -> list[Token]:
    """The tokens of some Markdown, inline ones in their place."""
    return [
        inner
        for token in MARKDOWN.parse(text)
        for inner in (token.children or [] if token.type == "inline" else [token])
    ]


@given(TEXTS, NAMES)
def test_no_text_changes_how_the_summary_is_built(text: str, kind: str) -> None:
    """Escaping: backticks, bars, newlines, HTML, lists and headings stay text."""
    hostile, plain = (
        # Where a text is empty, so is its paragraph.
        [token.type for token in parsed(run) if token.type != "text"]
        for run in (run_saying(text, kind), run_saying("a" * len(text), "k"))
    )
    assert hostile == plain


@given(TEXTS)
def test_a_code_span_says_what_it_was_given(text: str) -> None:
    """Escaping loses nothing, in a paragraph or in a table."""
    spans = flat(f"x {code(text)}") + flat(f"| h |\n| --- |\n| {code(text, in_table=True)} |")
    said = [token.content for token in spans if token.type == "code_inline"]
    assert said == [one_line(text) or " "] * 2


@given(TEXTS)
def test_a_block_ends_where_it_should(text: str) -> None:
    """A line of backticks in a text does not close the block around it."""
    (fence,) = flat(block(visible(text)))
    assert (fence.type, fence.content) == ("fence", visible(text) + "\n")


@given(st.sampled_from(("x", "- ", "+ ", "1. ", "12) ", "---", "===", "# ", "> ")), TEXTS)
def test_what_is_not_checked_is_said_as_it_is(start: str, text: str) -> None:
    """Running text means nothing to Markdown, and at the beginning of a line neither."""
    tokens = parsed(run_of(equal(case()), not_checked=[start + text]))
    assert [token.type for token in tokens].count("list_item_open") == 1
    said = [token.content for token in tokens if token.type == "text"]
    assert one_line(start + text).strip() in said


def test_the_table_has_a_row_per_drafter_and_depth() -> None:
    """Counts by drafter and depth."""
    run = run_of(equal(case()), parted(case("b")), tied(case(depth=8), Verdict.INCONCLUSIVE))
    rows = [line for line in render(run).splitlines() if line.startswith("|")]
    assert rows[2:4] == [
        "| `dense` | `ngram` | 3 | 2 | 1 | 0 | 1 | 0 | 8/13 |",
        "| `dense` | `ngram` | 8 | 1 | 0 | 0 | 0 | 1 | 4/9 |",
    ]


def test_acceptance_is_by_position_for_every_drafter() -> None:
    """As in the JSON, and as the plots of the page say it."""
    deeper = equal(case("b", drafter="ngram"))
    assert deeper.actual is not None
    object.__setattr__(deeper.actual, "rounds", (Round((97,) * 4, 4, (97,) * 5),))
    drafters = [drafter for drafter in (*DRAFTERS, *READERS) if drafter != "off"]
    run = run_of(*(equal(case(drafter=drafter)) for drafter in drafters), deeper)
    said = render(run)
    section = said[said.index("### Acceptance") :].splitlines()
    assert section[2:4] == [
        "| model | drafter | depth | rounds | 1 | 2 | 3 | 4 |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for drafter in drafters:
        counts = "3 | 3/3 | 2/3 | 1/2 | 1/1" if drafter == "ngram" else "2 | 2/2 | 1/2 | 0/1 | "
        assert f"| `dense` | `{drafter}` | 3 | {counts} |" in section
    assert {one["drafter"] for one in run["acceptance"]} == set(drafters)
    assert page.render(run).count("<svg") == len(drafters)
    assert "### Acceptance" not in render(run_of(broken(case())))


def test_the_first_differences_come_with_sentence_and_command() -> None:
    """At most 20; the others are counted."""
    run = run_of(*(parted(case(f"k{n}")) for n in range(MAX_DIFFERENCES + 3)))
    fences = [token for token in parsed(run) if token.type == "fence"]
    assert [token.info for token in fences] == ["text", "sh"] * MAX_DIFFERENCES
    first = next(iter(run["cases"].values()))
    assert [fences[0].content, fences[1].content] == [
        first["sentences"][0] + "\n",
        first["reproduce"] + "\n",
    ]
    assert "and 3 more" in render(run)


def test_a_claim_that_is_not_met_is_said() -> None:
    """A run may fail without a case that does."""
    said = render(run_of(equal(case()), claims=(Claim("claims/x", False, "x happens"),)))
    assert "- `claims/x`: x happens" in said
    assert "No case differs from the reference, but 1 claim is not met." in said


def test_a_summary_fits_into_a_comment() -> None:
    """GitHub refuses a longer one whole."""
    long = "ab" * 5_000
    run = run_of(*(parted(case(f"k{n}"), token=0) for n in range(100)))
    for said in run["cases"].values():
        said["sentences"] = [long] * 5
    assert len(render(run)) < COMMENT_LIMIT
