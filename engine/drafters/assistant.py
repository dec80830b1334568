"""A Gemma 4 assistant: a small stack that reads the target's own keys and values.

It has no state but the target's last hidden state, so nothing is ever rolled back. Each step takes
the embedding of the last token and the hidden state before it, and gives a token and a hidden
state for the next. Drafts are greedy, whatever the request samples with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.identity import digest_of
from ..errors import BadInput, LawError
from ..folders import check_folder
from ..ports import NORM, Ports
from ..sampling import RowSampling
from ..state.checkpoint import Attachment, Checkpoint, require_schema
from ..state.donors import Donor, Lent
from ..target import Target
from .assistant_model import FULL, SLIDING, Config, load
from .source import Draft, Lender, PrefillMode, Taps

SCHEMA = "gemma-assistant-v1"


@dataclass(frozen=True, slots=True)
class Convention:
    """Where an assistant stands, and how far it sees. L tokens' keys are lent, at 0 .. L-1.

    Draft p of a round stands at L + start + step * p. A sliding layer sees all L keys up to its
    window, and behind that `window - unseen` of them.
    """

    start: int = 0
    step: int = 0
    unseen: int = 0


REFERENCE = Convention()
"""Google's LiteRT-LM and transformers: every draft of a round stands at the pending token's place.

transformers' mask shows a sliding layer one key more than the window. No cache is sure to hold
that one, so here it is the window.
"""

MLX_VLM = Convention(start=-1, unseen=1)
"""mlx-vlm 0.7.10: every draft stands at the last lent token's place, as in vLLM.

Of more keys than the window it shows one fewer as soon as the target's cache has dropped any;
before that the whole window, which is `Convention(start=-1)`.
"""

ADVANCING = Convention(step=1)
"""Each draft stands behind the one before, as in drafters that keep keys of their own."""


class AssistantRows:
    """The last hidden state of each of a group's rows. See `DraftRows`.

    `hidden` is [B, 1, H], behind the target's final norm; None before anything was processed.
    """

    prefill_mode: PrefillMode = "full"

    def __init__(
        self,
        provider: AssistantProvider,
        processed: Sequence[int] = (0,),
        hidden: mx.array | None = None,
    ) -> None:
        self._provider = provider
        self._processed = list(processed)
        self._hidden = hidden
        self._drafted = False

    @property
    def namespace(self) -> str:
        return self._provider.namespace

    @property
    def row_count(self) -> int:
        return len(self._processed)

    def selected(self, keep: Sequence[int]) -> AssistantRows:
        hidden = None if self._hidden is None else self._hidden[mx.array(list(keep))]
        return AssistantRows(self._provider, [self._processed[r] for r in keep], hidden)

    def joined(self, other: AssistantRows) -> AssistantRows:
        pair = [rows._hidden_like(other) for rows, other in ((self, other), (other, self))]
        warm = [hidden for hidden in pair if hidden is not None]
        hidden = mx.concatenate(warm) if warm else None
        return AssistantRows(self._provider, self._processed + other._processed, hidden)

    def _hidden_like(self, other: AssistantRows) -> mx.array | None:
        """These rows' hidden states; zeros beside the other's if they are cold."""
        if self._hidden is not None or other._hidden is None:
            return self._hidden
        return mx.zeros((self.row_count, *other._hidden.shape[1:]), other._hidden.dtype)

    def prefill(self, tokens: mx.array, taps: Taps) -> None:
        width = tokens.shape[1]
        self._advance([width] * self.row_count, [width - 1] * self.row_count, taps)

    def draft(
        self, pending: Sequence[int], depth: int, steps: Sequence[int], lender: Lender
    ) -> Draft:
        hidden, provider = self._hidden, self._provider
        if hidden is None:
            raise LawError("an assistant drafts behind a prompt, and nothing was processed")
        self._drafted = True
        tokens: list[mx.array] = []
        if depth:
            donors = {kind: lender.donor(kind == SLIDING) for kind in provider.kinds}
            lent = {kind: provider.lent(donor) for kind, donor in donors.items()}
            (offsets, *_) = (donor.offsets for donor in donors.values())
            token = mx.array(list(pending), dtype=mx.uint32)[:, None]
            for number in range(depth):
                position = provider.position(offsets, number)
                state, hidden = provider.model(provider.ports.embed(token), hidden, lent, position)
                token = provider.model.choose(state)
                mx.async_eval(token)
                tokens.append(token)
        rows = self.row_count
        drafted = mx.concatenate(tokens, axis=1) if tokens else mx.zeros((rows, 0), mx.uint32)
        return Draft(drafted, (depth,) * rows)

    def commit(self, retained: Sequence[int], taps: Taps) -> None:
        if not self._drafted:
            raise LawError("assistant commit without draft")
        self._drafted = False
        self._advance([kept + 1 for kept in retained], retained, taps)

    def _advance(self, counts: Sequence[int], ends: Sequence[int], taps: Taps) -> None:
        """Row r has processed `counts[r]` more tokens; its last is `ends[r]` of the tap's."""
        (states,) = taps
        index = mx.array(list(ends))[:, None, None]
        # An array of its own, or the whole window would stay alive behind it.
        self._hidden = mx.contiguous(mx.take_along_axis(states, index, axis=1))
        mx.async_eval(self._hidden)
        self._processed = [n + more for n, more in zip(self._processed, counts, strict=True)]

    def capture(self, row: int) -> Checkpoint:
        processed = self._processed[row]
        tensors: tuple[mx.array, ...] = ()
        if self._hidden is not None and processed:
            tensors = (mx.contiguous(self._hidden[row : row + 1]),)
            mx.eval(tensors)
        return Checkpoint(
            processed, Attachment(self.namespace, {"processed_tokens": processed}, tensors)
        )


class AssistantProvider:
    """An assistant mounted beside a target; that they fit is known before weights are read.

    Raises:
        BadInput: it was made for another target, or is of an unknown variant, or damaged.
    """

    id = "assistant"
    taps: tuple[str, ...] = (NORM,)
    supports_target_adapters = False
    cannot_share: tuple[str, ...] = ()

    def __init__(self, folder: Path, target: Target, convention: Convention = REFERENCE) -> None:
        config = Config.read(folder, check_folder(folder))
        self.target: Target | None = target
        self.kinds = config.kinds
        self.ports: Ports = require_pairing(folder, config, target)
        self.model = load(folder, config)
        self.default_depth = config.depth
        self._window: int = config.args.sliding_window
        self._hidden_size = config.hidden_size
        self._convention = convention
        files = sorted(folder.glob("*.safetensors"))
        self.namespace = f"{SCHEMA}:{digest_of([folder / 'config.json', *files])}"

    @property
    def weights_bytes(self) -> int:
        arrays: Any = tree_flatten(self.model.parameters())
        return sum(array.nbytes for _, array in arrays)

    def state_bytes(self, tokens: int) -> int:
        return 4 * self._hidden_size

    def open(self, sampling: RowSampling, checkpoint: Checkpoint | None = None) -> AssistantRows:
        if checkpoint is None:
            return AssistantRows(self)
        attachment = require_schema(checkpoint, self.namespace)
        processed = attachment.metadata.get("processed_tokens")
        if processed != checkpoint.processed_tokens:
            raise BadInput(
                f"checkpoint stands at {checkpoint.processed_tokens} tokens, "
                f"its attachment at {processed}"
            )
        shapes = [tensor.shape for tensor in attachment.tensors]
        wanted = [(1, 1, self._hidden_size)] if processed else []
        if shapes != wanted:
            raise BadInput(f"an assistant's checkpoint holds arrays of {wanted}, got {shapes}")
        return AssistantRows(self, (checkpoint.processed_tokens,), *attachment.tensors)

    def lent(self, donor: Donor) -> Lent:
        """What the layers of one kind attend to."""
        counts = list(donor.offsets)
        if donor.window is not None:
            shown = self._window - self._convention.unseen
            counts = [n if n <= self._window else shown for n in counts]
        return donor.last(counts)

    def position(self, offsets: Sequence[int], number: int) -> int | mx.array:
        """Where draft `number` of a round stands, in all rows or in each, [B]."""
        ahead = self._convention.start + self._convention.step * number
        places = [offset + ahead for offset in offsets]
        return places[0] if len(set(places)) == 1 else mx.array(places)


def require_pairing(folder: Path, config: Config, target: Target) -> Ports:
    """The target's ports, if an assistant of that config can read them.

    Costs one small forward of the target.

    Raises:
        BadInput: what the target lacks, or has in another size.
    """
    args = config.args
    if target.quantizes:
        raise BadInput(f"drafter {folder} reads keys and values, which {target.path} quantizes")
    if args.vocab_size != target.vocab_size:
        raise BadInput(
            f"drafter {folder} has a vocabulary of {args.vocab_size}, "
            f"target {target.path} of {target.vocab_size}"
        )
    ports, one = target.ports, mx.zeros((1, 1), mx.uint32)
    if (size := ports.embed(one).shape[-1]) != config.hidden_size:
        raise BadInput(
            f"drafter {folder} reads hidden states of {config.hidden_size}, "
            f"target {target.path} has {size}"
        )
    rows = target.new_rows()
    rows.forward(one)
    for kind in config.kinds:
        try:
            donor = rows.donor(kind == SLIDING)
        except BadInput as error:
            raise BadInput(
                f"drafter {folder} reads keys of {kind} layers; target {target.path}: {error}"
            ) from error
        full = kind == FULL
        wanted = (args.global_head_dim or args.head_dim) if full else args.head_dim
        heads, found = donor.keys.shape[1], donor.keys.shape[3]
        if found != wanted or args.num_attention_heads % heads:
            raise BadInput(
                f"drafter {folder} has {args.num_attention_heads} heads of {wanted} in {kind} "
                f"layers, target {target.path} keys of {heads} heads of {found}"
            )
        if donor.window is not None and donor.window < args.sliding_window:
            raise BadInput(
                f"drafter {folder} looks back {args.sliding_window} tokens, "
                f"target {target.path} holds {donor.window} in its sliding layers"
            )
    return ports
