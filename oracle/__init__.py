"""Independent truth about what a model says: mlx-lm's server and generators, and slow models.

Nothing here imports ``engine``. Read in this order:

1. ``models``      the definitions, slow and obvious: no-cache greedy, the n-gram scan, the
                   acceptance walk, and acceptance as an exact distribution in fractions
2. ``processors``  what a request does to logits: a bias and three penalties
3. ``noise``       filters, and which random bits a sampled token sees
4. ``inprocess``   mlx-lm's plain and two-model generators, driven by ids, with a trace
5. ``margins``     how close each decision of a finished run was, measured by replaying its ids
6. ``server``      mlx_lm.server as a subprocess that never outlives its parent (``watch``)
7. ``client``      a completion read from that server: ids, text, log-probabilities, usage
8. ``drafters``    a second oracle, mlx-vlm in its own environment: what drafters compute
9. ``deviations``  where mlx-lm is known to be wrong, as data, each with a reproducer that is run

``python -m oracle deviations`` runs the last.
"""

import os

# Float32 matmuls of different widths agree only without TF32; mlx reads this once, so it is set
# before any module below imports mlx.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
