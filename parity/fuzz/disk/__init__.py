"""The durable tier under crashes, faults, kills, races and hostile files. No mlx here.

Read `small.py` (entries that say what they hold), `model.py` (the store that is obviously right),
`plays.py` (random operations) and `contract.py` (what any store on a folder owes); then one line of
`rows.py` at a time: each is a promise, the counts at which CI and the nightly run hold it, and the
module that does so. `sequences.py`: operations on the store and the model; `recording.py`,
`images.py` and `crashes.py`: loss of power; `children.py`, `jobs.py`, `kills.py` and `flushes.py`:
processes killed or told to end; `faults.py`, `failing.py` and `full_disk.py`: failing calls;
`damage.py` and `hostile.py`: files that are not what was written; `intruders.py` and `names.py`:
what others put there, and what files are called; `races.py`: two at once. `budget.py` counts and
times a row, `night.py` runs them all from where the last night ended.
"""
