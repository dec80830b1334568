"""What a model remembers between forwards, and how it forgets rejected tokens exactly.

Read `layouts.py` (what each cache kind can do) and `columns.py` (keys and values of rows that end
at different places), then `rows.py` (the rows of a group) and `membership.py` (how they join and
leave), `replay.py` and `probe.py` (recurrent layers), `quantize.py` (keys and values in few bits),
`donors.py` (what a drafter may read), then `checkpoint.py`, `forms.py` and `kinds.py` (owned copies
of one row at one boundary) and `memory.py` (what a row comes to).
"""
