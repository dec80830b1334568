"""Hypothesis strategies for how a request may sample.

Numbers that enter mlx-lm's compiled filters come from short lists: each new one compiles a kernel.
"""

from __future__ import annotations

from hypothesis import strategies as st

from engine import LogitsOptions, Sampling

V = 288
"""Vocabulary of the tiny target."""

CONTEXT_SIZES = st.sampled_from([0, 1, 2, 5, 20])
LOGITS = st.builds(
    LogitsOptions,
    repetition_penalty=st.sampled_from([0.0, 0.7, 1.2, 2.0]),
    repetition_context_size=CONTEXT_SIZES,
    presence_penalty=st.sampled_from([0.0, -0.5, 2.0]),
    presence_context_size=CONTEXT_SIZES,
    frequency_penalty=st.sampled_from([0.0, -0.2, 1.5]),
    frequency_context_size=CONTEXT_SIZES,
    logit_bias=st.dictionaries(
        st.integers(0, V - 1), st.sampled_from([-float("inf"), -3.0, 2.5, 8.0]), max_size=4
    ).map(lambda pairs: tuple(pairs.items())),
)


def drawn(logits: st.SearchStrategy[LogitsOptions]) -> st.SearchStrategy[Sampling]:
    """Temperature above 0, every filter on or off."""
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.5, 0.8, 1.5]),
        top_p=st.sampled_from([0.0, 0.9]),
        top_k=st.sampled_from([0, 5]),
        min_p=st.sampled_from([0.0, 0.05]),
        seed=st.integers(0, 2**64 - 1),
        xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
        xtc_threshold=st.sampled_from([0.0, 0.1, 0.3]),
        logits=logits,
    )


SAMPLINGS = st.one_of(st.just(Sampling()), drawn(st.just(LogitsOptions())))
PROCESSED = st.one_of(st.builds(Sampling, logits=LOGITS), drawn(LOGITS))
"""Greedy too, with penalties and biases."""
