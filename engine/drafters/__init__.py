"""What proposes tokens. Read `source.py` (the seam) first, then `ngram.py`, then `two_model.py`."""
