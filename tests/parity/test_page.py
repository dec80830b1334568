"""The page: nothing gets out of its text, nothing comes over the network, nothing is missing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.compare import Failure, Measure, Verdict
from parity.report.page import anchor, render
from parity.report.text import one_line, visible
from parity.runner import CaseResult, Claim
from parity.trace import Round
from tests.parity.fakes import case
from tests.parity.runs import (
    NAMES,
    TEXTS,
    broken,
    equal,
    other_text,
    parted,
    run_of,
    run_saying,
    tied,
)

VOID = {"meta", "link", "rect", "line", "wbr"}


@dataclass
class Element:
    """An element with its text and what is in it."""

    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    text: str = ""

    def all(self) -> list[Element]:
        """Itself and everything in it."""
        return [self, *(below for child in self.children for below in child.all())]

    def find(self, tag: str, **attributes: str) -> list[Element]:
        """What is in it with this tag and these attributes; `kind` is the class."""
        wanted = {("class" if k == "kind" else k): v for k, v in attributes.items()}
        return [
            one for one in self.all() if one.tag == tag and wanted.items() <= one.attributes.items()
        ]

    def by_id(self, name: str) -> Element:
        """The one element of this id."""
        (found,) = [one for one in self.all() if one.attributes.get("id") == name]
        return found


class Tree(HTMLParser):
    """Reads a page; a tag that closes another than the open one is an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = Element("root", {})
        self._open = [self.root]
        self.feed(page)
        self.close()
        assert self._open == [self.root], f"{self._open[-1].tag} is never closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice: {names}"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"{tag} closes {self._open[-1].tag}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data


def parsed(run: dict[str, Any]) -> Element:
    """The page of a run, read."""
    return Tree(render(run)).root


def shape(root: Element) -> list[tuple[str, list[str], str]]:
    """The elements of a page with the names of their attributes, without what they say."""
    return [(e.tag, list(e.attributes), e.attributes.get("class", "")) for e in root.all()]


EVERY_KIND = (
    equal(case("equal")),
    parted(case("parted")),
    tied(case("near")),
    tied(case("shape"), Verdict.SHAPE_TIE),
    tied(case("open"), Verdict.INCONCLUSIVE),
    broken(case("broken")),
    other_text(case("text"), "abc", "abd"),
)


@given(TEXTS, NAMES)
def test_no_text_adds_an_element_or_an_attribute(text: str, kind: str) -> None:
    """Escaping: whatever models, paths and prompts say, the page is built the same."""
    assert shape(parsed(run_saying(text, kind))) == shape(parsed(run_saying("a" * len(text), "k")))


@given(TEXTS, NAMES)
def test_every_text_stands_on_the_page_as_it_is(text: str, kind: str) -> None:
    """Escaping loses nothing: what prints is there, and the rest is written as Python writes it."""
    page = parsed(run_saying(text, kind))
    (article,) = [
        one
        for one in page.find("article")
        if anchor(f"dense/serial/ngram/d1/greedy/{kind}") == one.attributes["id"]
    ]
    said = [one.text.removeprefix("\n") for one in article.find("pre", kind="text")]
    assert said == [visible(text)] * 3  # expected, got, prompt
    assert one_line(repr(text)) in article.find("p", kind="meta")[0].text


@given(st.lists(NAMES, min_size=1, max_size=4, unique=True))
def test_every_case_is_reachable_from_the_matrix(kinds: list[str]) -> None:
    """Links: each case has one place, and the matrix leads there, whatever the prompt is called."""
    results = [*(equal(case(kind)) for kind in kinds), *(parted(case(k, depth=8)) for k in kinds)]
    run = run_of(*results)
    page = parsed(run)
    links = [a.attributes["href"] for a in page.by_id("matrix").find("a")]
    assert sorted(links) == sorted(f"#{anchor(case_id)}" for case_id in run["cases"])
    for link in links:
        page.by_id(link.removeprefix("#"))


@pytest.mark.parametrize("results", [(), EVERY_KIND])
def test_links_lead_somewhere_and_no_id_is_given_twice(results: tuple[CaseResult, ...]) -> None:
    """Links."""
    page = parsed(run_of(*results))
    ids = [one.attributes["id"] for one in page.all() if "id" in one.attributes]
    assert len(ids) == len(set(ids))
    links = {a.attributes["href"].removeprefix("#") for a in page.find("a")}
    labels = {
        e.attributes["aria-labelledby"] for e in page.all() if "aria-labelledby" in e.attributes
    }
    assert links | labels <= set(ids)


def test_nothing_comes_over_the_network_and_nothing_runs() -> None:
    """One file: no address outside of it, no script, and a policy that forbids both."""
    page = parsed(run_saying("http://example.invalid/x.png url(http://example.invalid)", "k"))
    for element in page.all():
        assert element.tag not in {"script", "iframe", "img", "object", "embed", "base", "form"}
        for name, value in element.attributes.items():
            assert not name.startswith("on"), f"{element.tag} {name}"
            if name in {"src", "href", "srcset", "action", "data", "poster", "xlink:href"}:
                assert value.startswith(("#", "data:")), f"{element.tag} {name}={value}"
    (style,) = page.find("style")
    assert not re.search(r"url\(|@import|@font-face", style.text)
    (policy,) = page.find("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy.attributes["content"].startswith("default-src 'none'; style-src 'unsafe-inline';")


@pytest.mark.parametrize("result", EVERY_KIND[1:], ids=lambda result: result.case.cell.kind)
def test_every_case_that_is_not_equal_shows_both_sides(result: CaseResult) -> None:
    """Its section has its verdict, both answers, all sentences and the command."""
    run = run_of(*EVERY_KIND)
    said = run["cases"][result.case.id]
    article = parsed(run).by_id(anchor(result.case.id))
    assert article.tag == "article"
    assert said["verdict"] in article.find("h3")[0].text
    answers = [one.text for one in article.find("div", kind="answer")]
    for name, side, text in zip(("Expected", "Got"), ("expected", "actual"), answers, strict=True):
        assert name in text
        assert (said[side]["text"] if said[side] else "no answer") in text
    assert [li.text for li in article.find("ul", kind="sentences")[0].find("li")] == said[
        "sentences"
    ]
    (command,) = article.find("pre", kind="command")
    assert command.text == said["reproduce"]


def test_a_parting_shows_the_tokens_around_it_on_both_sides() -> None:
    """Before it, the parting tokens with id and text, after it; round, position, margin, delta."""
    article = parsed(run_of(parted(case()))).by_id(anchor(case().id))
    (table,) = article.find("table", kind="sides")
    rows = [[cell.text for cell in row.children] for row in table.find("tr")]
    assert rows[0] == ["place", "expected", "got"]
    assert rows[1] == ["position 0", "'a' id 97", "'a' id 97"]
    assert rows[4] == ["position 3 parts here", "'d' id 100", "'x' id 120"]
    assert rows[7] == ["position 6", "'g' id 103", "'g' id 103"]
    assert "token, position 3, round 1; margin 0.5, delta 0." in article.find("p")[1].text


def test_the_page_begins_with_the_verdict_and_the_closing_line() -> None:
    """Who reads two lines knows."""
    run = run_of(*EVERY_KIND)
    (header,) = parsed(run).find("header")
    assert "3 of 7 cases differ from the reference." in header.text
    assert run["summary"] in header.text


def test_the_page_says_what_was_not_checked() -> None:
    """Honest: capabilities, what is left open, claims and the positions nobody reached."""
    run = run_of(
        parted(case()),
        claims=(Claim("claims/x", False, "x happens"),),
        capabilities=[{"name": "seed", "value": "no", "note": "is ignored"}],
        not_checked=["No sampled text was."],
    )
    page = parsed(run)
    section = page.by_id("capabilities").text
    assert all(said in section for said in ("seed", "is ignored", "No sampled text was."))
    assert "5 of 9 positions" in section
    assert "not met" in page.by_id("claims").text


def test_the_matrix_has_a_row_per_sampling_and_a_column_per_prompt_kind() -> None:
    """Rows in blocks by model, lane and drafter; real headers; marks with words beside them."""
    run = run_of(equal(case("a")), parted(case("b")), equal(case("b", drafter="off", depth=0)))
    section = parsed(run).by_id("matrix")
    (table,) = section.find("table")
    assert [th.text for th in table.find("th", scope="col")][1:] == ["a", "b"]
    assert [th.text for th in table.find("th", scope="rowgroup")] == [
        "dense · serial · ngram",
        "dense · serial · off",
    ]
    rows = [[td.text for td in row.children] for row in table.find("tr")]
    assert rows[2] == ["d3 greedy", "=", "≠"]
    assert rows[4] == ["d0 greedy", "", "="]
    assert [a.attributes["aria-label"] for a in table.find("a")][1].startswith("different: ")


def test_a_plot_says_its_numbers() -> None:
    """Accepted and drafted by position, as text for who cannot see it."""
    (plot,) = parsed(run_of(equal(case()), equal(case("b")))).by_id("acceptance").find("svg")
    said = (
        "dense, ngram, depth 3, 4 rounds: position 1: 4 of 4 accepted, "
        "position 2: 2 of 4 accepted, position 3: 0 of 2 accepted"
    )
    assert plot.attributes["aria-label"] == said
    assert plot.find("title")[0].text == said
    assert len(plot.find("rect", kind="drafted")) == 3


def test_a_run_that_drafts_nothing_has_no_plot() -> None:
    """Empty rounds are no rounds of position 1."""
    one = equal(case(drafter="off", depth=0))
    assert one.actual is not None
    object.__setattr__(one.actual, "rounds", (Round((), 0, (97,)),))
    assert not parsed(run_of(one)).by_id("acceptance").find("svg")


def test_a_failure_behind_a_tie_is_shown_from_what_is_known() -> None:
    """After a tie the subject was asked again; its first answer says nothing about that place."""
    failure = Failure("token", 102, 122, 5, Measure(0.5, 0.0, 3.0))
    article = parsed(run_of(tied(case(), Verdict.DIFFERENT, failure))).by_id(anchor(case().id))
    first, second = article.find("table", kind="sides")
    assert "position 2 parts here'c' id 99'x' id 120" in first.text
    assert "position 4'e' id 101'e' id 101" in second.text
    assert "position 5 parts here'f' id 102'z' id 122" in second.text
    assert "position 6'g' id 103not kept" in second.text
