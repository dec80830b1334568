"""The Gemma 4 assistant's network: queries over keys and values that are the target's.

Source: `gemma4_assistant` of Hugging Face transformers, whose layers are those of `gemma4_text`
with every layer's keys and values shared; here they are mlx-lm's. Which of its two heads an
artifact has is told by its tensors; what the config says about that is not trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs

from ..errors import BadInput
from ..state.donors import Lent
from .weights import Quantization, fill, tensors_of

FULL, SLIDING = "full_attention", "sliding_attention"

NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "vocab_size",
    "sliding_window",
    "layer_types",
)
"""What `text_config` must say: a default in its place would be another model's."""

CENTROIDS, ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


@dataclass(frozen=True, slots=True)
class Config:
    """What an assistant's config.json says.

    `hidden_size` is the target's; `kinds` are the types of layers that occur.
    """

    args: ModelArgs
    kinds: tuple[str, ...]
    hidden_size: int
    depth: int
    top_centroids: int
    quantization: Quantization | None
    tied: bool

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any]) -> Config:
        """Check a config.

        Raises:
            BadInput: something is missing, or it is of a variant that this network is not.
        """
        text = config.get("text_config") or {}
        if missing := [name for name in NEEDED if name not in text]:
            raise BadInput(f"drafter {folder}: text_config names no {missing[0]}")
        if "backbone_hidden_size" not in config:
            raise BadInput(f"drafter {folder}: config.json names no backbone_hidden_size")
        layers, kinds = text["num_hidden_layers"], text["layer_types"]
        variants = {
            "hidden_size_per_layer_input": (0,),
            "enable_moe_block": (False,),
            "hidden_activation": ("gelu_pytorch_tanh",),
            # 0 is all here: there is nothing else to take keys from.
            "num_kv_shared_layers": (layers, 0),
        }
        for name, known in variants.items():
            if (value := text.get(name) or known[0]) not in known:
                raise BadInput(f"drafter {folder}: {name} must be {known[0]}, got {value}")
        if len(kinds) != layers or not set(kinds) <= {FULL, SLIDING}:
            raise BadInput(
                f"drafter {folder}: layer_types must be {layers} of {FULL} and {SLIDING}, "
                f"got {kinds}"
            )
        args = ModelArgs.from_dict(
            {**text, "num_kv_shared_layers": layers, "hidden_size_per_layer_input": 0}
        )
        return cls(
            args,
            tuple(kind for kind in (SLIDING, FULL) if kind in kinds),
            config["backbone_hidden_size"],
            # It counts the pending token, too.
            max(1, config.get("block_size", 4) - 1),
            config.get("centroid_intermediate_top_k", 32),
            Quantization.read(config, f"drafter {folder}"),
            bool(config.get("tie_word_embeddings", True)),
        )


class Centroids(Module):
    """Scores only the tokens of the best `top` of C centroids, V / C tokens each."""

    def __init__(self, width: int, centroids: int, top: int, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        self._top = min(top, centroids)
        self.centroids = Linear(width, centroids, bias=False)
        self.token_ordering = mx.zeros((vocab_size,), mx.int32)

    def __call__(self, state: mx.array) -> mx.array:
        """The ids [B, 1, n] that come into question for states [B, 1, D]."""
        scores = self.centroids(state)
        best = mx.argpartition(scores, kth=-self._top, axis=-1)[..., -self._top :]
        members = self.token_ordering.reshape(scores.shape[-1], -1)[best]
        return members.reshape(*state.shape[:2], -1)


class Layers(Module):
    """What the released names hold under `model.`"""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        self.embed_tokens = Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, number) for number in range(args.num_hidden_layers)]
        self.norm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class Assistant(Module):
    """The whole network. B rows, one token each; D is its own width, H the target's."""

    def __init__(self, config: Config, num_centroids: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        args = config.args
        self.model = Layers(args)
        self.pre_projection = Linear(2 * config.hidden_size, args.hidden_size, bias=False)
        self.post_projection = Linear(args.hidden_size, config.hidden_size, bias=False)
        self._has_centroids = num_centroids is not None
        if num_centroids is not None:
            self.masked_embedding = Centroids(
                args.hidden_size, num_centroids, config.top_centroids, args.vocab_size
            )

    def __call__(
        self,
        embedded: mx.array,
        hidden: mx.array,
        lent: Mapping[str, Lent],
        position: int | mx.array,
    ) -> tuple[mx.array, mx.array]:
        """States [B, 1, D] for the head, and the hidden states [B, 1, H] of the next step.

        `embedded` [B, 1, H] is the target's embedding of each row's last token, `hidden` what came
        of the one before it; `lent` by layer type; `position` of all rows or of each, [B].
        """
        state = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
        for layer in self.model.layers:
            view = lent[layer.layer_type]
            state, _, _ = layer(
                state, view.mask, shared_kv=(view.keys, view.values), offset=position
            )
        state = self.model.norm(state)
        return state, self.post_projection(state)

    def scores(self, state: mx.array) -> tuple[mx.array | None, mx.array]:
        """Token ids [B, 1, n] and their logits; no ids: those of the whole vocabulary in order."""
        embedding = self.model.embed_tokens
        if not self._has_centroids:
            return None, embedding.as_linear(state)
        ids = self.masked_embedding(state)
        return ids, (embedding(ids) @ state[..., None])[..., 0]

    def choose(self, state: mx.array) -> mx.array:
        """The best ids [B, 1], uint32."""
        ids, logits = self.scores(state)
        best = mx.argmax(logits, axis=-1)
        if ids is not None:
            best = mx.take_along_axis(ids, best[..., None], axis=-1)[..., 0]
        return best.astype(mx.uint32)


def load(folder: Path, config: Config) -> Any:
    """Read the weights under their released names, each dense or affine-quantized.

    Raises:
        BadInput: a tensor is missing, unknown, or of another shape than the config says.
    """
    where, tensors = f"drafter {folder}", tensors_of(folder)
    if config.tied:
        tensors = {name: t for name, t in tensors.items() if not name.startswith("lm_head.")}
    centroids = None
    if CENTROIDS in tensors or ORDERING in tensors:
        if CENTROIDS not in tensors:
            raise BadInput(f"{where} lacks tensors: {CENTROIDS}")
        centroids, vocab_size = tensors[CENTROIDS].shape[0], config.args.vocab_size
        if vocab_size % centroids:
            raise BadInput(f"{where}: {centroids} centroids do not divide {vocab_size} tokens")
        if ORDERING in tensors:
            tensors[ORDERING] = tensors[ORDERING].astype(mx.int32)
    model: Any = Assistant(config, centroids)
    fill(model, tensors, config.quantization, where)
    if centroids is not None:
        ordering: mx.array = model.masked_embedding.token_ordering
        if not mx.array_equal(mx.sort(ordering), mx.arange(ordering.shape[0])):
            raise BadInput(f"{where}: {ORDERING} does not hold every token once")
    return model
