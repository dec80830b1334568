"""How fast the engine is, in ratios of pairs taken in turn: `python -m parity.bench`.

Reading order: `pairs` (what a figure is), `loops` (against mlx-lm's generators), `costs` (a round
against its bare forwards, and the n-gram index), `meter` (what the host waits for), `figures` (the
list of goals), `cli`. `test_operations.py` measures single operations in seconds, with
pytest-benchmark; it knows no pairs, so no ratio comes from it.
"""
