"""Where and with what a run was made."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

import parity
from oracle import device

ROOT = Path(parity.__file__).parent.parent
_PACKAGES = ("engine", "oracle", "parity", "fixtures")


def environment() -> dict[str, str | int]:
    """Versions, backend, machine and TF32; all of it is reported, none of it is compared.

    And, if there are any, the libraries that were loaded in front of mlx's own: another BLAS rounds
    and takes its time differently.
    """
    made_with: dict[str, str | int] = {
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "python": platform.python_version(),
        "backend": backend(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count() or 0,
        "tf32": "off" if parity.TF32_OFF else "unknown: MLX was imported before parity",
    }
    if preloaded := os.environ.get("LD_PRELOAD") or os.environ.get("DYLD_INSERT_LIBRARIES"):
        made_with["preloaded"] = preloaded
    return made_with


def backend() -> str:
    """The name under which snapshots for this backend alone are kept: cpu-linux-x86_64."""
    device.apply()
    name = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
    return f"{name}-{platform.system().lower()}-{platform.machine().lower()}"


def sources_digest() -> str:
    """sha256 over the Python sources and the fixtures; ties stored results to what made them."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for file in sorted((ROOT / package).rglob("*")):
            if (
                file.suffix in {".py", ".json", ".safetensors"}
                and "__snapshots__" not in file.parts
            ):
                digest.update(str(file.relative_to(ROOT)).encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
