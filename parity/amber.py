"""How syrupy reads and writes the snapshots. Only what runs under pytest imports this module."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from syrupy.data import Snapshot, SnapshotCollections
from syrupy.extensions.amber import AmberDataSerializer, AmberSnapshotExtension
from syrupy.location import PyTestLocation
from syrupy.types import SnapshotIndex

from parity.snapshots import (
    PORTABLE,
    Part,
    entries_in,
    entry_name,
    file_of,
    split_name,
    storage_in,
    strangers,
)


def remove(folder: Path, storage: str, part: Part, case_id: str) -> None:
    """Take one entry out of one file, if it is there."""
    file = file_of(folder, storage, case_id)
    name = entry_name(part, case_id)
    if name in entries_in(file):
        extension_for(storage)().delete_snapshots(str(file), {name})


def remove_strangers(folder: Path, case_ids: Collection[str]) -> None:
    """Take out every entry whose case has left the matrix."""
    for file, name in strangers(folder, case_ids):
        extension_for(storage_in(file))().delete_snapshots(str(file), {name})


class _Serializer(AmberDataSerializer):
    """Amber with a case's two parts next to each other."""

    @classmethod
    def snapshot_sort_key(
        cls,
        snapshot: Snapshot,
        name_order: dict[str, int] | None = None,  # noqa: ARG003 - syrupy's signature
    ) -> tuple[str, str]:
        part, case_id = split_name(snapshot.name)
        return case_id, part


class StoredSnapshots(AmberSnapshotExtension):
    """Snapshots in `<storage>/<model>/<prompt kind>.ambr`; blocks are kept as they are."""

    storage: ClassVar[str] = PORTABLE
    serializer_class = _Serializer

    def serialize(self, data: Any, **_: Any) -> str:
        return str(data)

    @classmethod
    def get_location(
        cls,
        *,
        test_location: PyTestLocation,
        index: SnapshotIndex,  # noqa: ARG003 - syrupy's signature
    ) -> str:
        folder = Path(cls.dirname(test_location=test_location))
        case_id = split_name(cls.get_snapshot_name(test_location=test_location, index=0))[1]
        return str(file_of(folder, cls.storage, case_id))

    @classmethod
    def matches_test_location(cls, **_: Any) -> bool:
        return True

    def discover_snapshots(self, **_: Any) -> SnapshotCollections:
        """Nothing: what is not discovered is never unused, and never deleted."""
        return SnapshotCollections()


@lru_cache
def extension_for(storage: str) -> type[StoredSnapshots]:
    """The syrupy extension that reads and writes one storage."""
    return type("StoredSnapshots", (StoredSnapshots,), {"storage": storage})
