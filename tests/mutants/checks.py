"""What must fail in a changed world: each function asserts one thing that holds in this one."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

import fixtures

from .world import World

PROMPT = "Name: Anna. Say it again: "


def _engine(world: World) -> tuple[Any, Any, tuple[int, ...]]:
    engine = world["engine"]
    target = engine.Target.load(fixtures.target_dir("dense"))
    return engine, target, tuple(target.encode(PROMPT))


def position_after_an_early_close(world: World) -> None:
    """`position`: the state holds the prompt and the tokens of whole rounds, in order."""
    engine, target, prompt = _engine(world)
    live = engine.open_live(target)
    events = engine.generate(target, engine.Request(prompt, 24), live=live)
    tokens = [next(events).token for _ in range(3)]
    events.close()
    assert live.target.processed[0] == len(live.held)
    assert live.held == [*prompt, *tokens[:-1]]


def poison_after_a_failed_commit(world: World) -> None:
    """`poison`: a target that is a round ahead of its drafter refuses any use."""
    engine, target, prompt = _engine(world)
    puppet = world["tests.engine.puppet"].Puppet(lambda number, step, depth: [7], commits=1)
    live = engine.open_live(target)
    with pytest.raises(RuntimeError, match="commit broke"):
        list(engine.generate(target, engine.Request(prompt, 24), puppet, live=live))
    with pytest.raises(engine.LawError, match="state is lost"):
        live.target.begin()


def too_many_drafts_are_reported(world: World) -> None:
    """`advice`: more drafts than asked for are an error and not a longer window."""
    engine, target, prompt = _engine(world)
    puppet = world["tests.engine.puppet"].Puppet(lambda number, step, depth: [7] * (depth + 1))
    with pytest.raises(engine.LawError, match="lengths"):
        list(engine.generate(target, engine.Request(prompt, 24), puppet, depth=2))


def ngram_history_after_a_rejection(world: World) -> None:
    """`companion`: the history is the prompt, the pending tokens and the accepted drafts."""
    rows = world["engine.drafters.ngram"].NgramProvider().open(None)
    rows.draft([5], 4, [0], None)
    rows.commit([0], ())
    rows.draft([5], 4, [0], None)
    rows.commit([0], ())
    rows.draft([5], 4, [0], None)
    rows.commit([1], ())
    assert rows.capture(0).attachment.tensors[0].tolist() == [5, 5, 5, 5]


def _heads_rows(world: World, family: str) -> None:
    """Two rows, one of which begins later, through zero, partial and full accepts."""
    target = world["engine"].Target.load(fixtures.target_dir(family))
    if family == "mla":
        provider = world["engine.drafters.glm_mtp"].open_glm_mtp(target)
    else:
        folder = fixtures.drafter_dir("hybrid-mtp")
        provider = world["engine.drafters.qwen_mtp"].open_qwen_mtp(folder, target)
    slow = world["tests.engine.mtp_model"]
    sampling = world["engine.sampling"]
    keys = iter(mx.random.split(mx.random.key(1), 20))

    def hidden(rows: int, width: int) -> mx.array:
        return mx.random.normal(
            (rows, width, target.model.layers[0].input_layernorm.weight.size), key=next(keys)
        )

    def open_row() -> Any:
        return provider.open(sampling.RowSampling([sampling.Greedy()]))

    rows, models = open_row(), [slow.Slow(provider.mtp), slow.Slow(provider.mtp)]
    states = hidden(1, 3)
    rows.prefill(mx.array([[40, 41, 42]]), (states,))
    models[0].prefill([40, 41, 42], states[0])
    rows, states = rows.joined(open_row()), hidden(2, 3)
    rows.prefill(mx.array([[43, 44, 45], [50, 51, 52]]), (states,))
    models[0].prefill([43, 44, 45], states[0])
    models[1].prefill([50, 51, 52], states[1])
    for kept in ([0, 2], [3, 1], [2, 3]):
        draft = rows.draft([60, 61], 3, [0, 0], None)
        assert draft.tokens.tolist() == [m.draft(60 + r, 3) for r, m in enumerate(models)]
        states = hidden(2, 4)
        rows.commit(kept, (states,))
        for r, model in enumerate(models):
            model.commit(kept[r], states[r])
            assert slow.same_numbers(rows.capture(r).attachment.tensors, model.tensors())


def rows_of_a_head(world: World) -> None:
    """`companion`: what Qwen's head remembers."""
    _heads_rows(world, "hybrid")


def rows_of_an_own_layer(world: World) -> None:
    """`companion`: what GLM's layer remembers."""
    _heads_rows(world, "mla")


def _reader(world: World) -> tuple[Any, Any]:
    """A drafter that reads a target, and the same target loaded again."""
    load = world["engine"].Target.load
    folder = fixtures.target_dir("mla")
    return world["engine.drafters.glm_mtp"].open_glm_mtp(load(folder)), load(folder)


def a_reader_serves_its_own_target_alone(world: World) -> None:
    """Else it would draft from the arrays of one target for the text of another."""
    engine, (drafter, again) = world["engine"], _reader(world)
    with pytest.raises(engine.BadInput, match="reads the target"):
        engine.generate(again, engine.Request((5, 6), 4), drafter)


def a_reader_is_mounted_on_its_own_target_alone(world: World) -> None:
    """Where an engine is made, and not first where a request comes."""
    engine, (drafter, again) = world["engine"], _reader(world)
    with pytest.raises(engine.BadInput, match="reads the target"):
        engine.Engine(again, [drafter])


def _elsewhere(make: Callable[[], Any]) -> Any:
    """What a thread that has ended made."""

    def run() -> Any:
        try:
            return make()
        finally:
            mx.clear_streams()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def a_drafter_is_evaluated_where_it_is_opened(world: World) -> None:
    """What is lazy belongs to the thread that made it."""
    engine, folder = world["engine"], fixtures.drafter_dir("sliding-deepspec")
    target = engine.Target.load(fixtures.target_dir("sliding"))
    provider = _elsewhere(lambda: engine.open_drafter(str(folder), target))
    events = engine.generate(target, engine.Request((40, 41, 42), 6), provider)
    try:
        assert len(list(events)) == 7
    except RuntimeError as error:
        raise AssertionError(error) from error


def a_target_is_evaluated_where_it_is_loaded(world: World) -> None:
    """The same of a target."""
    engine, folder = world["engine"], fixtures.target_dir("sliding")
    target = _elsewhere(lambda: engine.Target.load(folder))
    try:
        assert len(list(engine.generate(target, engine.Request((40, 41, 42), 6)))) == 7
    except RuntimeError as error:
        raise AssertionError(error) from error


def assistant_state_after_a_rejection(world: World) -> None:
    """`companion`: the hidden state is that of the last token kept."""
    rows = world["engine.drafters.assistant"].AssistantRows(None, (3, 5), mx.zeros((2, 1, 4)))
    rows.draft([1, 2], 0, [0, 0], None)
    states = mx.arange(2 * 4 * 4).reshape(2, 4, 4)
    rows.commit([1, 3], (states,))
    assert mx.array_equal(rows._hidden, mx.stack([states[0, 1:2], states[1, 3:4]]))


def assistant_rows_have_their_own_positions(world: World) -> None:
    """`solitude`: each row's queries stand behind its own text."""
    module = world["engine.drafters.assistant"]
    provider = module.AssistantProvider.__new__(module.AssistantProvider)
    provider._convention = module.REFERENCE
    assert mx.array_equal(provider.position([7, 9], 0), mx.array([7, 9]))


def lent_keys_end_with_the_row(world: World) -> None:
    """`padding`: a row is shown its own last tokens, and never what stands behind them."""
    plane = mx.full((2, 1, 4, 1), float("nan"))
    plane[0, :, :2] = plane[1, :, :4] = 1.0
    lent = world["engine.state.donors"].Donor(plane, plane, (2, 4), (2, 4)).last([2, 3])
    assert lent.mask.squeeze().tolist() == [[True, True, False, False], [False, True, True, True]]
    assert bool(mx.all(mx.isfinite(lent.values)))


def _plain_and_drafted(world: World, **sampling: Any) -> tuple[Any, Any]:
    """The same request without a drafter, and with one that is always right, five at a time."""
    engine, target, prompt = _engine(world)
    puppet = world["tests.engine.puppet"]
    request = engine.Request(prompt, 24, engine.Sampling(**sampling))
    *_, plain = engine.generate(target, request)
    right = puppet.Puppet(puppet.scripted(plain.tokens, [[True] * 5]))
    *_, drafted = engine.generate(target, request, right, depth=5)
    return plain, drafted


def lossless_with_penalties(world: World) -> None:
    """`lossless`: the penalised text is the same, and right drafts of it are accepted."""
    options = world["engine"].LogitsOptions(presence_penalty=1.5, frequency_penalty=1.0)
    plain, drafted = _plain_and_drafted(world, logits=options)
    assert drafted.tokens == plain.tokens
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-3)
    assert drafted.statistics.rejected == 0


def lossless_with_xtc(world: World) -> None:
    """`lossless-sampled`: a window tosses the coins that single steps toss."""
    for seed in range(8):
        sampling = {"temperature": 1.0, "seed": seed, "xtc_probability": 0.5}
        plain, drafted = _plain_and_drafted(world, xtc_threshold=0.05, **sampling)
        assert drafted.tokens == plain.tokens


def each_prompt_token_is_penalised(world: World) -> None:
    """A ban by presence on all that was said leaves the first token outside the prompt."""
    engine, target, _ = _engine(world)
    prompt = tuple(range(40, 70))
    for size in (0, 30):
        options = engine.LogitsOptions(presence_penalty=1e9, presence_context_size=size)
        banned = engine.Sampling(logits=options)
        *_, finish = engine.generate(target, engine.Request(prompt, 4, banned))
        assert len(finish.tokens) == 4
        assert not set(finish.tokens) & set(prompt[4:])


def a_bias_shows_in_the_logprobs(world: World) -> None:
    """The log-probability is that of the logits the token was chosen from."""
    engine, target, prompt = _engine(world)
    forced = engine.Sampling(logits=engine.LogitsOptions(logit_bias=((37, 1000.0),)))
    *_, finish = engine.generate(target, engine.Request(prompt, 1, forced))
    assert (finish.tokens, finish.logprobs) == ((37,), (0.0,))


def the_coin_has_a_key_of_its_own(world: World) -> None:
    """The coin of a step is stream 1's: of two equal ids XTC spares one, and the coin decides."""
    sampling, mx = world["engine.sampling"], world["mlx.core"]
    options = world["engine"].Sampling(1.0, seed=5, xtc_probability=0.5, xtc_threshold=0.1)
    window = mx.log(mx.array([[0.7, 0.3]] * 64))
    likely = sampling.Positional(options).draw(window, 0) == 0
    keys = [mx.array(sampling.step_key(5, step, 1), dtype=mx.uint32) for step in range(64)]
    coins = mx.array([mx.random.uniform(key=key).item() for key in keys])
    assert not mx.any(likely & (coins <= 0.5)).item()


def xtc_never_drops_a_newline(world: World) -> None:
    """A certain coin drops the likelier of two ids unless it is exempt, as a newline is."""
    engine, target, prompt = _engine(world)
    (newline,) = target.encode("\n")
    bias = ((newline, 1030.0), (40, 1000.0))
    options = engine.LogitsOptions(logit_bias=bias)
    certain = engine.Sampling(1.0, seed=1, xtc_probability=1.0, xtc_threshold=0.0, logits=options)
    *_, finish = engine.generate(target, engine.Request(prompt, 3, certain))
    assert finish.tokens == (newline,) * 3


def _held_after(world: World, cache: Any, widths: list[int], keep: int) -> list[int]:
    """The ids behind the columns that a cache shows after 20 tokens and a transaction."""
    mx, native = world["mlx.core"], world["engine.state.rows"]

    def model(tokens: Any, cache: Any) -> Any:
        if hasattr(cache[0], "maybe_trim_front"):
            cache[0].maybe_trim_front()
        keys = tokens.astype(mx.float32)[:, None, :, None]
        return cache[0].update_and_fetch(keys, keys)[0]

    rows = native.Rows(model, [cache])
    rows.forward(mx.array([list(range(1, 20))]))
    rows.forward(mx.array([[20]]))
    rows.begin()
    first = 21
    for width in widths:
        rows.forward(mx.array([list(range(first, first + width))]))
        first += width
    rows.resolve([keep])
    return sorted(round(key) for key in cache.keys_and_values()[0].flatten().tolist())


def rollback_of_a_ring(world: World) -> None:
    """`rollback`: inside a window, and between single steps that wrote over old columns."""
    ring = world["mlx_lm.models.cache"].RotatingKVCache
    assert _held_after(world, ring(8), [4], 2) == list(range(14, 23))
    assert _held_after(world, ring(8), [1, 1, 1], 1) == list(range(14, 22))


def rollback_of_a_chunk(world: World) -> None:
    """`rollback`: columns that a later forward of the transaction dropped are there again."""
    chunk = world["mlx_lm.models.cache"].ChunkedKVCache
    assert _held_after(world, chunk(8), [4], 2) == list(range(13, 23))
    assert _held_after(world, chunk(8), [3, 3], 1) == list(range(13, 22))


def _rows(world: World, model: Any) -> Any:
    caches = world["mlx_lm.models.cache"].make_prompt_cache
    recorder = world["engine.state.probe"].prove(model, lambda: caches(model))
    native = world["engine.state.rows"]
    return native.Rows(model, caches(model), replayer=lambda: recorder)


def rollback_of_recurrent_layers(world: World) -> None:
    """`rollback`: proved by the probe, and seen in the logits that follow."""
    mx, families = world["mlx.core"], world["tests.engine.families"]
    for family in ("qwen3_5", "baichuan_m1"):
        rows, twin = (_rows(world, families.build(family)) for _ in range(2))
        assert rows.cannot_roll_back == ()
        for each in (rows, twin):
            each.forward(mx.array([[7, 3, 11]]))
        for keep in (0, 2):
            rows.begin()
            rows.forward(mx.array([[5, 2, 13, 1]]))
            rows.resolve([keep])
        twin.forward(mx.array([[5, 2]]))
        assert mx.array_equal(*(each.forward(mx.array([[9]])) for each in (rows, twin)))


def a_wrong_replay_is_refused(world: World) -> None:
    """A mixer that remembers its last input outside its cache."""
    model = world["tests.engine.families"].build("mamba")
    kind = type(model.layers[0].mixer)

    class Remembers(kind):  # type: ignore[misc, valid-type]  # a class met at run time
        def __call__(self, x: Any, cache: Any) -> Any:
            before = self.get("before", 0.0)
            self.before = x[:, -1:]
            return super().__call__(x + before, cache)

    with_classes = world["engine.clone"].with_classes
    wrong = with_classes(model, lambda m: Remembers if type(m) is kind else type(m))
    assert _rows(world, wrong).cannot_roll_back


def quantization_waits_for_what_is_kept(world: World) -> None:
    """`lossless`: with drafts, keys and values are quantized where they are without."""
    engine, target, prompt = _engine(world)
    how = world["engine.state.quantize"].KVQuantization(4, 32, len(prompt) + 6)
    config = {"vocab_size": target.vocab_size}
    small = engine.Target(target.model, target.tokenizer, config, target.path, quantization=how)
    puppet, request = world["tests.engine.puppet"], engine.Request(prompt, 16)
    *_, plain = engine.generate(small, request)
    for right in ([[True, True, False, False], [False] * 4], [[True] * 4]):
        script = puppet.scripted(plain.tokens, right)
        try:
            *_, drafted = engine.generate(small, request, puppet.Puppet(script), depth=4)
        except engine.LawError as error:
            pytest.fail(str(error))
        assert drafted.tokens == plain.tokens
        assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def _block_rows(world: World, name: str, lengths: tuple[int, ...]) -> tuple[Any, list[Any], Any]:
    """A trained block drafter: a row for each length of one text, and that text's taps."""
    target = world["engine"].Target.load(fixtures.target_dir(name.partition("-")[0]))
    provider = world["engine"].open_drafter(str(fixtures.drafter_dir(name)), target)
    text = target.encode(PROMPT)
    seen = target.new_rows(provider.taps)
    mx = world["mlx.core"]
    seen.forward(mx.array([text]))
    rows = [provider.open(None) for _ in lengths]
    for row, length in zip(rows, lengths, strict=True):
        row.prefill(mx.array([text[:length]]), tuple(tap[:, :length] for tap in seen.tapped))
    return mx, rows, seen.tapped


def blocks_of_a_ragged_group(world: World) -> None:
    """`solitude`: a short and a long row draft together what each drafts alone, commits included.

    Looked at are logits: a near miss may leave the ids alone.
    """
    mx, alone, taps = _block_rows(world, "dense-dspark", (3, 11))
    group = alone[0].joined(alone[1])
    for kept in ([0, 3], [2, 0]):
        group.draft([40, 41], 4, [0, 0], None)
        for r, row in enumerate(alone):
            row.draft([40 + r], 4, [0], None)
            distance = mx.abs(group.proposal.logits[r] - row.proposal.logits[0]).max()
            assert float(distance) < 1e-3
            row.commit([kept[r]], tuple(tap[:, :5] for tap in taps))
        group.commit(kept, tuple(mx.repeat(tap[:, :5], 2, axis=0) for tap in taps))
        for r, row in enumerate(alone):
            assert group.capture(r).processed_tokens == row.capture(0).processed_tokens


def pruning_ends_at_the_first_unsure_draft(world: World) -> None:
    heads = world["engine.drafters.block_heads"]
    assert heads.lengths_kept([[0.9, 0.1, 0.9]], [0.5, 0.5, 0.5]) == (1,)


def deepspec_norms_its_values(world: World) -> None:
    """Each head's values have a mean square of 1, as the reference's scale-less norm leaves it."""
    mx, (row,), _ = _block_rows(world, "sliding-deepspec", (9,))
    for values in row.capture(0).attachment.tensors[1::2]:
        assert float(mx.abs((values * values).mean(-1) - 1).max()) < 1e-2


def _compare(world: World, expected: Any, actual: Any, measure: Any = None) -> Any:
    fakes, compare = world["tests.parity.fakes"], world["parity.compare"]
    return compare.compare(
        expected, actual, fakes.EXACT, lambda *_: measure, lambda count: None
    ).verdict


def last_token_differs(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    other = answer((97, 98, 100), origin="engine", text="abc")  # tokens that decode alike
    assert _compare(world, answer((97, 98, 99)), other) == "different"


def one_token_is_missing(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    shorter = answer((97, 98), origin="engine", text="abc", completion_tokens=3)
    assert _compare(world, answer((97, 98, 99)), shorter) == "different"


def finish_reason_differs(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    stopped = answer((97, 98, 99), origin="engine", finish="stop", completion_tokens=3)
    assert _compare(world, answer((97, 98, 99)), stopped) == "different"


def text_differs(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    assert _compare(world, answer(), answer(origin="engine", text="abd")) == "different"


def a_logprob_is_nan(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    broken = answer(origin="engine", logprobs=(-0.5, math.nan, -0.5))
    assert _compare(world, answer(), broken) == "different"


def a_stream_meets_itself(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    with pytest.raises(ValueError, match="compared with itself"):
        _compare(world, answer(), answer())


def a_tie_in_float32_fails(world: World) -> None:
    """On float32 on the CPU there is no excuse, however close the decision was."""
    answer = world["tests.parity.fakes"].answer
    tiny = world["parity.compare"].Measure(margin=1e-9, delta=0.0, top_logit=1.0)
    ids = tuple(range(97, 117))
    other = (*ids[:-1], 64)
    assert _compare(world, answer(ids), answer(other, origin="engine"), tiny) == "different"


def a_wide_margin_is_no_tie(world: World) -> None:
    """Where ties are ties, a decision with margin to spare still is none."""
    fakes, compare = world["tests.parity.fakes"], world["parity.compare"]
    wide = compare.Measure(margin=0.5, delta=1e-5, top_logit=1.0)
    expected = fakes.answer((97, 98, 99))
    actual = fakes.answer((97, 98, 100), origin="engine")
    result = compare.compare(expected, actual, fakes.LOOSE, lambda *_: wide, lambda count: None)
    assert result.verdict == "different"


def most_is_unchecked(world: World) -> None:
    """A tie at the start that cannot be resumed leaves nearly everything open."""
    fakes, compare = world["tests.parity.fakes"], world["parity.compare"]
    tiny = compare.Measure(margin=1e-9, delta=0.0, top_logit=1.0)
    expected = fakes.answer((97, 98, 99, 100))
    actual = fakes.answer((64, 98, 99, 100), origin="engine")
    result = compare.compare(expected, actual, fakes.LOOSE, lambda *_: tiny, lambda count: None)
    assert result.verdict == "inconclusive"


def _run(world: World, expected: Any, actual: Any, error: Exception | None = None) -> Any:
    fakes, runner = world["tests.parity.fakes"], world["parity.runner"]
    case = fakes.case()
    oracle = fakes.FakeOracle(expected)
    if error is not None:
        oracle = fakes.FakeOracle(expected, dies_at=case.id, error=error)
    subject = fakes.FakeSubject({0: actual})
    return runner.run_case(case, oracle, subject, fakes.FakeMeter(None), fakes.EXACT)


def a_server_dies(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    unusable = world["parity.errors"].Unusable
    with pytest.raises(unusable, match="gone"):
        _run(world, answer(), answer(origin="engine"), unusable("gone"))


def a_difference_exits_1(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    result = _run(world, answer((97, 98, 99)), answer((97, 98, 100), origin="engine"))
    assert world["parity.report.words"].exit_code([result], ()) == 1


GROUP = "dense/batch/ngram/d3/greedy/b4"


def _group(world: World) -> Any:
    (case, *_) = [case for case in world["parity.plans"].catalogue() if case.cell.way == GROUP]
    return case


def rows_share_rounds(world: World) -> None:
    """`solitude`: only the rounds tell a group from as many rows alone."""
    models = world["parity.models"].known_models("dense")
    with world["parity.session"].open_session(models) as session:
        result = session.run(_group(world))
    assert result.verdict == "equal"
    (claim,) = world["parity.runner"].group_claims([result])
    assert claim.met


def no_reader_waits_for_ever(world: World) -> None:
    """A row whose group fails in a way that ends the engine has its stream ended, too."""

    def fail(_: Any) -> None:
        raise MemoryError("none left")

    target = world["engine.target"].Target.load(fixtures.target_dir("dense"))
    engine = world["engine.service"].Engine(target, on_round=fail)
    stream = engine.submit(world["engine.values"].Request((1, 2, 3), 4))
    with contextlib.suppress(MemoryError):
        while engine.turn():
            pass
    # Else it would give the tokens that came before, and then wait.
    timer = threading.Timer(5, stream.close)
    timer.start()
    try:
        with pytest.raises(MemoryError):
            stream.result()
    except RuntimeError as error:
        raise AssertionError("the stream does not say what has happened") from error
    finally:
        timer.cancel()


def _claim(world: World, **company: int) -> Any:
    trace, runner = world["parity.trace"], world["parity.runner"]
    told = trace.Company(**{"rows": 4, "rounds": 9, "ragged": 4, "joined": 1, "left": 1, **company})
    answer = replace(world["tests.parity.fakes"].answer(origin="engine"), company=told)
    (claim,) = runner.group_claims([runner.CaseResult(_group(world), None, None, answer)])
    return claim


def rows_that_never_meet_fail(world: World) -> None:
    assert _claim(world).met
    assert not _claim(world, joined=0).met
    assert not _claim(world, left=0).met


def rows_that_never_differ_fail(world: World) -> None:
    assert _claim(world).met
    assert not _claim(world, ragged=0).met


def other_drafts_differ(world: World) -> None:
    answer, trace = world["tests.parity.fakes"].answer, world["parity.trace"]
    known = trace.Trace((False, False, False), ((1, 0),))
    one, other = ((trace.Round((draft,), 0, (97, 98, 99)),) for draft in (97, 98))
    expected = answer(trace=known, rounds=one)
    actual = answer(origin="engine", trace=known, rounds=other)
    assert _compare(world, expected, actual) == "different"
