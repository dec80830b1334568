"""Checkpoints of target and drafter at every boundary between rounds, restored elsewhere."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from engine import BadInput, Target, open_drafter
from engine.requests import make_row_sampling
from engine.sampling import resolve_seed
from engine.state.checkpoint import Attachment, Checkpoint

from .pools import PAIRS, Pool, pool, spec_of, target_of
from .test_membership import Company

DRAFTING = [pair for pair in PAIRS if pair[1] != "off"]

ALONE = (3, 9, 14, 19)
"""Requests of the pool: prompts of 31, 9, 1 and 33 tokens, two of them sampled."""

TOGETHER = (4, 9, 14)
"""Prompts of 32, 9 and 1 tokens with a budget of 24, one of them sampled."""


@cache
def loaded_again(family: str, kind: str) -> Pool:
    """The pool with a target and a drafter read from the files once more."""
    target = Target.load(target_of(family).path)
    return replace(
        pool(family, kind), target=target, drafter=open_drafter(spec_of(family, kind), target)
    )


def resumed(company: Company, into: Pool) -> Company:
    """All rows as a group of their own, from their checkpoints."""
    twin = Company(into)
    twin.prompts = dict(company.prompts)
    for r, number in enumerate(company.numbers):
        twin.join(company.restored(r, into), number)
    return twin


def run(company: Company) -> None:
    """To the end; each row that ends is held to its request's stream alone, drafts included."""
    while company.rounds is not None:
        company.step()


@pytest.mark.parametrize("requests", [*((number,) for number in ALONE), TOGETHER], ids=str)
@pytest.mark.parametrize(("family", "kind"), DRAFTING)
def test_a_generation_goes_on_from_any_boundary(
    family: str, kind: str, requests: tuple[int, ...]
) -> None:
    """`resume`: a row and a group, in the same drafter and, once, in one loaded anew."""
    own, boundaries = pool(family, kind), 0
    company = Company(own)
    for number in requests:
        company.new(number, 2048)
    while company.rounds is not None:
        run(resumed(company, loaded_again(family, kind) if boundaries == 1 else own))
        boundaries += 1
        company.step()
    assert boundaries > 1


@pytest.mark.parametrize(("family", "kind"), DRAFTING)
def test_a_refused_checkpoint_changes_nothing(family: str, kind: str) -> None:
    """`identity-drafter`: of another schema or artifact, or not of that boundary.

    The checkpoint and the rows in flight, whose drafter was asked, go on as before.
    """
    own = pool(family, kind)
    assert own.drafter is not None
    company = Company(own)
    for number in TOGETHER:
        company.new(number, 2048)
    company.step()
    assert company.rounds is not None
    assert company.rounds.draft is not None
    sampling = resolve_seed(own.requests[TOGETHER[0]].sampling)
    for r in range(len(company.numbers)):
        good = company.rounds.draft.capture(r)
        schema, metadata, tensors = (
            good.attachment.schema,
            good.attachment.metadata,
            good.attachment.tensors,
        )
        before = [tensor.tolist() for tensor in tensors]
        for wrong in (
            Checkpoint(good.processed_tokens, Attachment(f"{schema}0", metadata, tensors)),
            Checkpoint(good.processed_tokens, Attachment("dflash-context-v1:0", {}, tensors)),
            Checkpoint(good.processed_tokens + 1, good.attachment),
            Checkpoint(good.processed_tokens, Attachment(schema, metadata, tensors[:-1])),
            Checkpoint(good.processed_tokens, Attachment(schema, metadata, (*tensors, *tensors))),
        ):
            with pytest.raises(BadInput):
                own.drafter.open(make_row_sampling(own.target, sampling), wrong)
        assert [tensor.tolist() for tensor in good.attachment.tensors] == before
    run(resumed(company, own))
    run(company)
