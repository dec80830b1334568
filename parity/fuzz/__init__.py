"""Random sequences of state operations, on our rows and on mlx-lm's caches, held to a list.

Read `worlds.py` (tiny models and their caches), `history.py` (the list of tokens, and what a fresh
cache says after them), `participants.py` (the three that take part), `contracts.py` (what mlx-lm
promises, and which broken promises are known), `rows.py` and `batches.py` (the machines of states),
`namespaces.py`, `entries.py`, `tier_list.py`, `our_tiers.py`, `lru.py` and `tiers.py` (the same for
what keeps states), then `run.py` (seeds and time). `disk/` holds the files of the durable tier to
its promises, without a model.
"""
