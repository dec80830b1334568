"""The durable tier under crashes, faults, kills, races and hostile files. No mlx here.

Read `small.py` (entries that say what they hold), `contract.py` (what any store on a folder owes),
then one line of `rows.py` at a time: each is a promise, the counts at which CI and the nightly run
hold it, and the module that does so: `recording.py` and `images.py` (loss of power), `children.py`
and `kills.py` (killed processes), `faults.py` (failing calls), `hostile.py` (headers), `races.py`
(two at once), `model.py` (random operations against a dict).
"""
