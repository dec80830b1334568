"""MLX's device by environment: `MLX_PARITY_DEVICE=cpu` computes on the CPU where a GPU is default.

MLX itself reads no variable for it. `apply` sets this process; run as a script this file sets its
own and then becomes `python -m mlx_lm`, which is how the server follows suit.
"""

import os
import runpy

VARIABLE = "MLX_PARITY_DEVICE"


def apply() -> None:
    """Make the device that the variable names the default; without it nothing changes.

    Raises:
        ValueError: it names none that this machine has.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return
    import mlx.core as mx

    known = {"cpu": mx.cpu, "gpu": mx.gpu}
    if name not in known or not mx.is_available(known[name]):
        raise ValueError(
            f"{VARIABLE} must name a device of this machine (cpu or gpu), got {name!r}"
        )
    mx.set_default_device(known[name])


if __name__ == "__main__":
    apply()
    runpy.run_module("mlx_lm", run_name="__main__", alter_sys=True)
