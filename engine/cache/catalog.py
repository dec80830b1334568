"""What a store knows of its files, as records. It makes no calls and takes no locks."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .entry import Entry, Tokens
from .format import Header, outline, parse
from .header import Outline
from .prefixes import Indexed, PrefixIndex
from .shelf import folder_of


@dataclass(slots=True, eq=False)
class Record:
    """A committed file of `size` bytes. `mtime_ns` is when it was last used.

    `text` is its header, of which `outline` is a part; the rest is parsed when it is asked for.
    """

    outline: Outline
    digest: str
    text: bytes
    size: int
    name: str
    mtime_ns: int
    folder: str = field(init=False)
    indexed: Indexed[Record] | None = None
    _header: Header | None = None

    def __post_init__(self) -> None:
        self.folder = folder_of(self.outline.namespace)

    @classmethod
    def of(cls, text: bytes, size: int, name: str, mtime_ns: int, codec: str) -> Record:
        """The record of a file with this header; see `format.outline`."""
        found, digest = outline(text, size, codec)
        return cls(found, digest, text, size, name, mtime_ns)

    @property
    def header(self) -> Header:
        """The whole header.

        Raises:
            Damaged: it says what we never write, although its hash is right.
        """
        if self._header is None:
            self._header = parse(self.text, self.size)
        return self._header

    @property
    def entry(self) -> Entry:
        return self.header.entry


class Catalog:
    """Records by place, by prefix, by age. `nbytes` is the sum of their files' sizes.

    Unfinished generations are found by their keys, never by prefix.
    """

    def __init__(self) -> None:
        self._places: dict[str, dict[str, Record]] = {}
        self._index: PrefixIndex[Record] = PrefixIndex()
        self._records: dict[Record, None] = {}
        self._by_entry: dict[int, Record] = {}
        self._generations: defaultdict[str, list[Record]] = defaultdict(list)
        self.nbytes = 0
        self.newest_ns = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __contains__(self, record: Record) -> bool:
        return record in self._records

    def entry_of(self, record: Record) -> Entry:
        """A record's entry, for handing out; see `Record.header` for what it raises."""
        self._by_entry[id(record.entry)] = record
        return record.entry

    def record_of(self, entry: Entry) -> Record | None:
        """The record of an entry that was handed out, None if it is not known any more."""
        return self._by_entry.get(id(entry))  # which a record keeps alive, so that it stays its own

    def folders(self) -> list[str]:
        return list(self._places)

    def names(self, folder: str) -> dict[str, Record]:
        """The records in a folder, by name: a copy."""
        return dict(self._places.get(folder, {}))

    def add(self, record: Record, *, newest: bool = True) -> None:
        """Take up a record; as the newest it serves before others of the same tokens.

        There are such where a removal failed, or was undone by a crash.
        """
        outline = record.outline
        place = self._places.setdefault(record.folder, {})
        assert record.name not in place
        if outline.generation is None:
            record.indexed = self._indexed(record)
            for older in self._index.beside(record.indexed) if newest else []:
                self._index.remove(older)
                older.entry.indexed = self._indexed(older.entry)
        else:
            self._generations[outline.generation.key].append(record)
        place[record.name] = record
        self._records[record] = None
        self.nbytes += record.size
        self.touch(record, record.mtime_ns)

    def _indexed(self, record: Record) -> Indexed[Record]:
        outline = record.outline
        return self._index.add(outline.namespace, outline.tokens, outline.reuse, record)

    def remove(self, record: Record) -> None:
        """Forget a record, if it is known."""
        if record not in self:
            return
        generation = record.outline.generation
        if record.indexed is not None:
            self._index.remove(record.indexed)
        elif generation is not None:
            self._generations[generation.key].remove(record)
            if not self._generations[generation.key]:
                del self._generations[generation.key]
        del self._records[record], self._places[record.folder][record.name]
        if not self._places[record.folder]:
            del self._places[record.folder]
        if record._header is not None:
            self._by_entry.pop(id(record.entry), None)
        self.nbytes -= record.size

    def touch(self, record: Record, mtime_ns: int) -> None:
        """Note that a record was used then."""
        record.mtime_ns = mtime_ns
        self.newest_ns = max(self.newest_ns, mtime_ns)

    def longest(self, tokens: Tokens, namespace: str) -> tuple[Record, int] | None:
        """The record that serves most of the tokens but the last, and how many; None for none."""
        found = self._index.longest(namespace, tokens)
        return None if found is None else (found[0].entry, found[1])

    def covers(self, tokens: Tokens, namespace: str) -> bool:
        """Whether some record serves all of the tokens."""
        return self._index.covers(namespace, tokens)

    def replaced_by(self, entry: Outline) -> list[Record]:
        """What a newcomer makes needless: its duplicates, and strict prefixes that it serves.

        Of an unfinished generation, its earlier checkpoints.
        """
        if entry.generation is not None:
            return self.generations(entry.generation.key)
        index, namespace, tokens = self._index, entry.namespace, entry.tokens
        found = index.superseded(namespace, tokens, entry.reuse) + index.same(namespace, tokens)
        return [indexed.entry for indexed in found]

    def generations(self, key: str) -> list[Record]:
        """All checkpoints of an unfinished generation."""
        return list(self._generations.get(key, ()))

    def generation(self, prompt: Tokens, key: str, namespace: str) -> Record | None:
        """The longest checkpoint of a generation from this prompt in this cache namespace.

        Of equally long ones the newest.
        """
        count = len(prompt)
        usable = [
            record
            for record in self._generations.get(key, ())
            if (generation := record.outline.generation) is not None
            and generation.namespace == namespace
            and generation.prompt_tokens == count < len(record.outline.tokens)
            and np.array_equal(record.outline.tokens[:count], prompt)
        ]
        return max(usable, key=lambda one: (len(one.outline.tokens), one.mtime_ns), default=None)

    def by_age(self) -> list[tuple[int, str, Record]]:
        """All records as a heap, the one unused for longest on top."""
        heap = [(record.mtime_ns, record.name, record) for record in self]
        heapq.heapify(heap)
        return heap
