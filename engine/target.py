"""An mlx-lm model bound for decoding. The only file that knows how mlx-lm loads and runs one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import hf_repo_to_path

from .adapters import FILES, mount
from .cache.entry import Identity
from .cache.identity import (
    Artifact,
    Memo,
    digest,
    digest_of,
    fingerprint,
    namespace,
    tokenizer_files,
)
from .errors import BadInput, one_line
from .folders import artifact_of, check_folder, looks_like_hub_id, require_compiler
from .host import settle
from .ports import Ports
from .state.checkpoint import restore
from .state.forms import Held, parse
from .state.geometry import Geometry, measured, require_geometry
from .state.layouts import RECURRENT, Cache, layout_of, leaves
from .state.membership import no_row_form
from .state.memory import Footprint, measure
from .state.probe import prove, prove_rows
from .state.quantize import KVQuantization, require_quantizable
from .state.replay import Recorder
from .state.rows import Rows
from .values import require_utf8


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is mounted on a target: `base` is the target without it.

    `digest` is the identity of its files as they were when it was mounted.
    """

    base: Target
    folder: Path
    digest: str


class Target:
    """A loaded model with its tokenizer. The two-model drafter binds its draft model the same way.

    `eos_ids` are the ids that end a text; `vocab_size` is the width V of the logits. The model is
    bound as it is now: swapping its modules or arrays afterwards is not seen everywhere.
    `adapter` is what is mounted on it, if anything is; `artifact` are its files as they were before
    it was loaded, and `memo` remembers what they hash to.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: dict[str, Any],
        path: Path,
        *,
        quantization: KVQuantization | None = None,
        adapter: Adapter | None = None,
        artifact: Artifact | None = None,
        memo: Memo | None = None,
    ) -> None:
        settle(model)
        self.model = model
        self.tokenizer = tokenizer
        self.path = path
        self.eos_ids: frozenset[int] = frozenset(tokenizer.eos_token_ids)
        self.vocab_size: int = config.get("vocab_size") or config["text_config"]["vocab_size"]
        self.adapter = adapter
        self._config = config
        self._quantization = quantization
        self._artifact = artifact
        self._memo = memo
        if quantization is not None:
            require_quantizable(model, self._new_caches(), quantization)

    @classmethod
    def load(
        cls,
        path_or_id: str | Path,
        *,
        quantization: KVQuantization | None = None,
        memo: Memo | None = None,
    ) -> Target:
        """Load an mlx-lm folder, or a hub id of the form `owner/name`.

        Raises:
            BadInput: no such folder, no config or weights in it, a model type or file that mlx-lm
                cannot load, or keys and values that cannot be quantized as wanted.
        """
        require_compiler()
        if not str(path_or_id):
            raise BadInput("the model's folder is empty; a folder or a hub id is needed")
        folder = Path(path_or_id)
        found = os.path.exists(folder)  # unlike Path.exists, False for a name that is too long
        artifact = None
        if found:
            check_folder(folder)
            artifact = artifact_of(folder)
        elif not looks_like_hub_id(str(path_or_id)):
            raise BadInput(f"model folder {folder} does not exist")
        try:
            loaded: Any = mlx_lm.load(str(path_or_id), return_config=True)
        except Exception as error:
            # mlx-lm, tokenizers and the hub client raise whatever they like for a bad folder.
            where = "" if found else "there is no such folder, and as a hub id: "
            raise BadInput(f"cannot load model {path_or_id}: {where}{one_line(error)}") from error
        model, tokenizer, config = loaded
        if not found:
            folder = hf_repo_to_path(str(path_or_id))
        return cls(
            model,
            tokenizer,
            config,
            folder,
            quantization=quantization,
            artifact=artifact or artifact_of(folder),
            memo=memo,
        )

    def adapted(self, folder: str | Path) -> Target:
        """A target like this with an mlx-lm adapter: LoRA, DoRA, or layers fine-tuned in full.

        The model's arrays are shared and this target stays as it is; any number of adapters can be
        mounted beside each other, each as a target of its own.

        Raises:
            BadInput: an adapter is mounted already, or this one cannot be; see `adapters.mount`.
        """
        folder = Path(folder)
        if self.adapter is not None:
            raise BadInput(
                f"adapter {self.adapter.folder} is mounted already; mount {folder} on its base"
            )
        files = Artifact.noted(folder / name for name in FILES)
        model = mount(self.model, folder)
        adapter = Adapter(self, folder, files.identity(self._memo))
        return Target(
            model,
            self.tokenizer,
            self._config,
            self.path,
            quantization=self._quantization,
            adapter=adapter,
            memo=self._memo,
        )

    def new_rows(self, taps: Sequence[str] = ()) -> Rows:
        """An empty state for one row, whose forwards record the hidden states named.

        Raises:
            BadInput: there is no such tap.
        """
        return self._rows(self._new_caches(), 0, taps)

    @cached_property
    def ports(self) -> Ports:
        """What drafters may see beside logits.

        Raises:
            BadInput: the model is not built in a way that offers them.
        """
        return Ports(self.model)

    def restored_rows(
        self,
        layout: str,
        tensors: Sequence[mx.array],
        processed: int,
        taps: Sequence[str] = (),
    ) -> Rows:
        """One row from what `capture_caches` returned after `processed` tokens.

        Raises:
            BadInput: it does not fit this model.
        """
        return self.rows_holding(parse(layout.split(), tensors), processed, taps)

    def rows_holding(
        self, captured: Sequence[Held], processed: int, taps: Sequence[str] = ()
    ) -> Rows:
        """One row from what `capture` returned after `processed` tokens.

        Raises:
            BadInput: it does not fit this model.
        """
        due = self._quantization is not None and self._quantization.due(processed)
        require_geometry(captured, self._converted_geometry if due else self._geometry)
        caches = self._new_converted() if due else self._new_caches()
        restore(caches, captured, processed)
        return self._rows(caches, processed, taps)

    def _new_converted(self) -> list[Cache]:
        """The caches of a row whose keys and values are stored in few bits from the start."""
        caches = self._new_caches()
        if self._quantization is not None:
            self._quantization.converted(caches)
        return caches

    @cached_property
    def _geometry(self) -> Geometry:
        return measured(self.model, self._new_caches())

    @cached_property
    def _converted_geometry(self) -> Geometry:
        return measured(self.model, self._new_converted())

    @property
    def quantization(self) -> KVQuantization | None:
        """How keys and values are stored in few bits, if they are."""
        return self._quantization

    @cached_property
    def cannot_share(self) -> tuple[str, ...]:
        """Why rows of this model must each be a group of one; empty if they need not.

        The first question costs some small forwards.
        """
        caches = self._new_caches()
        if names := no_row_form(caches):
            return tuple(f"cache kind {name} has no row layout" for name in names)
        problem = prove_rows(self.model, self._new_caches, lambda: self._recorder)
        return () if problem is None else (problem,)

    @cached_property
    def footprint(self) -> Footprint:
        """What a row's state comes to; the first question costs one small forward."""
        return measure(self.model, self._new_caches())

    @property
    def quantizes(self) -> bool:
        """Whether keys and values are stored in few bits."""
        return self._quantization is not None

    def _tapper(self, taps: Sequence[str]) -> Recorder | None:
        if not taps:
            return None
        modules = [self.ports.tapped(name) for name in taps]
        recurrent = any(layout_of(leaf) is RECURRENT for leaf in leaves(self._new_caches()))
        recorder = self._recorder if recurrent else None
        if isinstance(recorder, Recorder):
            return recorder.with_taps(modules)
        return Recorder(self.model, (), (), modules)

    def _rows(self, caches: list[Cache], processed: int, taps: Sequence[str] = ()) -> Rows:
        return Rows(
            self.model,
            caches,
            (processed,),
            replayer=lambda: self._recorder,
            quantization=self._quantization,
            tapper=self._tapper(tuple(taps)),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, as `mlx_lm.server` encodes a completion request."""
        require_utf8(text, "the prompt")
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat, as `mlx_lm.server` encodes it: through the model's own template.

        Each message has a `role` and a `content`; the ids end where the assistant's turn begins.

        Raises:
            BadInput: the model has no chat template, a message is malformed, or the template
                refuses them (a role it does not know, for example).
        """
        if not self.tokenizer.has_chat_template:
            raise BadInput(f"model {self.path} has no chat template")
        if not messages:
            raise BadInput("the chat has no messages; at least 1 is needed")
        for number, message in enumerate(messages):
            check_message(number, message)
        try:
            ids: list[int] = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tools=None, add_generation_prompt=True
            )
        except Exception as error:
            # A template is a program of the model's author; it raises what it likes.
            raise BadInput(f"the chat template refuses the messages: {one_line(error)}") from error
        return ids

    def _new_caches(self) -> list[Cache]:
        caches: list[Cache] = make_prompt_cache(self.model)
        return caches

    @cached_property
    def _recorder(self) -> Recorder | str:
        """What replays recurrent layers, or why they cannot be. Asked for by speculation only."""
        return prove(self.model, self._new_caches)

    @cached_property
    def xtc_exempt_ids(self) -> tuple[int, ...]:
        """The ids XTC never drops, as `mlx_lm.server` chooses them: the newline's and the EOS's."""
        return (*self.tokenizer.encode("\n"), *self.eos_ids)

    @cached_property
    def identity(self) -> str:
        """What state may be shared under: it follows from content, never from where that lies.

        That of config.json and every weight file; under an adapter, of the base and the adapter.

        Raises:
            BadInput: the files are not the ones any more that were loaded.
        """
        if self.adapter is not None:
            return digest(self.adapter.base.identity, self.adapter.digest)
        return (self._artifact or artifact_of(self.path)).identity(self._memo)

    @cached_property
    def store_identity(self) -> Identity:
        """What an SSD folder's entries for this target were computed by, adapters left out.

        The first question costs one small forward and, unless that is remembered, reads all files.

        Raises:
            BadInput: as for `identity`.
        """
        if self.adapter is not None:
            return self.adapter.base.store_identity
        tokenizer = digest("tokenizer", *map(digest_of, ([f] for f in tokenizer_files(self.path))))
        how, dtype = self._quantization, " ".join(self.footprint.dtypes)
        scheme = dtype if how is None else f"kv{how.bits} in groups of {how.group_size}"
        config = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        print_ = fingerprint(
            config=config,
            artifact=self.identity,
            tokenizer=tokenizer,
            dtype=dtype,
            scheme=scheme,
        )
        return Identity(self.path.name, print_, tokenizer)

    def namespace(self, drafter: str | None = None) -> str:
        """What a state of this target, beside one of the drafter of that namespace, is found under.

        Two states may stand for each other only under the same; see `cache.identity.namespace`.
        """
        how, adapter = self._quantization, self.adapter
        return namespace(
            adapter=None if adapter is None else adapter.digest,
            drafter=drafter,
            kv=None if how is None else asdict(how),
        )


def check_message(number: int, message: Mapping[str, str]) -> None:
    """Refuse a chat message that is not a role and a content, both text.

    Raises:
        BadInput: naming the message, counted from 0, and what is wrong with it.
    """
    if not isinstance(message, Mapping):
        raise BadInput(f"message {number} must hold role and content, got {message!r}")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise BadInput(f"message {number}: {key} must be text, got {message.get(key)!r}")
        require_utf8(message[key], f"message {number}: {key}")
