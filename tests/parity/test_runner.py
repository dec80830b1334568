"""Running cases: what a dead server, a broken engine and an unmet claim come to."""

from __future__ import annotations

import pytest

from parity.cases import GREEDY, Drafter, Sampling, Source
from parity.compare import Measure, Verdict
from parity.errors import Unusable
from parity.matrix import matrix
from parity.report.words import exit_code, sentences
from parity.runner import (
    CaseResult,
    accept_claims,
    accepts,
    claims,
    in_running_order,
    run_case,
    sampling_claims,
)
from parity.trace import Answer, Round
from tests.parity.fakes import (
    EXACT,
    LOOSE,
    PLAN,
    SETTING,
    TOP_P,
    FakeMeter,
    FakeOracle,
    FakeSubject,
    answer,
    case,
)


def run(actual: Answer | Exception | None, expected: Answer | None = None) -> CaseResult:
    """One case on the CPU, where nothing can be measured."""
    oracle = FakeOracle(expected or answer())
    return run_case(case(), oracle, FakeSubject({0: actual}), FakeMeter(None), EXACT)


def test_a_dead_server_ends_the_run() -> None:
    """mutants: a runner that swallows it would call the case equal, or skip it."""
    oracle = FakeOracle(answer(), dies_at=case().id, error=Unusable("server died"))
    with pytest.raises(Unusable, match="server died"):
        run_case(case(), oracle, FakeSubject({0: answer()}), FakeMeter(None), EXACT)


@pytest.mark.parametrize("said", [ValueError("cache\nbroke"), None])
def test_an_engine_that_breaks_off_is_different(said: Exception | None) -> None:
    """The finding is the exception, in one line."""
    result = run(said)
    assert result.verdict is Verdict.DIFFERENT
    assert result.comparison.checked == 0
    (sentence,) = sentences(result, SETTING)
    assert "\n" not in sentence
    assert "broke" in sentence or "no answer" in sentence


def test_an_oracle_whose_own_run_breaks_is_different_too() -> None:
    """The engine's plain stream is the oracle of drafting runs; if it breaks, the case fails."""
    own = case(source=Source.OWN_PLAIN)
    oracle = FakeOracle(answer(), dies_at=own.id, error=ValueError("plain broke"))
    result = run_case(own, oracle, FakeSubject({0: answer()}), FakeMeter(None), EXACT)
    assert result.verdict is Verdict.DIFFERENT
    assert result.expected is None


def test_an_oracle_that_breaks_off_is_not_the_engines_fault() -> None:
    """Exit 2 and not 1: nothing was found out about the engine."""
    server = case(source=Source.SERVER)
    oracle = FakeOracle(answer(), dies_at=server.id, error=KeyError("choices"))
    with pytest.raises(Unusable, match=r"oracle of .* broke off: KeyError: 'choices'"):
        run_case(server, oracle, FakeSubject({0: answer()}), FakeMeter(None), EXACT)


@pytest.mark.parametrize("after", [0, 2])
def test_a_subject_that_is_gone_ends_the_run(after: int) -> None:
    """A server that breaks off says nothing about its answers, in the middle of a case neither."""
    subject = FakeSubject(
        {0: answer((97, 120, 99), origin="subject"), after: Unusable("no whole answer")}
    )
    meter = FakeMeter(Measure(1e-4, 0.0, 1.0))
    with pytest.raises(Unusable, match="no whole answer"):
        run_case(case(), FakeOracle(answer()), subject, meter, LOOSE)


def test_after_a_tie_the_engine_is_given_the_oracles_tokens() -> None:
    """Teacher forcing: the prefix measured and the prefix given are the oracle's."""
    expected = answer((97, 98, 99, 100))
    subject = FakeSubject(
        {
            0: answer((97, 120, 121, 122), origin="engine"),
            2: answer((97, 98, 99, 100), origin="engine", logprobs=(-0.5, -0.5)),
        }
    )
    meter = FakeMeter(Measure(1e-4, 0.0, 1.0))
    result = run_case(case(), FakeOracle(expected), subject, meter, LOOSE)
    assert result.verdict is Verdict.NEAR_TIE
    assert subject.given == [(), (97, 98)]
    assert meter.asked == [((97,), 98, 120)]


def test_a_case_that_claims_a_stop_fails_without_one() -> None:
    """A stop string that never came would make the case equal for the wrong reason."""
    stopping = case(finish="stop")
    subject = FakeSubject({0: answer(origin="engine")})
    result = run_case(stopping, FakeOracle(answer()), subject, FakeMeter(None), EXACT)
    assert result.verdict is Verdict.DIFFERENT
    assert "claimed finish reason" in sentences(result, SETTING)[0]


def drafting(drafter: Drafter, rounds: tuple[Round, ...]) -> CaseResult:
    """An equal result of a drafter with these rounds."""
    actual = answer(origin="engine", rounds=rounds)
    oracle, subject = FakeOracle(answer()), FakeSubject({0: actual})
    return run_case(case(drafter=drafter), oracle, subject, FakeMeter(None), EXACT)


MODELS = ("dense",)
ZERO, PARTIAL, FULL, SILENT = (
    Round((1, 2), 0, (3,)),
    Round((1, 2), 1, (1, 3)),
    Round((1, 2), 2, (1, 2, 3)),
    Round((), 0, (3,)),
)


def test_claims_ask_for_every_kind_of_accept_of_every_drafter() -> None:
    """A round without a draft is no accept of any kind, and one drafter does not serve for two."""
    everything = (ZERO, PARTIAL, FULL)
    drafters: tuple[Drafter, ...] = ("ngram", "two-model", "dspark")
    every = [drafting(drafter, everything) for drafter in drafters]
    assert all(claim.met for claim in accept_claims(every, MODELS))
    for number, drafter in enumerate(drafters):
        less = [*every[:number], *every[number + 1 :]]
        met = {claim.met for claim in accept_claims(less, MODELS) if drafter in claim.id}
        assert met == {False}
    partly = [*every[:1], drafting("two-model", (ZERO, PARTIAL, SILENT)), *every[2:]]
    unmet = [claim.id for claim in accept_claims(partly, MODELS) if not claim.met]
    assert unmet == ["claims/dense/two-model/full-accept"]
    assert exit_code(partly, claims(partly)) == 1


def test_a_round_without_a_draft_is_no_accept() -> None:
    """Else depth 0 alone would show a zero accept."""
    unmet = [
        c.id for c in accept_claims([drafting("ngram", (SILENT, PARTIAL))], MODELS) if not c.met
    ]
    assert "claims/dense/ngram/zero-accept" in unmet
    assert "claims/dense/ngram/partial-accept" not in unmet


def test_an_accept_counts_as_past_a_place_by_what_was_held_before_it() -> None:
    """The prompt of 4 tokens, and what rounds before it have emitted."""
    result = drafting("ngram", (FULL, PARTIAL, ZERO))
    assert accepts([result], "dense", "ngram") == {"full", "partial", "zero"}
    assert accepts([result], "dense", "ngram", past=5) == {"partial", "zero"}
    assert accepts([result], "dense", "ngram", past=8) == {"zero"}
    assert accepts([result], "dense", "ngram", past=10) == set()
    assert accepts([result], "sliding", "ngram") == set()


def sampled(kind: str, text: str, sampling: Sampling = GREEDY) -> CaseResult:
    """An equal plain result with this text."""
    expected, actual = answer(text=text), answer(text=text, origin="engine")
    subject = FakeSubject({0: actual})
    plain = case(kind, drafter="off", depth=0, sampling=sampling)
    return run_case(plain, FakeOracle(expected), subject, FakeMeter(None), EXACT)


def test_claims_ask_for_sampled_texts_that_are_not_the_greedy_ones() -> None:
    """Sampling that always draws the best token would be equal whatever its keys are."""
    greedy = [sampled(kind, kind) for kind in "abc"]
    mostly = [sampled("a", "a", TOP_P), sampled("b", "x", TOP_P), sampled("c", "y", TOP_P)]
    hardly = [sampled("a", "a", TOP_P), sampled("b", "b", TOP_P), sampled("c", "y", TOP_P)]
    assert [(c.id, c.met) for c in sampling_claims(greedy + mostly)] == [
        ("claims/sampling/top-p", True)
    ]
    assert [c.met for c in sampling_claims(greedy + hardly)] == [False]
    assert {c.id for c in sampling_claims(greedy + mostly)} < {c.id for c in claims(mostly)}


def test_cases_of_one_server_follow_each_other() -> None:
    """The engine works on cases without a server first, while the servers answer."""
    sources = [c.source for c in in_running_order(matrix([PLAN]))]
    changes = [new for old, new in zip([None, *sources], sources, strict=False) if old != new]
    assert changes == list(dict.fromkeys(changes))
    assert set(changes) == set(Source) - {Source.OWN_ALONE}
    assert changes[2:] == [Source.SERVER, Source.SERVER_DRAFT]
