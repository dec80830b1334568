"""What outlives a request: prompts' states in memory and, durably, in files.

Read `entry.py` (what is kept), `prefixes.py` (which entry serves a prompt), `prompt_cache.py` (the
RAM tier), then `format.py` and `FORMAT.md` (one entry, one file), `store.py` (the SSD tier),
`spill.py`, `durability.py`, `gate.py` and `writer.py` (what is written when, and where),
`identity.py` (what may never be mixed), `inspect.py` and `cli.py` (a folder, for people).

All but `stored.py`, `codecs.py`, `foreign.py`, `prompt_cache.py` and `ssd.py` import no mlx: they
move bytes.
"""
