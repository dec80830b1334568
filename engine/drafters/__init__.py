"""What proposes tokens.

Read `source.py` (the seam) first, then `ngram.py`, `two_model.py`, and `assistant.py` with
`assistant_model.py`, which borrows the target's keys and values.
"""
