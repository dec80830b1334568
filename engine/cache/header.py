"""An entry as text: what a file says about its tensors, and what it may say. No mlx here.

The fields are strings by name, as safetensors wants its metadata; `FORMAT.md` lists them. Nothing
in them is looked up anywhere: they become numbers, strings and the dtypes of `ITEM_BYTES`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BadInput
from .entry import (
    ITEM_BYTES,
    AttachmentHeader,
    Entry,
    Generation,
    Identity,
    Reuse,
    TensorSpec,
)
from .strict import Damaged, Foreign, decimal, dump, items_of, load, object_of, packed, unpacked

MAX_DIMENSIONS = 32
MAX_LENGTH = 2**31 - 1
"""Of a dimension: mlx counts in int32."""

GENERATION = "__generation_checkpoint__:"

_REUSE = {"trimmable": bool, "minimum": int}
_TENSOR = ("dtype", "shape", "data_offsets")
_INT = frozenset({int})

OURS = "0."
FOREIGN = ("1.", "2.")
"""Of our metadata, and of mlx-lm's classes and scalars: `load_prompt_cache` takes no others."""


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
    tokens = entry.tokens
    if tokens.dtype != np.int32 or tokens.ndim != 1 or len(tokens) == 0:
        raise BadInput(f"tokens must be int32 [N >= 1], got {tokens.dtype} {list(tokens.shape)}")
    if not 0 <= entry.reuse.minimum <= MAX_LENGTH:
        raise BadInput(f"a minimum of {entry.reuse.minimum} tokens is not within 0..{MAX_LENGTH}")
    names = {tensor.name for tensor in entry.tensors}
    attached = [name for attachment in entry.attachments for name in attachment.tensors]
    if len(set(attached)) < len(attached) or not names.issuperset(attached):
        raise BadInput("an attachment must name tensors of the entry, each once")
    if entry.attachments and entry.reuse.trimmable:
        raise BadInput("an entry with attachments stands for one boundary and is not trimmable")
    if bad := [key for key in entry.foreign if not key.startswith(FOREIGN)]:
        raise BadInput(f"mlx-lm reads no metadata {bad[0]!r}, only 1.* and 2.*")
    _check_namespace(entry)
    _check_text(_texts(entry))


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """What holds for every entry's tensors.

    Raises:
        BadInput: it does not.
    """
    names = {tensor.name for tensor in tensors}
    if len(names) < len(tensors):
        raise BadInput("two tensors of one name")
    if names & {"", "__metadata__"}:
        raise BadInput("a tensor must have a name, and not __metadata__")
    for tensor in tensors:
        if tensor.dtype not in ITEM_BYTES:
            raise BadInput(
                f"{tensor.name}: dtype {tensor.dtype} is none of {', '.join(ITEM_BYTES)}"
            )
        if not _is_shape(tensor.shape):
            raise BadInput(
                f"{tensor.name}: a shape has at most {MAX_DIMENSIONS} dimensions "
                f"within 0..{MAX_LENGTH}, got {list(tensor.shape[: MAX_DIMENSIONS + 1])}"
            )


def _is_shape(lengths: Sequence[int]) -> bool:
    bounded = not lengths or 0 <= min(lengths) <= max(lengths) <= MAX_LENGTH
    return bounded and len(lengths) <= MAX_DIMENSIONS


def _check_namespace(entry: Entry) -> None:
    generation, namespace = entry.generation, entry.namespace
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
        texts += [entry.generation.key, entry.generation.namespace]
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
    }


def entry_of(
    fields: Mapping[str, str], tensors: tuple[TensorSpec, ...], codec: str | None
) -> tuple[Entry, Origin]:
    """What `fields_of` was given. Entries of other codecs than `codec` are not looked into.

    Raises:
        Damaged: it was given something else.
        Foreign: they are of another codec.
    """
    ours = dict(fields)
    foreign = {key: ours.pop(key) for key in fields if not key.startswith(OURS)}
    take = ours.pop
    try:
        if codec is not None and codec != ours["0.codec"]:
            raise Foreign(f"written by codec {ours['0.codec']!r}, not {codec!r}")
        identity = Identity(take("0.model"), take("0.fingerprint"), take("0.tokenizer"))
        _check_text([identity.model, identity.fingerprint, identity.tokenizer])
        origin = Origin(identity, decimal(take("0.created")))
        attachments, generation = take("0.attachments", None), take("0.generation", None)
        entry = Entry(
            namespace=take("0.namespace"),
            tokens=unpacked(take("0.tokens")),
            codec=take("0.codec"),
            layout=items_of(load(take("0.layout")), str),
            reuse=Reuse(**object_of(load(take("0.reuse")), _REUSE)),
            tensors=tensors,
            attachments=() if attachments is None else _attachments_of(load(attachments)),
            generation=None if generation is None else _generation_of(load(generation)),
            foreign=foreign,
        )
        check(entry)
    except KeyError as error:
        raise Damaged(f"field {error.args[0]!r} is missing") from None
    except BadInput as error:
        raise Damaged(str(error)) from None
    if ours:
        raise Damaged(f"unknown field {next(iter(ours))!r}")
    return entry, origin


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
    }
    rng = value.pop("rng", False) if isinstance(value, dict) else False
    fields = object_of(value, kinds)
    fields["generated"] = tuple(unpacked(fields["generated"]).tolist())
    return Generation(**fields, rng=None if rng is None else items_of(rng, int))


def tensor_fields(tensors: Sequence[TensorSpec]) -> dict[str, Any]:
    """The tensors as safetensors lists them: their bytes follow each other, in order."""
    fields, end = {}, 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        fields[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        }
    return fields


def tensors_of(fields: Mapping[str, Any], nbytes: int) -> tuple[TensorSpec, ...]:
    """What `tensor_fields` was given; all of them are `nbytes`.

    Raises:
        Damaged: it was given something else.
    """
    tensors, end = [], 0
    # Written out: a scan reads thousands of these.
    for name, value in fields.items():
        try:
            dtype, shape, (begin, stop) = value["dtype"], value["shape"], value["data_offsets"]
            item_bytes = ITEM_BYTES[dtype]
        except (KeyError, TypeError, ValueError):
            raise Damaged(f"{name[:80]}: no dtype, shape and data_offsets") from None
        if type(shape) is not list or not _INT.issuperset(map(type, (begin, stop, *shape))):
            raise Damaged(f"{name[:80]}: lengths that are no whole numbers")
        if not name or len(value) != len(_TENSOR) or not _is_shape(shape):
            raise Damaged(f"{name[:80]!r}: {len(value)} fields, shape {str(shape)[:80]}")
        tensors.append(TensorSpec(name, dtype, tuple(shape)))
        start, end = end, end + math.prod(shape) * item_bytes
        if begin != start or stop != end:
            raise Damaged(f"{name[:80]}: its bytes are not at {start}..{end}")
    if end != nbytes:
        raise Damaged(f"{nbytes} bytes of tensors, where they are {end}")
    return tuple(tensors)
