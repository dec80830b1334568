"""One target with one drafter: what mlx-vlm computes for them."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.speculative.drafters import load_drafter, validate_drafter_compatibility
from mlx_vlm.speculative.utils import run_speculative_rounds, speculative_prefill_kwargs

from .arrays import Json, Refused, unpack
from .load import correct_values, load_target, loaded
from .recorder import Recorder

# What each kind is in mlx-vlm: its round loop, and the package of its class.
KINDS = {
    "assistant": ("mtp", "gemma4_assistant"),
    "qwen_mtp": ("mtp", "qwen3_5_mtp"),
    "glm_mtp": ("mtp", "glm_moe_dsa_mtp"),
    "dspark": ("dflash", "dspark"),
    "dflash": ("dflash", "qwen3_dflash"),
    "deepspec": ("dflash", "gemma4_dspark"),
}


class Pair:
    """A target and a drafter for it, loaded and found to fit."""

    def __init__(self, kind: str, target: Path, drafter: Path, *, norm_values: bool) -> None:
        if norm_values and kind != "deepspec":
            raise Refused(f"norm_values is for deepspec, got kind {kind}")
        self.kind = kind
        self.loop, package = KINDS[kind]
        self.target = loaded(target, load_target)
        self.drafter = loaded(drafter, lambda folder: load_drafter(str(folder), kind=self.loop)[0])
        if type(self.drafter).__module__.split(".")[-2] != package:
            raise Refused(f"{drafter} is {type(self.drafter).__name__}, not of kind {kind}")
        try:
            validate_drafter_compatibility(self.target, self.drafter, self.loop)
        except ValueError as error:
            raise Refused(str(error)) from None
        self._require_ports()
        if kind == "deepspec":
            correct_values(self.drafter, norm_values=norm_values)

    def _require_ports(self) -> None:
        """Find out now what mlx-vlm would find out in the middle of a round."""
        output = self.forward(mx.array([[0]]), self.new_cache())
        for name in ("hidden_states", *(["shared_kv_states"] if self.kind == "assistant" else [])):
            if not getattr(output, name, None):
                wanted = "taps" if self.loop == "dflash" else name
                raise Refused(
                    f"{self.kind} needs {wanted}, mlx-vlm's {self.target.model_type} has none"
                )

    def new_cache(self) -> Any:
        if hasattr(self.target, "_position_ids"):  # kept from the request before
            self.target._position_ids = self.target._rope_deltas = None
        return make_prompt_cache(self.target)

    def forward(self, ids: mx.array, cache: Any) -> Any:
        return self.target(ids, cache=cache, **speculative_prefill_kwargs(self.loop, self.drafter))

    def describe(self) -> Json:
        tensors = dict(tree_flatten(self.drafter.parameters()))
        return {
            "drafter_class": type(self.drafter).__name__,
            "target_class": f"{type(self.target).__module__}.{type(self.target).__name__}",
            "caches": [type(cache).__name__ for cache in self.new_cache()],
            "block_size": int(self.drafter.config.block_size),
            "tap_layers": list(getattr(self.drafter.config, "target_layer_ids", ())),
            "tensors": {name: list(value.shape) for name, value in tensors.items()},
        }

    def module(self, request: Json) -> Json:
        self.drafter.reset(self.target)
        if self.loop == "dflash":
            return self._block(request)
        ids = mx.array([request["ids"]])
        hidden = unpack(request["hidden"])[None]
        if self.kind == "assistant":
            rows = [
                self._borrow(request, ids[:, n : n + 1], hidden[:, n : n + 1])
                for n in range(ids.shape[1])
            ]
            return {
                "logits": mx.concatenate([row[1][0] for row in rows]),
                "hidden": mx.concatenate([row[0][0] for row in rows]),
            }
        out = self.drafter._forward_tokens(ids, hidden, mx.int32)
        return {"logits": self.drafter._lm_head_fn(out)[0], "hidden": out[0]}

    def _borrow(self, request: Json, ids: mx.array, hidden: mx.array) -> Any:
        kv = {
            layer_type: (unpack(keys), unpack(values))
            for layer_type, (keys, values) in request["keys_values"].items()
        }
        position, length = request["position"], request["num_valid"]
        self.drafter.set_shared_kv(kv, length, position=position, kv_valid_len=length)
        embedded = self.drafter._input_embed(ids) * self.drafter._input_embed_scale
        inputs = mx.concatenate([embedded, hidden], axis=-1)
        return self.drafter(inputs, kv, mx.array([[position]]))

    def _block(self, request: Json) -> Json:
        taps, depth, anchor = unpack(request["taps"])[None], request["depth"], request["anchor"]
        recorder = Recorder(self.drafter)
        drafts = recorder.draft_block(
            anchor, taps, self.drafter.make_cache(), depth + 1, None, mx.int32
        )
        from_anchor = bool(getattr(self.drafter.config, "sample_from_anchor", False))
        masks = [int(self.drafter.config.mask_token_id)] * (depth - from_anchor)
        hidden = self.drafter._hidden(mx.array([[anchor, *masks]]), taps, self.drafter.make_cache())
        hidden = hidden[:, hidden.shape[1] - depth :]
        answer = {
            "drafts": drafts[0].tolist(),
            "logits": recorder.rounds[0]["logits"],
            "base_logits": self.drafter._logits(hidden)[0],
            "hidden": hidden[0],
        }
        if getattr(self.drafter, "confidence_head", None) is not None:
            answer["confidence"] = self.drafter.confidence(hidden, mx.array([anchor]), drafts)[0]
        return answer

    def rounds(self, request: Json) -> Generator[tuple[Recorder, int]]:
        """Run mlx-vlm's own loop; yields its tokens as they come, the first one included."""
        ids = mx.array([request["prompt"]])
        cache = self.new_cache()
        output = self.forward(ids, cache)
        recorder = Recorder(self.drafter)
        for token, _ in run_speculative_rounds(
            self.target,
            recorder,
            cache,
            ids,
            mx.argmax(output.logits[:, -1], axis=-1),
            None,
            output,
            draft_kind=self.loop,
            max_tokens=request["max_tokens"],
            sampler=lambda logits: mx.argmax(logits, axis=-1),
            draft_block_size=request["depth"] + 1,
            sampler_is_greedy=True,
        ):
            yield recorder, int(token)

    def first_round(self, request: Json) -> Json:
        run = self.rounds({**request, "max_tokens": request["depth"] + 1})
        first = next(run)[1]
        recorder, _ = next(run)
        run.close()
        done = recorder.rounds[0]
        answer = {name: done[name] for name in ("drafts", "logits", "hidden")}
        if self.kind == "assistant":
            answer |= {
                "keys_values": {t: list(kv) for t, kv in done["shared"]["keys_values"].items()},
                "position": done["shared"]["position"],
                "num_valid": done["shared"]["kv_valid_len"],
            }
        elif self.loop == "mtp":
            answer |= recorder.prefill
        return {"first_token": first, **answer}

    def trace(self, request: Json) -> Json:
        tokens: list[int] = []
        rounds: list[Json] = []
        for recorder, token in self.rounds(request):
            tokens.append(token)
            rounds = recorder.rounds
            if token in request["eos_ids"]:
                break
        accepted = [int(count) for count in self.drafter.accept_lens[: len(rounds)]]
        if not request["with_logits"]:
            rounds = [{**done, "logits": None} for done in rounds]
        return {
            "generated": tokens,
            "rounds": [
                {**{n: done[n] for n in ("pending", "drafts", "logits")}, "accepted": count}
                for done, count in zip(rounds, accepted, strict=True)
            ],
        }
