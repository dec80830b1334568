"""An entry's metadata as text: what a file says of itself beside its tensors. No mlx here.

The fields are strings by name, as safetensors wants its metadata; `FORMAT.md` lists them. Nothing
in them is looked up anywhere: they become numbers, strings and the dtypes of `ITEM_BYTES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BadInput
from .entry import (
    AttachmentHeader,
    Entry,
    Generation,
    Identity,
    Reuse,
    TensorSpec,
    Tokens,
)
from .strict import Damaged, Foreign, decimal, dump, items_of, load, object_of, packed, unpacked
from .tensors import MAX_LENGTH

GENERATION = "__generation_checkpoint__:"
"""How the namespaces of unfinished generations begin, and no others."""

_REUSE = {"trimmable": bool, "minimum": int}

_KNOWN = {
    f"0.{key}"
    for key in (
        *("created", "model", "fingerprint", "tokenizer", "codec", "namespace"),
        *("tokens", "layout", "reuse", "attachments", "generation"),
    )
}

OURS = "0."
FOREIGN = ("1.", "2.")
"""How the keys of our metadata begin, and those of mlx-lm's classes and scalars: its
`load_prompt_cache` takes no others."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Who wrote an entry, and when, in seconds since 1970."""

    identity: Identity
    created: int


def generation_namespace(key: str) -> str:
    """Where the checkpoints of an unfinished generation stand; no prompt is looked up there."""
    return GENERATION + key


def check(entry: Entry) -> None:
    """What holds for every entry, beside `check_tensors`.

    Raises:
        BadInput: it does not.
    """
    check_outline(entry)
    names = {tensor.name for tensor in entry.tensors}
    attached = [name for attachment in entry.attachments for name in attachment.tensors]
    if len(set(attached)) < len(attached) or not names.issuperset(attached):
        raise BadInput("an attachment must name tensors of the entry, each once")
    if entry.attachments and entry.reuse.trimmable:
        raise BadInput("an entry with attachments stands for one boundary and is not trimmable")
    if bad := [key for key in entry.foreign if not key.startswith(FOREIGN)]:
        raise BadInput(f"mlx-lm reads no metadata {bad[0]!r}, only 1.* and 2.*")
    _check_text(_texts(entry))


def check_outline(entry: Entry | Outline) -> None:
    """What holds for the outline of every entry.

    Raises:
        BadInput: it does not.
    """
    tokens, namespace, generation = entry.tokens, entry.namespace, entry.generation
    if tokens.dtype != np.int32 or tokens.ndim != 1 or len(tokens) == 0:
        raise BadInput(f"tokens must be int32 [N >= 1], got {tokens.dtype} {list(tokens.shape)}")
    if not 0 <= entry.reuse.minimum <= MAX_LENGTH:
        raise BadInput(f"a minimum of {entry.reuse.minimum} tokens is not within 0..{MAX_LENGTH}")
    _check_text([namespace])
    if generation is None:
        if namespace.startswith(GENERATION):
            raise BadInput(f"namespace {namespace!r} is for generation checkpoints")
    elif namespace != generation_namespace(generation.key):
        raise BadInput(f"namespace {namespace!r} is not that of generation {generation.key!r}")


def _texts(entry: Entry) -> list[str]:
    texts = [entry.namespace, entry.codec, *entry.layout, *entry.foreign, *entry.foreign.values()]
    texts += [tensor.name for tensor in entry.tensors]
    for attachment in entry.attachments:
        texts += [attachment.schema, *attachment.metadata, *map(str, attachment.metadata.values())]
    if entry.generation is not None:
        generation = entry.generation
        texts += [generation.key, generation.namespace, generation.journal]
    return texts


def _check_text(texts: list[str]) -> None:
    if "".join(texts).isascii():
        return
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadInput(f"{text!r} is not Unicode text") from None


def fields_of(entry: Entry, origin: Origin) -> dict[str, str]:
    """The metadata of a checked entry, by key."""
    identity = origin.identity
    fields = {
        "created": str(origin.created),
        "model": identity.model,
        "fingerprint": identity.fingerprint,
        "tokenizer": identity.tokenizer,
        "codec": entry.codec,
        "namespace": entry.namespace,
        "tokens": packed(entry.tokens),
        "layout": dump(entry.layout),
        "reuse": dump({"trimmable": entry.reuse.trimmable, "minimum": entry.reuse.minimum}),
    }
    if entry.attachments:
        fields["attachments"] = dump([_attachment_fields(a) for a in entry.attachments])
    if entry.generation is not None:
        fields["generation"] = dump(_generation_fields(entry.generation))
    return {OURS + key: value for key, value in fields.items()} | dict(entry.foreign)


def _attachment_fields(attachment: AttachmentHeader) -> dict[str, Any]:
    return {
        "schema": attachment.schema,
        "metadata": dict(attachment.metadata),
        "tensors": attachment.tensors,
    }


def _generation_fields(generation: Generation) -> dict[str, Any]:
    return {
        "key": generation.key,
        "namespace": generation.namespace,
        "prompt_tokens": generation.prompt_tokens,
        "generated": packed(np.array(generation.generated, np.int32)),
        "pending": generation.pending,
        "seed": generation.seed,
        "seed_was_explicit": generation.seed_was_explicit,
        "rng": generation.rng,
        "journal": generation.journal,
    }


@dataclass(frozen=True, slots=True)
class Outline:
    """What is asked of every entry, and all that a scan looks at."""

    origin: Origin
    codec: str
    namespace: str
    tokens: Tokens
    reuse: Reuse
    generation: Generation | None


def outline_of(fields: Mapping[str, str], codec: str | None) -> Outline:
    """Part of what `fields_of` was given. With a `codec`, entries of others are not looked into.

    Raises:
        Damaged: it was given something else.
        Foreign: they are of another codec.
    """
    try:
        if codec is not None and codec != fields["0.codec"]:
            raise Foreign(f"written by codec {fields['0.codec']!r}, not {codec!r}")
        generation = fields.get("0.generation")
        outline = Outline(
            Origin(
                Identity(fields["0.model"], fields["0.fingerprint"], fields["0.tokenizer"]),
                decimal(fields["0.created"]),
            ),
            fields["0.codec"],
            fields["0.namespace"],
            unpacked(fields["0.tokens"]),
            Reuse(**object_of(load(fields["0.reuse"]), _REUSE)),
            None if generation is None else _generation_of(load(generation)),
        )
        identity = outline.origin.identity
        _check_text([identity.model, identity.fingerprint, identity.tokenizer, outline.codec])
        check_outline(outline)
    except KeyError as error:
        raise Damaged(f"field {error.args[0]!r} is missing") from None
    except BadInput as error:
        raise Damaged(str(error)) from None
    return outline


def entry_of(fields: Mapping[str, str], tensors: tuple[TensorSpec, ...]) -> tuple[Entry, Origin]:
    """All that `fields_of` was given, whatever the codec.

    Raises:
        Damaged: it was given something else.
    """
    outline = outline_of(fields, None)
    foreign = {key: value for key, value in fields.items() if not key.startswith(OURS)}
    if unknown := fields.keys() - foreign.keys() - _KNOWN:
        raise Damaged(f"unknown field {min(unknown)!r}")
    try:
        entry = Entry(
            namespace=outline.namespace,
            tokens=outline.tokens,
            codec=outline.codec,
            layout=items_of(load(fields["0.layout"]), str),
            reuse=outline.reuse,
            tensors=tensors,
            attachments=_attachments_of(load(fields.get("0.attachments", "[]"))),
            generation=outline.generation,
            foreign=foreign,
        )
        check(entry)
    except KeyError as error:
        raise Damaged(f"field {error.args[0]!r} is missing") from None
    except BadInput as error:
        raise Damaged(str(error)) from None
    return entry, outline.origin


def _attachments_of(values: Any) -> tuple[AttachmentHeader, ...]:
    return tuple(map(_attachment_of, items_of(values, dict)))


def _attachment_of(value: Any) -> AttachmentHeader:
    fields = object_of(value, {"schema": str, "metadata": dict, "tensors": list})
    metadata = fields["metadata"]
    for said in metadata.values():
        if type(said) not in (str, int, bool):
            raise Damaged(f"an attachment says {said!r}, not a string or a whole number")
    return AttachmentHeader(fields["schema"], metadata, items_of(fields["tensors"], str))


def _generation_of(value: Any) -> Generation:
    kinds = {
        "key": str,
        "namespace": str,
        "prompt_tokens": int,
        "generated": str,
        "pending": int,
        "seed": int,
        "seed_was_explicit": bool,
        "journal": str,
    }
    # A list or null, of which `kinds` can say neither; False, which is refused below, if missing.
    rng = value.pop("rng", False) if isinstance(value, dict) else False
    fields = object_of(value, kinds)
    fields["generated"] = tuple(unpacked(fields["generated"]).tolist())
    return Generation(**fields, rng=None if rng is None else items_of(rng, int))
