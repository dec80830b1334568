"""What outlives a request: prompts' states in memory and, durably, in files.

Read it in this order:

* the RAM tier: `entry.py` (what is kept), `prefixes.py` (which entry serves a prompt), `stored.py`
  (a state as a value), `prompt_cache.py`
* one entry, one file: `FORMAT.md`, `format.py`, with `header.py`, `tensors.py` and `strict.py`
  (what a file may say), and `files.py` (the system calls)
* the SSD tier: `store.py`, over `shelf.py` (its folders), `catalog.py` (what is known of them) and
  `keeper.py` (which keeps the two in agreement)
* what is written when: `spill.py` (evicted states), `durability.py` (scheduled ones), and in which
  thread: `writer.py`, `gate.py`
* between the tiers: `ssd.py`, with `codecs.py` and `arrays.py` (states as bytes), `foreign.py`
  (files that mlx-lm has saved)
* `identity.py` (what may never be mixed), `inspect.py` and `cli.py` (a folder, for people)

All but `stored.py`, `codecs.py`, `arrays.py`, `foreign.py`, `prompt_cache.py` and `ssd.py` import
no mlx: they move bytes.
"""
