"""What goes in and out of a drafter while mlx-vlm's round loop uses it."""

from typing import Any

import mlx.core as mx

from .arrays import Json


class Recorder:
    """A drafter as mlx-vlm's round loop sees it, that notes what goes in and out.

    It hides the fused argmax paths, so that each draft token is taken from logits by ``sampler``,
    and the rules that change the block size by acceptance. All else is the drafter's own.
    """

    supports_greedy_draft_argmax = False
    prefer_requested_block_size = True
    choose_block_ceiling = None
    choose_initial_block_size = None

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self._logits: list[mx.array] = []
        self.rounds: list[Json] = []
        self.prefill: Json = {}
        self.shared: Json = {}
        if hasattr(drafter, "prefill_from_target_hidden"):
            self.prefill_from_target_hidden = self._prefill
            self.accept_verified_tokens = self._accept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def sampler(self, logits: mx.array) -> mx.array:
        """Greedy ids of logits [.., V], which are kept."""
        self._logits.append(logits.reshape(-1, logits.shape[-1]))
        return mx.argmax(logits, axis=-1)

    def draft_block(
        self, pending: Any, hidden: mx.array, cache: Any, size: int, _: Any, dtype: mx.Dtype
    ) -> mx.array:
        drafts: mx.array = self._drafter.draft_block(
            pending, hidden, cache, size, self.sampler, dtype
        )
        logits = mx.concatenate(self._logits, axis=0)
        self._logits = []
        self.rounds.append(
            {
                "pending": int(pending),
                "drafts": drafts[0].tolist(),
                "logits": logits,
                "hidden": hidden[0],
                "shared": self.shared,
            }
        )
        return drafts

    draft_block_greedy = draft_block

    def _prefill(self, ids: mx.array, hidden: mx.array, bonus: Any, _: Any, dtype: Any) -> None:
        self.prefill = {"hidden": hidden[0]}
        self._drafter.prefill_from_target_hidden(ids, hidden, bonus, self.sampler, dtype)

    def _accept(
        self, hidden: mx.array, drafts: mx.array, accepted: int, new: list[int], _: Any, dtype: Any
    ) -> None:
        self._drafter.accept_verified_tokens(hidden, drafts, accepted, new, self.sampler, dtype)

    def set_shared_kv(self, kv: Any, kv_offset: int, **places: Any) -> None:
        self.shared = {"keys_values": kv, **places}
        self._drafter.set_shared_kv(kv, kv_offset, **places)
