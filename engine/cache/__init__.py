"""What outlives a request: prompts' states in memory and, durably, in files.

Read `entry.py` (what is kept), `prefixes.py` (which entry serves a prompt), `prompt_cache.py` (the
RAM tier), then `format.py` and `FORMAT.md` (one entry, one file), `store.py` (the SSD tier),
`spill.py` and `durability.py` (what is written when), `identity.py` (what may never be mixed).

All but `stored.py`, `codecs.py` and `prompt_cache.py` import no mlx: they move bytes.
"""
