"""How fast the engine is, in ratios of pairs taken in turn: `python -m parity.bench`.

Reading order: `pairs` (what a figure is), `loops` (against mlx-lm's generators), `costs` (a round
against its bare forwards, and the n-gram index), `groups` (rows that share forwards), `cheap`
(drafts that cost little and are mostly right), `tiers` (states stored and restored), `meter` (what
the host waits for), `figures` (the list of goals), `report` (as a table and as JSON), `cli`.
`test_operations.py` measures single operations in seconds, with pytest-benchmark; it knows no
pairs, so no ratio comes from it.
"""
