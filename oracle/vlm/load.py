"""Targets as mlx-vlm's drafters need them, and what one drafter needs mended."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from .arrays import Json, Refused

# Fields that mlx-lm's gemma4_text supplies; the class that drafts need supplies another rotary
# factor (1.0) for full attention.
GEMMA4_ROPE = {
    "full_attention": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
        "rope_type": "proportional",
    },
    "sliding_attention": {
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000.0,
        "rope_type": "default",
    },
}


def loaded(folder: Path, load: Callable[[Path], Any]) -> Any:
    """What ``load`` makes of a folder; whatever mlx-vlm raises there is a fault of the folder."""
    try:
        return load(folder)
    except Exception as error:
        text = " ".join(str(error).split())
        raise Refused(f"mlx-vlm cannot load {folder}: {type(error).__name__}: {text}") from error


def load_target(folder: Path) -> Any:
    """The language model of a folder, of the class that mlx-vlm's drafters can work with."""
    from mlx_vlm.utils import load_model

    config: Json = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] == "gemma4_text":  # the class of that name gives no hidden states
        from mlx_vlm.models.gemma4.config import TextConfig
        from mlx_vlm.models.gemma4.language import LanguageModel

        model = LanguageModel(TextConfig.from_dict({"rope_parameters": GEMMA4_ROPE, **config}))
        weights = model.sanitize(mx.load(str(folder / "model.safetensors")))
        model.load_weights(list(weights.items()))
        model.eval()
        return model
    if config["model_type"] != "qwen3_5" or "text_config" in config:
        loaded = load_model(folder)
    else:  # text only, for which mlx-vlm has another name
        with tempfile.TemporaryDirectory() as renamed:
            for file in folder.iterdir():
                Path(renamed, file.name).symlink_to(file.resolve())
            Path(renamed, "config.json").unlink()
            text = json.dumps({**config, "model_type": "qwen3_5_text"})
            Path(renamed, "config.json").write_text(text, encoding="utf-8")
            loaded = load_model(Path(renamed))
    return getattr(loaded, "language_model", loaded)


def correct_values(drafter: Any, *, norm_values: bool) -> None:
    """Make a Gemma drafter with K = V run, and its values what its reference computes.

    mlx-vlm 0.7.10 looks for the ``v_proj`` that such a checkpoint lacks, and leaves out the norm
    without a scale that the reference (DeepSpec) puts on values.
    """
    if drafter.config.attention_k_eq_v:
        drafter._project_context_kv = lambda hidden: None
    if not norm_values:
        return
    for layer in drafter.layers:
        layer.self_attn._project_kv = normed_projection(
            layer.self_attn, float(drafter.config.rms_norm_eps)
        )
    drafter._project_context_kv = lambda hidden: None


def normed_projection(attention: Any, eps: float) -> Callable[[mx.array], Any]:
    project = attention._project_kv

    def normed(x: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = project(x)
        heads = values.reshape(*values.shape[:-1], attention.n_kv_heads, -1)
        return keys, mx.fast.rms_norm(heads, None, eps).reshape(values.shape)

    return normed
