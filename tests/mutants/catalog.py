"""The mutants, as data: one text replaced in one file.

A replacement whose old text is not there exactly once is an error: the mutant has gone stale.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineMutant:
    """A wrong engine. `case` is the case of the matrix that must end different.

    `says` are words that the failure message must hold, beside the case and how to run it.
    """

    name: str
    file: str
    old: str
    new: str
    case: str
    says: tuple[str, ...] = ("round ", "position ", "expected ", "got ")


@dataclass(frozen=True, slots=True)
class LawMutant:
    """A wrong engine that no text shows. `check` names the function in `checks` that must fail."""

    name: str
    file: str
    old: str
    new: str
    check: str


@dataclass(frozen=True, slots=True)
class SuiteMutant:
    """A wrong tester. `check` names the function in `checks` that must fail."""

    name: str
    file: str
    old: str
    new: str
    check: str


GREEDY_3 = "dense/serial/two-model/d3/greedy/repetition"

GROUP = "dense/batch/two-model/d3/{}/b8/{}"

ENGINE = (
    EngineMutant(
        "rollback one too far",
        "engine/rounds.py",
        "self.target.resolve([1 + kept for kept in retained])",
        "self.target.resolve([max(kept, 1) for kept in retained])",
        GREEDY_3,
    ),
    EngineMutant(
        "rollback one too short",
        "engine/state/layouts.py",
        "    cache.offset -= n\n",
        "    cache.offset -= n - 1\n",
        GREEDY_3,
    ),
    EngineMutant(
        "pending fed twice",
        "engine/rounds.py",
        "return mx.concatenate([pending, mx.where(usable, tokens, pending)], axis=1)",
        "self.target.forward(pending)\n"
        "        return mx.concatenate([pending, mx.where(usable, tokens, pending)], axis=1)",
        GREEDY_3,
    ),
    EngineMutant(
        "last prompt token fed twice",
        "engine/prefill.py",
        "len(p.tokens) - p.processed - (not self._full)",
        "len(p.tokens) - p.processed",
        "dense/serial/off/d0/greedy/novel",
    ),
    EngineMutant(
        "EOS emitted",
        "engine/acceptance.py",
        '            return Walk(accepted, tuple(emitted), None, "stop")',
        '            return Walk(accepted, (*emitted, token), None, "stop")',
        "dense/serial/off/d0/greedy/early-stop",
    ),
    EngineMutant(
        "EOS ignored",
        "engine/acceptance.py",
        "if token in eos:",
        "if False:",
        "dense/serial/ngram/d3/greedy/early-stop",
    ),
    EngineMutant(
        "budget overrun",
        "engine/acceptance.py",
        "if len(emitted) >= remaining:",
        "if len(emitted) > remaining:",
        "dense/batch/off/d0/greedy/novel",
    ),
    EngineMutant(
        "draft trusted unverified",
        "engine/acceptance.py",
        "        matches = position < len(draft) and token == draft[position]\n",
        "        matches = position < len(draft)\n"
        "        token = draft[position] if matches else token\n",
        "dense/serial/ngram/d8/greedy/repetition",
    ),
    EngineMutant(
        "correction kept in the state",
        "engine/acceptance.py",
        "retained = min(delivered, walk.accepted)",
        "retained = delivered",
        GREEDY_3,
        says=("broke off", "LawError"),
    ),
    EngineMutant(
        "correction dropped, draft goes on",
        "engine/rounds.py",
        "        row.pending = outcome.pending\n",
        "        row.pending = draft[-1] if draft else outcome.pending\n",
        GREEDY_3,
    ),
    EngineMutant(
        "feed rule broken: the last draft is not fed after a full accept",
        "engine/drafters/two_model.py",
        "self._lag = Lag(full, drafted.tokens[:, depth - 1 :])",
        "self._lag = Lag.none(self.row_count)",
        GREEDY_3,
        says=("round ", "position ", "(drafted, accepted)", "expected ", "got ", "emitted "),
    ),
    EngineMutant(
        "draft state keeps a rejected token",
        "engine/drafters/two_model.py",
        "self._state.resolve([min(kept, max(depth - 1, 0)) for kept in retained])",
        "self._state.resolve([max(depth - 1, 0) for kept in retained])",
        GREEDY_3,
        says=("round ", "position ", "(drafted, accepted)", "expected ", "got ", "emitted "),
    ),
    EngineMutant(
        "stop string missed unless one token holds it",
        "engine/stops.py",
        "if self._matcher.advance(token) or self._find_stop() is not None:",
        "if self._tokenizer.decode([token]) in self._stop_strings:",
        "dense/serial/two-model/d8/greedy/stop-inside",
    ),
    EngineMutant(
        "stop string left in the text",
        "engine/stops.py",
        "            self._text = self._text[:cut]\n",
        "",
        "dense/serial/two-model/d8/greedy/stop-inside",
        says=("text",),
    ),
    EngineMutant(
        "step key reused across a window",
        "engine/sampling.py",
        "[step_key(self._seed, step, stream) for step in steps]",
        "[step_key(self._seed, steps[0], stream) for step in steps]",
        "dense/serial/two-model/d3/temperature/novel",
    ),
    EngineMutant(
        "steps count rounds instead of tokens",
        "engine/rounds.py",
        "row.step += delivered",
        "row.step += 1",
        "dense/serial/two-model/d3/temperature/one-token",
    ),
    EngineMutant(
        "sequential draws position by position",
        "engine/sampling.py",
        "if not self._sampling.logits.active:",
        "if False:",
        "dense/serial/two-model/d3/temperature+sequential/novel",
    ),
    EngineMutant(
        "filter ignored",
        "engine/sampling.py",
        "        logprobs = apply_top_k(logprobs, sampling.top_k)\n",
        "        pass\n",
        "dense/serial/off/d0/top-k/one-token",
    ),
    EngineMutant(
        "log-probabilities of the position before",
        "engine/rounds.py",
        "        return Flight(draft, samples, chosen, chains)\n",
        "        return Flight(draft, samples, mx.roll(chosen, 1, axis=1), chains)\n",
        GREEDY_3,
        says=("position ", "logprob"),
    ),
    EngineMutant(
        "EOS missing from usage",
        "engine/collector.py",
        "len(self._taken) + ended_by_eos",
        "len(self._taken)",
        "dense/serial/off/d0/greedy/early-stop",
        says=("completion tokens",),
    ),
    EngineMutant(
        "rows swap their states when one leaves",
        "engine/rounds.py",
        "            self.target.selected(keep),\n            None if self.draft",
        "            self.target.selected(keep[::-1]),\n            None if self.draft",
        GROUP.format("greedy", "repetition"),
    ),
    EngineMutant(
        "rows swap their drafter's states when one leaves",
        "engine/rounds.py",
        "None if self.draft is None else self.draft.selected(keep)",
        "None if self.draft is None else self.draft.selected(keep[::-1])",
        GROUP.format("greedy", "repetition"),
    ),
    EngineMutant(
        "rows swap their random keys when one leaves",
        "engine/rounds.py",
        "            self.sampling.selected(keep),\n            [self.rows",
        "            self.sampling.selected(keep[::-1]),\n            [self.rows",
        GROUP.format("top-p", "counting"),
    ),
    EngineMutant(
        "a newcomer gets the chunk at its neighbour's place",
        "engine/prefill.py",
        "list(p.tokens[p.processed : p.processed + width]) for p in self.prompts",
        "list(p.tokens[(at := self.prompts[0].processed) : at + width]) for p in self.prompts",
        "dense/batch/ngram/d3/greedy/b4/repetition",
    ),
    EngineMutant(
        "rows are joined in another order than their states",
        "engine/rounds.py",
        "            [*self.rows, *other.rows],\n",
        "            [*other.rows, *self.rows],\n",
        GROUP.format("greedy", "utf8"),
        says=("broke off",),
    ),
    EngineMutant(
        "every row accepts as many as the least",
        "engine/rounds.py",
        "            draft = drafts[r][: flight.draft.lengths[r]]\n",
        "            draft = drafts[r][: min(flight.draft.lengths)]\n",
        GROUP.format("greedy", "novel"),
    ),
)

LAWS = (
    LawMutant(
        "tables of a drafter left lazy",
        "engine/drafters/weights.py",
        "    settle(module)\n",
        "    mx.eval(module.parameters())\n",
        "a_drafter_is_evaluated_where_it_is_opened",
    ),
    LawMutant(
        "tables of a target left lazy",
        "engine/target.py",
        "        settle(model)\n",
        "",
        "a_target_is_evaluated_where_it_is_loaded",
    ),
    LawMutant(
        "drafter serves a target that it does not read",
        "engine/requests.py",
        "own is not None and own is not target",
        "own is not None and own.path != target.path",
        "a_reader_serves_its_own_target_alone",
    ),
    LawMutant(
        "foreign drafter mounted on an engine",
        "engine/service.py",
        "            require_its_target(target, drafter_for(target, drafter))\n",
        "",
        "a_reader_is_mounted_on_its_own_target_alone",
    ),
    LawMutant(
        "each row decodes alone",
        "engine/service.py",
        'alone = None if shares and sampling.rng == "positional" else number',
        "alone = number",
        "rows_share_rounds",
    ),
    LawMutant(
        "what was being worked on is lost",
        "engine/groups.py",
        "                member.stream.close(error)\n            raise\n",
        "                pass\n            raise\n",
        "no_reader_waits_for_ever",
    ),
    LawMutant(
        "the round launched ahead is not taken back",
        "engine/rounds.py",
        "            self.target.resolve([0] * len(self.rows))\n",
        "            self.target.resolve([1] * len(self.rows))\n",
        "position_after_an_early_close",
    ),
    LawMutant(
        "held tokens miss the pending one",
        "engine/rounds.py",
        "row.held += [row.pending, *draft[: outcome.retained]]",
        "row.held += draft[: outcome.retained]",
        "position_after_an_early_close",
    ),
    LawMutant(
        "a broken state stays usable",
        "engine/rounds.py",
        "            self.target.poison(error)\n",
        "",
        "poison_after_a_failed_commit",
    ),
    LawMutant(
        "n-gram history keeps rejected drafts",
        "engine/drafters/ngram.py",
        "history.push(draft[:kept])",
        "history.push(draft)",
        "ngram_history_after_a_rejection",
    ),
    LawMutant(
        "a head keeps the rows of rejected drafts",
        "engine/drafters/mtp_rows.py",
        "[min(kept + 1, now.made) for kept in retained]",
        "[now.made for kept in retained]",
        "rows_of_a_head",
    ),
    LawMutant(
        "a fully accepted draft has no row",
        "engine/drafters/mtp_rows.py",
        "lacking = [max(kept - first, 0) for kept in retained]",
        "lacking = [0 for kept in retained]",
        "rows_of_a_head",
    ),
    LawMutant(
        "a row that begins later stands with those that began before",
        "engine/drafters/mtp_rows.py",
        "            before = mx.where(begun[..., None], before, hidden)\n",
        "",
        "rows_of_a_head",
    ),
    LawMutant(
        "a layer keeps rows made of its own guesses",
        "engine/drafters/mtp_rows.py",
        "[min(1, now.made)] * self.row_count, 0",
        "[min(2, now.made)] * self.row_count, 1",
        "rows_of_an_own_layer",
    ),
    LawMutant(
        "a head drafts on from the pending token's hidden state",
        "engine/drafters/mtp_rows.py",
        "mx.take_along_axis(hidden, mx.array(list(retained))[:, None, None], axis=1)",
        "hidden[:, :1]",
        "rows_of_an_own_layer",
    ),
    LawMutant(
        "an over-eager drafter is not reported",
        "engine/rounds.py",
        "or max(draft.lengths) > depth",
        "or False",
        "too_many_drafts_are_reported",
    ),
    LawMutant(
        "processors see no drafts",
        "engine/processors.py",
        "seen[: len(known) + position + 1]",
        "seen[: len(known) + 1]",
        "lossless_with_penalties",
    ),
    LawMutant(
        "processors see no prompt",
        "engine/rounds.py",
        "known.append(row.held[start:] + [row.pending] * steps_ahead)",
        "known.append([])",
        "each_prompt_token_is_penalised",
    ),
    LawMutant(
        "processors of a round launched ahead miss the token in flight",
        "engine/rounds.py",
        "known.append(row.held[start:] + [row.pending] * steps_ahead)",
        "known.append(row.held[start:])",
        "lossless_with_penalties",
    ),
    LawMutant(
        "processors see one token too few",
        "engine/rounds.py",
        "start = 0 if reach is None else max(0, len(row.held) - reach)",
        "start = len(row.held) if reach is None else max(0, len(row.held) - reach // 2)",
        "each_prompt_token_is_penalised",
    ),
    LawMutant(
        "log-probabilities are of the raw logits",
        "engine/sampling.py",
        "            logits = mx.stack(rows)\n",
        "            return self.sample(log_softmax(mx.stack(rows)), steps), log_softmax(logits)\n",
        "a_bias_shows_in_the_logprobs",
    ),
    LawMutant(
        "XTC tosses one coin for a window",
        "engine/sampling.py",
        "coins = toss(self._keys(steps, XTC_STREAM))[:, None]",
        "coins = toss(self._keys(steps[:1], XTC_STREAM))[:, None]",
        "lossless_with_xtc",
    ),
    LawMutant(
        "XTC's coin comes from the token stream",
        "engine/sampling.py",
        "coins = toss(self._keys(steps, XTC_STREAM))[:, None]",
        "coins = toss(self._keys(steps, TOKEN_STREAM))[:, None]",
        "the_coin_has_a_key_of_its_own",
    ),
    LawMutant(
        "XTC drops the newline and the EOS",
        "engine/requests.py",
        "make_row_sampler(sampling, target.xtc_exempt_ids)",
        "make_row_sampler(sampling)",
        "xtc_never_drops_a_newline",
    ),
    LawMutant(
        "a rolled-back ring keeps one rejected token",
        "engine/state/layouts.py",
        "kept = slice(start, start + at.kept)",
        "kept = slice(start, start + at.kept + 1)",
        "rollback_of_a_ring",
    ),
    LawMutant(
        "a mark is the array that is written to",
        "engine/state/layouts.py",
        "    return copy.copy(array)\n",
        "    return array\n",
        "rollback_of_a_ring",
    ),
    LawMutant(
        "a recurrent state is not restored",
        "engine/state/layouts.py",
        "    cache.cache, cache.left_padding, cache.lengths = states[forwards[0]]\n",
        "    return\n",
        "rollback_of_recurrent_layers",
    ),
    LawMutant(
        "a replay misses the convolution state",
        "engine/state/rows.py",
        "                replay(calls, width, kept, batch)\n",
        "                before = [leaf[0] for leaf in self._recurrent()]\n"
        "                replay(calls, width, kept, batch)\n"
        "                for leaf, slot in zip(self._recurrent(), before):\n"
        "                    leaf[0] = slot\n",
        "rollback_of_recurrent_layers",
    ),
    LawMutant(
        "keys that a replay appends are there already",
        "engine/state/rows.py",
        "whole if number in rewritten else bounds",
        "bounds",
        "rollback_of_recurrent_layers",
    ),
    LawMutant(
        "a recorded input is not cut",
        "engine/state/replay.py",
        "        return value[:, :kept]\n",
        "        return value\n",
        "rollback_of_recurrent_layers",
    ),
    LawMutant(
        "the probe overlooks a wrong replay",
        "engine/state/probe.py",
        "            if (error := _distance(tried, truth, rewritten)) is not None:",
        "            if (error := _distance(truth, truth, rewritten)) is not None:",
        "a_wrong_replay_is_refused",
    ),
    LawMutant(
        "the dropped front of a chunk stays dropped",
        "engine/state/layouts.py",
        "        if arrays is not None:\n",
        "        if False:\n",
        "rollback_of_a_chunk",
    ),
    LawMutant(
        "rejected tokens count for quantization",
        "engine/state/rows.py",
        "            if self._open is None:\n                self._settle()\n",
        "            self._settle()\n",
        "quantization_waits_for_what_is_kept",
    ),
    LawMutant(
        "a window runs past the start of quantization",
        "engine/rounds.py",
        "min(self.depth, row.remaining, self.depth if longest is None else longest - 1)",
        "min(self.depth, row.remaining)",
        "quantization_waits_for_what_is_kept",
    ),
    LawMutant(
        "a head's checkpoint holds the first row's state",
        "engine/drafters/mtp_rows.py",
        "hidden = mx.contiguous(self._hidden[row : row + 1])",
        "hidden = mx.contiguous(self._hidden[:1])",
        "rows_of_a_head",
    ),
    LawMutant(
        "an assistant goes on from a rejected draft",
        "engine/drafters/assistant.py",
        "self._advance([kept + 1 for kept in retained], retained, taps)",
        "self._advance([kept + 1 for kept in retained], "
        "[taps[0].shape[1] - 1] * len(retained), taps)",
        "assistant_state_after_a_rejection",
    ),
    LawMutant(
        "all rows of an assistant stand where the first does",
        "engine/drafters/assistant.py",
        "return places[0] if len(set(places)) == 1 else mx.array(places)",
        "return places[0]",
        "assistant_rows_have_their_own_positions",
    ),
    LawMutant(
        "what stands behind a row's end is lent",
        "engine/state/donors.py",
        "        shown &= columns < mx.array(self.held)[:, None]\n",
        "",
        "lent_keys_end_with_the_row",
    ),
    LawMutant(
        "a block sees what stands behind a shorter row's context",
        "engine/drafters/projected_context.py",
        "        if len(set(self.held)) == 1:\n            return None\n",
        "        return None\n",
        "blocks_of_a_ragged_group",
    ),
    LawMutant(
        "all blocks begin where the first row's does",
        "engine/drafters/projected_context.py",
        "return self.held[0] if len(set(self.held)) == 1 else mx.array(self.held)",
        "return self.held[0]",
        "blocks_of_a_ragged_group",
    ),
    LawMutant(
        "a ragged commit keeps rejected columns",
        "engine/drafters/context_rows.py",
        "            self._state.resolve(kept)\n",
        "            self._state.resolve([width] * len(kept))\n",
        "blocks_of_a_ragged_group",
    ),
    LawMutant(
        "pruning goes on behind an unsure draft",
        "engine/drafters/block_heads.py",
        "return [*sure, False].index(False)",
        "return sum(sure)",
        "pruning_ends_at_the_first_unsure_draft",
    ),
    LawMutant(
        "DeepSpec's values are not normed",
        "engine/drafters/block_layers.py",
        "return keys, mx.fast.rms_norm(projected, None, self.eps)",
        "return keys, projected",
        "deepspec_norms_its_values",
    ),
)

TESTERS = (
    SuiteMutant(
        "the comparator skips the last token",
        "parity/compare.py",
        "for position in range(start, shared):",
        "for position in range(start, shared - 1):",
        "last_token_differs",
    ),
    SuiteMutant(
        "the comparator ignores length",
        "parity/compare.py",
        "    if len(expected.ids) != len(actual.ids):\n        return shared\n",
        "",
        "one_token_is_missing",
    ),
    SuiteMutant(
        "inconclusive is taken for equal",
        "parity/compare.py",
        "        return Verdict.INCONCLUSIVE\n    if any(",
        "        return Verdict.EQUAL\n    if any(",
        "most_is_unchecked",
    ),
    SuiteMutant(
        "a stream is compared with itself",
        "parity/compare.py",
        "    if expected.origin == actual.origin:\n",
        "    if False:\n",
        "a_stream_meets_itself",
    ),
    SuiteMutant(
        "a tie counts as equal",
        "parity/compare.py",
        "    if ties and not tolerance.ties_allowed:\n        return Verdict.DIFFERENT\n",
        "",
        "a_tie_in_float32_fails",
    ),
    SuiteMutant(
        "every difference is a near tie",
        "parity/compare.py",
        "if measured.margin < tolerance.verdict_floor(measured.top_logit):",
        "if measured.margin < float('inf'):",
        "a_wide_margin_is_no_tie",
    ),
    SuiteMutant(
        "the finish reason is ignored",
        "parity/compare.py",
        "    if expected.finish_reason != actual.finish_reason:\n        return shared\n",
        "",
        "finish_reason_differs",
    ),
    SuiteMutant(
        "the text is ignored",
        "parity/compare.py",
        "    if not expected.may_read(actual.text, mapped=actual.mapped):\n",
        "    if False:\n",
        "text_differs",
    ),
    SuiteMutant(
        "NaN log-probabilities pass",
        "parity/compare.py",
        "if not difference <= tolerance.logprobs:",
        "if difference > tolerance.logprobs:",
        "a_logprob_is_nan",
    ),
    SuiteMutant(
        "a dead server is swallowed",
        "parity/runner.py",
        "return oracle.expected(case)\n    except Unusable:\n        raise\n",
        "return oracle.expected(case)\n"
        "    except Unusable as error:\n        raise _BrokeOff(_said(error)) from error\n",
        "a_server_dies",
    ),
    SuiteMutant(
        "a group that shares nothing passes",
        "parity/runner.py",
        "    met = company.joined > 0 and company.left > 0\n",
        "    met = True\n",
        "rows_that_never_meet_fail",
    ),
    SuiteMutant(
        "ragged rounds are not asked for",
        "parity/runner.py",
        "        met = met and company.ragged > 0\n",
        "",
        "rows_that_never_differ_fail",
    ),
    SuiteMutant(
        "drafts may differ if their numbers do not",
        "parity/compare.py",
        "        if old.draft != new.draft:\n",
        "        if False:\n",
        "other_drafts_differ",
    ),
    SuiteMutant(
        "a failed case exits 0",
        "parity/report/words.py",
        "        return SOME_DIFFERENT\n    if not all(",
        "        return ALL_EQUAL\n    if not all(",
        "a_difference_exits_1",
    ),
)
