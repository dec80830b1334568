"""What a model remembers between forwards, and how it forgets rejected tokens exactly.

Read `layouts.py` (what each cache kind can do), then `native.py` (rows on mlx-lm's own caches),
`replay.py` and `probe.py` (recurrent layers), `quantize.py` (keys and values in few bits), then
`checkpoint.py` (owned copies of one row at one boundary).
"""
