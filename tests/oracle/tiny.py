"""Model folders made on the spot, so that the oracle's tests need nothing that was trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = 0
VOCABULARY = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
SHARP = {"o_proj": 8, "down_proj": 8, "q_proj": 4, "k_proj": 4}  # so that context decides
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_pair(folder: Path) -> tuple[Path, Path]:
    """A random target and a draft model that is the target plus noise."""
    return _write_random(folder / "target", 0.0), _write_random(folder / "draft", 0.08)


def write_chains(folder: Path, chains: Sequence[bytes]) -> Path:
    """A model that continues each chain byte by byte from any of its bytes, then says EOS.

    No byte may stand in two places. Attention and MLP add nothing, embeddings are one-hot, and row
    t of the head looks for the byte before t; a byte of no chain repeats itself.
    """
    config = _config(hidden_size=512, num_hidden_layers=1, tie_word_embeddings=False)
    successors = {token: token for token in range(len(VOCABULARY))}
    for chain in chains:
        ids = [byte_id(byte) for byte in chain]
        successors |= dict(zip(ids, [*ids[1:], EOS], strict=True))
    size = (len(VOCABULARY), 512)
    weights = dict(_weights(config))
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] = mx.zeros_like(weights[name])
    weights["model.embed_tokens.weight"] = mx.eye(*size)
    head = mx.zeros(size)
    for token, successor in successors.items():
        head[successor, token] = 1.0
    weights["lm_head.weight"] = head
    return _write(folder, config, weights)


def byte_id(byte: int) -> int:
    """The id of one byte in GPT-2's order: printable bytes stand for themselves, others follow."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return VOCABULARY.index(chr(byte if byte in printable else 256 + others.index(byte)))


def _write_random(folder: Path, noise: float) -> Path:
    config = _config(hidden_size=64, num_hidden_layers=2, tie_word_embeddings=True)
    weights = {}
    for name, weight in _weights(config):
        sharp = next((factor for part, factor in SHARP.items() if part in name), 1)
        weights[name] = sharp * weight
        weights[name] += noise * mx.std(weights[name]) * mx.random.normal(weight.shape)
    return _write(folder, config, weights)


def _config(**sizes: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(VOCABULARY),
        "eos_token_id": EOS,
        **sizes,
    }


def _weights(config: dict[str, object]) -> list[tuple[str, mx.array]]:
    mx.random.seed(0)
    named = tree_flatten(Model(ModelArgs.from_dict(config)).parameters())
    assert isinstance(named, list)
    return named


def _write(folder: Path, config: dict[str, object], weights: dict[str, mx.array]) -> Path:
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(VOCABULARY)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=tokenizer, eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )
    wrapped.save_pretrained(str(folder))
    return folder
