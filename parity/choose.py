"""Choose the matrix's prompts among the fixtures' candidates: `python -m parity.choose`.

A prompt serves if a wrong cache shows in its text, if its drafts are accepted in several ways, and,
scored here, if sampling leads away from the greedy text while every decision keeps clear of a tie.
It rewrites `fixtures/prompts/dense.json`; the snapshots of the matrix are then recorded anew.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import fixtures
from fixtures import Kind, select
from fixtures.select import Candidate
from oracle.inprocess import Loaded, PositionalSampler, load, plain, sequential_sampler
from oracle.margins import sampled_margins
from oracle.noise import Policy, Positional, Sequential
from parity.cases import MAX_TOKENS, SAMPLINGS, Sampling
from parity.probe import filters_of

CLEAR = 1e-2
MIN_ACCEPT_COUNTS = 3


def serves(candidate: Candidate) -> bool:
    """Whether a candidate is worth scoring."""
    varied = len(set(candidate.rounds)) >= MIN_ACCEPT_COUNTS
    return (varied or candidate.kind is Kind.EARLY_STOP) and (
        bool(candidate.damages) or candidate.kind is Kind.ONE_TOKEN
    )


def score(target: Loaded, candidate: Candidate) -> float:
    """How many sampled streams leave the greedy text, and how many are clear; then by how much."""
    prompt = target.encode(candidate.text)
    greedy = plain(target, prompt, MAX_TOKENS).tokens
    drawn = [sampling for sampling in SAMPLINGS if sampling.mode != "greedy"]
    streams = [stream(target, prompt, sampling) for sampling in drawn]
    leaving = sum(tokens != greedy for tokens, _ in streams)
    clear = sum(margin >= CLEAR for _, margin in streams)
    return leaving + clear + min(margin for _, margin in streams)


def stream(
    target: Loaded, prompt: Sequence[int], sampling: Sampling
) -> tuple[tuple[int, ...], float]:
    """The content of mlx-lm's plain stream under a sampling, and its smallest margin."""
    filters = filters_of(sampling, target.xtc_special_tokens)
    policy: Policy = Sequential(sampling.seed)
    sampler = sequential_sampler(sampling.seed, filters)
    if sampling.mode == "positional":
        policy = Positional(sampling.seed)
        sampler = PositionalSampler(sampling.seed, filters)
    run = plain(target, prompt, MAX_TOKENS, sampler)
    return run.tokens, min(sampled_margins(target.model, prompt, run.generated, filters, policy))


def main() -> None:
    """Score all candidates that serve and write the best of each kind."""
    target = load(fixtures.target_dir("dense"))
    candidates = select.read()
    scores = {c.name: score(target, c) for c in candidates if serves(c)}
    chosen = select.choose([c for c in candidates if c.name in scores], lambda c: scores[c.name])
    select.write(candidates, chosen)
    lines = [f"{p.kind}: {p.name}, score {scores[p.name]:.3f}" for p in chosen]
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
