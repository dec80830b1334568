"""A server as the subject, on one mlx_lm.server that speaks through servers which alter it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fixtures
from oracle.client import Client
from oracle.server import Server
from parity import waiting
from parity.cases import Case, Message, Prompted, Source
from parity.compare import Verdict
from parity.errors import Unusable
from parity.matrix import matrix
from parity.models import given_models
from parity.plans import Text, served
from parity.remote import session
from parity.remote.address import Address
from parity.remote.session import RemoteSession, open_remote, raw_prompt
from parity.report.words import exit_code, sentences
from parity.runner import CaseResult, Claim
from tests.parity.altered import Body, Script, altered, drop_ids, tell_only_text

ROOT = Path(__file__).parent.parent.parent
NUM_TOKENS = 14  # one of the prompts below ends by itself after 13
PROMPTS = (Text("town", "In Tolm there is a lot o"), Text("boat", "Q: Who sails the boat?\nA:"))
CHAT = (Message("user", "Tell me about Karin."),)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Both the oracle and what is behind every subject here."""
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(fixtures.target_dir("dense"), log_path=log) as server:
        yield server


@dataclass
class Outcome:
    """What became of a run."""

    results: list[CaseResult]
    claims: tuple[Claim, ...]
    not_checked: str
    rows: dict[str, tuple[str, str]]
    said: list[str]

    @property
    def verdicts(self) -> dict[str, Verdict]:
        return {f"{r.case.cell.style}/{r.case.cell.kind}": r.verdict for r in self.results}

    @property
    def are_all_equal(self) -> bool:
        return set(self.verdicts.values()) == {Verdict.EQUAL}

    @property
    def unmet(self) -> dict[str, str]:
        return {claim.id.rsplit("/")[-1]: claim.text for claim in self.claims if not claim.met}

    @property
    def code(self) -> int:
        return exit_code(self.results, self.claims)


Judge = Callable[..., Outcome]


@pytest.fixture
def judge(upstream: Server) -> Judge:
    """Run cases of some styles on a subject that follows a script."""

    def run(
        script: Script,
        *styles: str,
        prompts: Sequence[Text] = PROMPTS[:1],
        within: Callable[[RemoteSession, list[Case]], None] | None = None,
    ) -> Outcome:
        script.upstream = upstream.url
        models = given_models(str(fixtures.target_dir("dense")), None)
        cases = [
            case
            for case in matrix([served(prompts, NUM_TOKENS)])
            if not styles or case.cell.style in styles
        ]
        with (
            altered(script) as url,
            Client(upstream, eos_ids={0}) as client,
            open_remote(
                models,
                Address(url, timeout_s=60.0),
                cases,
                lambda references: references.mount(Source.SERVER, upstream, client),
            ) as opened,
        ):
            script.seen.clear()
            begun = opened.begin(cases)
            if within is not None:
                within(opened, begun)
            results = [opened.run(case) for case in begun]
            return Outcome(
                results,
                opened.claims(results),
                "\n".join(opened.not_checked(results)),
                {row.name: (row.value, row.note) for row in opened.capabilities},
                [line for one in results for line in sentences(one, opened.setting)],
            )

    return run


def test_the_same_model_is_equal_in_every_style(judge: Judge) -> None:
    """Ids, log-probabilities, usage, text and end; in events the text and the end."""
    script = Script()
    run = judge(script, prompts=PROMPTS)
    assert run.are_all_equal
    assert len(run.results) == 8
    assert (run.unmet, run.code) == ({}, 0)
    assert {claim.id.rsplit("/")[-1] for claim in run.claims} == {
        *("prompt-tokens", "vocabulary", "logprobs", "streaming")
    }
    assert {row: value for row, (value, _) in run.rows.items()} == {
        "model": "default_model",
        **dict.fromkeys(("raw completions", "chat", "streaming", "concurrency", "seed"), "yes"),
        **dict.fromkeys(("ids in answers", "log-probabilities", "usage"), "yes"),
        "prefix reuse": "told",
    }
    unchecked = {r.case.cell.style: r.comparison.unchecked for r in run.results}
    told = {"once": (), "together": (), "again": ()}
    assert unchecked == {**told, "stream": ("ids", "logprobs", "usage")}
    assert "ids: compared as text, in 2 of 8 cases" in run.not_checked
    assert "sampling" in run.not_checked


def test_together_is_at_once_and_again_is_a_second_time(judge: Judge) -> None:
    """One alone is asked beside itself."""
    script = Script()
    assert judge(script, "together", "again").are_all_equal
    assert script.most_at_once == 2
    assert len(script.seen) == 4, "a first time is asked for though it is no case"
    script = Script()
    assert judge(script, "once", "again").are_all_equal
    assert len(script.seen) == 2


def test_text_alone_can_be_equal_and_says_what_it_left_open(judge: Judge) -> None:
    run = judge(Script(change=drop_ids), prompts=PROMPTS)
    assert run.are_all_equal
    assert run.code == 0
    assert run.rows["ids in answers"] == ("no", "answers are compared as text")
    assert "ids: compared as text, in 8 of 8 cases" in run.not_checked
    assert "logprobs: not told, in 8 of 8 cases" in run.not_checked
    assert "rests on its texts alone" not in run.not_checked, "it counts tokens"


def test_what_tells_nothing_but_text_rests_on_it(judge: Judge) -> None:
    """No claim about the model can be made, and that is said."""
    run = judge(Script(change=tell_only_text), "once")
    assert run.are_all_equal
    assert run.claims == ()
    assert "usage: not told" in run.not_checked
    assert "that it serves the target rests on its texts alone" in run.not_checked


def of_cases(change: Callable[[Body], None]) -> Callable[[Body, Body], None]:
    """Change only the answers to the questions of cases."""

    def changed(request: Body, answer: Body) -> None:
        if request["max_tokens"] == NUM_TOKENS:
            change(answer)

    return changed


def change_text(answer: Body) -> None:
    """Another sixth character, and no ids."""
    drop_ids({}, answer)
    text = answer["choices"][0]["text"]
    answer["choices"][0]["text"] = text[:5] + "#" + text[6:]


def test_another_text_parts_at_the_oracle_s_token(judge: Judge) -> None:
    """With its margin, in one sentence."""
    run = judge(Script(change=of_cases(change_text)), "once")
    (result,) = run.results
    (failure,) = result.comparison.failures
    assert (result.verdict, run.code) == (Verdict.DIFFERENT, 1)
    assert result.expected is not None
    # The first space of an answer is not in its text.
    position = 5 + (len(result.expected.ids) - len(result.expected.text))
    assert (failure.what, failure.position) == ("token", position)
    assert failure.actual == 5 + ord("#")
    assert failure.measure is not None
    assert failure.measure.margin > 0.01
    assert f"position {position}: expected" in run.said[0]


def as_vllm(request: Body, answer: Body) -> None:
    """Ids for those who ask, and log-probabilities as completions had them of old."""
    for choice in answer["choices"]:
        entries = choice.pop("logprobs", {"content": []})["content"]
        if request.get("return_token_ids"):
            choice["token_ids"] = [entry["id"] for entry in entries]
        choice["logprobs"] = {"token_logprobs": [entry["logprob"] for entry in entries]}


def as_openai(_: Body, answer: Body) -> None:
    """Log-probabilities of tokens without ids."""
    for choice in answer["choices"]:
        for entry in choice.get("logprobs", {"content": []})["content"]:
            entry["token"] = chr(entry.pop("id"))


@pytest.mark.parametrize(
    ("change", "unchecked"), [(as_vllm, ()), (as_openai, ("ids",))], ids=["vllm", "openai"]
)
def test_other_servers_dialects_are_understood(
    judge: Judge, change: Callable[[Body, Body], None], unchecked: tuple[str, ...]
) -> None:
    """An EOS at the end is told along, and is no content."""
    run = judge(Script(change=change), "once", prompts=PROMPTS)
    assert run.are_all_equal
    assert {result.comparison.unchecked for result in run.results} == {unchecked}
    assert all(r.comparison.logprob_difference is not None for r in run.results)
    ends = {r.actual.finish_reason for r in run.results if r.actual is not None}
    assert ends == {"length", "stop"}
    assert run.unmet == {}


@pytest.mark.parametrize("change", [lambda *_: None, drop_ids])
def test_a_first_space_that_the_oracle_drops_is_right_and_counted(
    judge: Judge, change: Callable[[Body, Body], None]
) -> None:
    """D21: the ids say " The sailor.", and mlx_lm.server serves it without its space."""

    def spaced(request: Body, answer: Body) -> None:
        change(request, answer)
        if request["max_tokens"] == NUM_TOKENS:
            answer["choices"][0]["text"] = " " + answer["choices"][0]["text"]

    run = judge(Script(change=spaced), "once", prompts=PROMPTS[1:])
    assert run.are_all_equal
    (said,) = run.results[0].comparison.deviations
    assert said.startswith("D21: the text is ' The")
    assert "known deviation D21" in run.said[0]


def longer(answer: Body) -> None:
    drop_ids({}, answer)
    answer["choices"][0]["text"] += "!"


def other_end(answer: Body) -> None:
    drop_ids({}, answer)
    answer["choices"][0]["finish_reason"] = "stop"


def other_id(answer: Body) -> None:
    answer["choices"][0]["logprobs"]["content"][3]["id"] = 77


def far_id(answer: Body) -> None:
    answer["choices"][0]["logprobs"]["content"][3]["id"] = 10**30


def other_usage(answer: Body) -> None:
    answer["usage"]["completion_tokens"] += 1


def other_logprob(answer: Body) -> None:
    answer["choices"][0]["logprobs"]["content"][3]["logprob"] -= 0.01


@pytest.mark.parametrize(
    ("change", "what", "unmet"),
    [
        (longer, "token", set()),
        (other_end, "finish reason", set()),
        (other_id, "token", set()),
        (far_id, "token", {"vocabulary"}),
        (other_usage, "completion tokens", set()),
        (other_logprob, "logprob", {"logprobs"}),
    ],
)
def test_what_is_well_formed_but_wrong_is_a_finding(
    judge: Judge, change: Callable[[Body], None], what: str, unmet: set[str]
) -> None:
    """mutants: text mode ignores what follows the shared beginning."""
    run = judge(Script(change=of_cases(change)), "once")
    assert run.results[0].comparison.failures[0].what == what
    assert run.unmet.keys() == unmet
    assert run.code == 1


def test_events_are_held_to_the_oracle_and_to_the_one_piece(judge: Judge) -> None:
    """mutants: streaming is compared with itself."""

    def change(request: Body, answer: Body) -> None:
        if request.get("stream"):
            of_cases(change_text)(request, answer)

    run = judge(Script(change=change), "once", "stream")
    assert run.verdicts == {"once/town": Verdict.EQUAL, "stream/town": Verdict.DIFFERENT}
    assert "prompt town: expected 'ver" in run.unmet["streaming"] or "#" in run.unmet["streaming"]
    alone = judge(Script(change=change), "stream")
    assert alone.verdicts == {"stream/town": Verdict.DIFFERENT}


def test_another_model_is_never_equal(judge: Judge) -> None:
    """mutants: a claim about the subject does not reach the exit code."""

    def change(request: Body, answer: Body) -> None:
        if request["max_tokens"] < NUM_TOKENS:
            answer["usage"]["prompt_tokens"] += 1

    run = judge(Script(change=change), "once")
    assert run.are_all_equal
    assert run.code == 1
    assert (
        "prompt 'The miller counts 12 sacks, an…': expected 57 prompt tokens, got 58"
        in (run.unmet["prompt-tokens"])
    )


def test_log_probabilities_give_another_model_away_in_any_style(judge: Judge) -> None:
    """The claim asks once in one piece, though no case does."""
    run = judge(Script(change=of_cases(other_logprob)), "stream")
    assert run.are_all_equal
    assert run.code == 1
    assert "prompt 'In Tolm there is a lot o', position 3, token" in run.unmet["logprobs"]


def test_what_the_subject_lacks_is_not_run_and_said(judge: Judge) -> None:
    run = judge(Script(streams=False, one_at_a_time=True))
    assert {key.split("/")[0] for key in run.verdicts} == {"once", "again"}
    assert run.are_all_equal
    assert "stream: not run, the subject does not offer it (it answers in one piece)" in (
        run.not_checked
    )
    assert "together: not run, the subject does not offer it (status 429: one at a time)" in (
        run.not_checked
    )
    with pytest.raises(Unusable, match="no case is left to run: stream: not run"):
        judge(Script(streams=False), "stream")


def test_a_chat_is_put_to_both_sides_as_its_text(judge: Judge) -> None:
    """So that two templates cannot differ."""
    script = Script()
    run = judge(script, "once", prompts=[Text("chat", CHAT)])
    assert run.are_all_equal
    assert "chat templates" not in run.not_checked
    assert script.seen[-1][0] == "/v1/completions"
    assert script.seen[-1][1]["prompt"] == "<|user|>Tell me about Karin.<|assistant|>"


@pytest.mark.parametrize("prompt", [PROMPTS[0].text, CHAT])
def test_a_subject_with_nothing_but_chat_is_compared_with_a_notice(
    judge: Judge, prompt: Prompted
) -> None:
    """Like with like: the oracle is asked for the chat as well."""
    script = Script(lacks=("/v1/completions",))
    run = judge(script, "once", "stream", prompts=[Text("p", prompt)])
    assert run.are_all_equal
    assert "chat templates: p went to the chat endpoints of both sides" in run.not_checked
    assert run.rows["raw completions"] == ("no", "status 404: no such path")
    assert run.unmet == {}


def test_a_prompt_that_cannot_be_asked_is_left_out_and_said(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template whose text is cut into other ids, and a subject that answers no chat."""

    def only_texts(_: object, prompt: Prompted) -> str | None:
        return prompt if isinstance(prompt, str) else None

    monkeypatch.setattr(session, "raw_prompt", only_texts)
    prompts = [Text("chat", CHAT), PROMPTS[0]]
    run = judge(Script(lacks=("/v1/chat/completions",)), "once", prompts=prompts)
    assert run.verdicts == {"once/town": Verdict.EQUAL}
    assert "prompt chat: not run, it can only be asked as a chat" in run.not_checked
    run = judge(Script(), "once", prompts=prompts)
    assert run.are_all_equal
    assert "chat templates: chat went to the chat endpoints of both sides" in run.not_checked


def test_a_chat_that_its_text_does_not_stand_for_is_none() -> None:
    """A first token that encoding adds must not be there twice."""

    class Chatty:
        def __init__(self, bos: str, adds: list[int]) -> None:
            self.tokenizer: Any = type("T", (), {"bos_token": bos})
            self.adds = adds

        def encode(self, text: str) -> list[int]:
            return [*self.adds, *map(ord, text)]

        def encode_chat(self, _: object) -> list[int]:
            return [ord("^"), ord("a")]

        def render_chat(self, _: object) -> str:
            return "^a"

    assert raw_prompt(Chatty("", []), CHAT) == "^a"  # type: ignore[arg-type]
    assert raw_prompt(Chatty("^", [ord("^")]), CHAT) == "a"  # type: ignore[arg-type]
    assert raw_prompt(Chatty("", [ord("^")]), CHAT) is None  # type: ignore[arg-type]


def test_after_a_tie_the_subject_goes_on_from_the_oracle_s_text(judge: Judge) -> None:
    """Only where prompt and beginning are cut into the very same ids again."""

    def within(opened: RemoteSession, cases: list[Case]) -> None:
        (case,) = cases
        expected = opened.references.expected(case)
        for count in range(1, NUM_TOKENS + 1):
            resumed = opened.subject.answer(case, given=expected.ids[:count])
            assert resumed is not None
            assert resumed.ids == expected.ids
            assert resumed.logprobs is not None
            assert len(resumed.logprobs) == NUM_TOKENS - count
        cut = tuple(5 + byte for byte in "木".encode()[:2])
        assert opened.subject.answer(case, given=cut) is None

    judge(Script(), "once", within=within)


def test_a_text_is_resumed_as_text(judge: Judge) -> None:
    """Without ids the rest is mapped onto the rest."""

    def within(opened: RemoteSession, cases: list[Case]) -> None:
        (case,) = cases
        expected = opened.references.expected(case)
        resumed = opened.subject.answer(case, given=expected.ids[:4])
        assert resumed is not None
        assert (resumed.ids, resumed.mapped) == (expected.ids, True)

    judge(Script(change=drop_ids), "once", within=within)


@pytest.mark.parametrize(
    ("style", "how"),
    [("once", ""), ("stream", ", streamed"), ("together", ", side by side"), ("again", "")],
)
def test_a_server_that_fails_on_a_case_ends_the_run_in_its_words(
    judge: Judge, style: str, how: str
) -> None:
    """It is no finding: a server that broke off said nothing."""
    script = Script(fails=lambda request: "error" if request["max_tokens"] == NUM_TOKENS else None)
    said = rf"prompt 'In Tolm [^,]*'{how}\): status 500: out of memory"
    with pytest.raises(Unusable, match=said):
        judge(script, style)


def test_a_slow_server_is_waited_for_aloud(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a run into a pipe says nothing until its first table."""
    script = Script(fails=lambda _: time.sleep(0.1))
    monkeypatch.setattr(waiting, "PATIENCE_S", 600.0)
    assert judge(script, "once").are_all_equal
    assert "to answer what it offers" not in capsys.readouterr().err
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.2)
    judge(script, "once")
    assert re.search(
        r"^parity: waiting for http://\S+ to answer what it offers, for at most 60 s per request$",
        capsys.readouterr().err,
        re.MULTILINE,
    )


def test_the_engine_is_not_loaded_for_a_server() -> None:
    """Two servers are enough for one machine."""
    code = "import sys, parity.remote.session; sys.exit('engine' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
