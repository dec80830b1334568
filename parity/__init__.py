"""Who is compared, on what, how, and what it said.

Reading order: `cases` and `matrix` (what is asked), `compare` (the verdict), `runner` (one case
after the other), `subjects` or `remote`, and `references` with `served` (the two sides), `probe`
(margins), `snapshots` and `review` (what is kept), `report`, `cli`.

Importing this package switches TF32 off for this process, which works only before MLX is imported:
with it on, float32 products of different widths disagree on some GPUs.
"""

from __future__ import annotations

import os
import sys

TF32_OFF = os.environ.get("MLX_ENABLE_TF32") == "0" or "mlx.core" not in sys.modules
"""Whether MLX was loaded, or will be, with TF32 off; False goes into every report."""

os.environ["MLX_ENABLE_TF32"] = "0"
