"""What proposes tokens.

Read `source.py` (the seam) first, then `ngram.py`, `two_model.py`, `mtp_rows.py` with
`qwen_mtp.py` and `glm_mtp.py`, and `assistant.py` with
`assistant_model.py`, which borrows the target's keys and values.

Block drafters: `projected_context.py` (the machinery), `context_rows.py` (at the seam), then the
kinds, `dspark.py` and `deepspec.py`.
"""
