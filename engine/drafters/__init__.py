"""What proposes tokens. Read `source.py` (the seam) first, then `ngram.py`, then `two_model.py`.

Block drafters: `projected_context.py` (the machinery), `context_rows.py` (at the seam), then the
kinds, `dspark.py` and `deepspec.py`.
"""
