"""Wrong durable tiers: what a crash, a damaged file or another entry would then bring to light."""

from __future__ import annotations

from .catalog import LawMutant

TIER = (
    LawMutant(
        "tensor hashes are ignored",
        "engine/cache/format.py",
        "if verify and hash_.hexdigest() != expected:",
        "if False:",
        "flipped_bits",
    ),
    LawMutant(
        "the header's hash is ignored",
        "engine/cache/format.py",
        "if not text.startswith(BEGIN) or digest != hash_.hexdigest().encode():",
        "if not text.startswith(BEGIN):",
        "flipped_header_bits",
    ),
    LawMutant(
        "the namespace is ignored",
        "engine/cache/prefixes.py",
        "        self._roots: dict[str, _Node[E]] = {}\n",
        "        class One(dict):\n"
        "            __contains__ = lambda self, key: dict.__contains__(self, '')\n"
        "            __getitem__ = lambda self, key: dict.__getitem__(self, '')\n"
        "            __delitem__ = lambda self, key: dict.__delitem__(self, '')\n"
        "            setdefault = lambda self, key, new: dict.setdefault(self, '', new)\n\n"
        "        self._roots = One()\n",
        "model_beside_the_store",
    ),
    LawMutant(
        "the tokenizer is ignored",
        "engine/cache/keeper.py",
        "if (theirs.fingerprint, theirs.tokenizer) != (ours.fingerprint, ours.tokenizer):",
        "if theirs.fingerprint != ours.fingerprint:",
        "identities",
    ),
    LawMutant(
        "the fingerprint of a moved file is ignored",
        "engine/cache/keeper.py",
        "if (theirs.fingerprint, theirs.tokenizer) != (ours.fingerprint, ours.tokenizer):",
        "if theirs.tokenizer != ours.tokenizer:",
        "identities",
    ),
    LawMutant(
        "the codec is ignored",
        "engine/cache/header.py",
        'if codec is not None and codec != fields["0.codec"]:',
        "if False:",
        "identities",
    ),
    LawMutant(
        "the file is not synced",
        "engine/cache/store.py",
        "            self._files.sync(temporary.file)\n",
        "",
        "crash_images",
    ),
    LawMutant(
        "the folder is not synced",
        "engine/cache/shelf.py",
        "        self.files.sync_folder(self.at)\n",
        "",
        "crash_images",
    ),
    LawMutant(
        "a new folder's name is not synced",
        "engine/cache/shelf.py",
        "        files.sync_folder(at)\n",
        "        pass\n",
        "crash_images",
    ),
    LawMutant(
        "the names of a store's own folders are not synced",
        "engine/cache/shelf.py",
        "                self.files.sync_folder(at)\n",
        "",
        "crash_images",
    ),
    LawMutant(
        "a generation takes its twin's checkpoint along",
        "engine/groups.py",
        "            if goes_on(other.row) and _same_generation(member, other):\n",
        "            if False:\n",
        "one_of_twins_cancelled",
    ),
    LawMutant(
        "a reader's closed loop ends the engine",
        "engine/streams.py",
        "    with contextlib.suppress(RuntimeError):\n",
        "    with contextlib.nullcontext():\n",
        "reader_whose_loop_is_gone",
    ),
    LawMutant(
        "the name comes before the bytes",
        "engine/cache/store.py",
        "            self._files.sync(temporary.file)\n"
        "            own_step(partial(self._keeper.publish, temporary, header, mtime_ns))\n",
        "            own_step(partial(self._keeper.publish, temporary, header, mtime_ns))\n"
        "            self._files.sync(temporary.file)\n",
        "failing_syncs",
    ),
    LawMutant(
        "the minimum offset is ignored",
        "engine/cache/prefixes.py",
        "        minimum = max(1, self.reuse.minimum)\n",
        "        minimum = 1\n",
        "model_beside_the_store",
    ),
    LawMutant(
        "an entry with attachments is trimmed",
        "engine/cache/prefixes.py",
        "return minimum if self.reuse.trimmable and minimum <= self.length else None",
        "return minimum if minimum <= self.length else None",
        "model_beside_the_store",
    ),
    LawMutant(
        "the index is stale: a removed entry is found again",
        "engine/cache/store.py",
        "            self._keeper.remove_damaged(*place, error)\n"
        "            self._keeper.forget(record)\n",
        "            self._keeper.remove_damaged(*place, error)\n",
        "model_beside_the_store",
    ),
    LawMutant(
        "another file under a known name is taken for it",
        "engine/cache/store.py",
        "if now.digest != record.digest:",
        "if False:",
        "files_mixed_up",
    ),
    LawMutant(
        "a live writer's temporary is removed",
        "engine/cache/shelf.py",
        "                self.files.lock(file)\n                self.files.remove(name, at)\n",
        "                self.files.remove(name, at)\n",
        "temporaries",
    ),
    LawMutant(
        "the most recent entry is evicted",
        "engine/cache/keeper.py",
        "            known_ns, _, record = heapq.heappop(heap)\n",
        "            known_ns, _, record = heap.pop(heap.index(max(heap)))\n",
        "model_beside_the_store",
    ),
    LawMutant(
        "needless entries go before the new one is there",
        "engine/cache/keeper.py",
        "            record.name = temporary.publish()\n",
        "            for old in replaced:\n"
        "                self.remove(old)\n"
        "            record.name = temporary.publish()\n",
        "crash_images",
    ),
    LawMutant(
        "a longer entry replaces what it cannot serve",
        "engine/cache/prefixes.py",
        "            if above.depth < len(tokens) and reuse.serves(above.depth, len(tokens))\n",
        "            if above.depth < len(tokens)\n",
        "model_beside_the_store",
    ),
    LawMutant(
        "what is known of a folder is not looked up again",
        "engine/cache/store.py",
        "        self._keeper.rescan_folder(namespace)\n",
        "",
        "removed_by_others",
    ),
    LawMutant(
        "a checkpoint is written though its generation has ended",
        "engine/cache/ssd.py",
        "                if not wanted():\n                    raise CalledOff\n",
        "",
        "ended_while_it_was_written",
    ),
    LawMutant(
        "arrays of any geometry are taken",
        "engine/target.py",
        "        require_geometry(captured, self._converted_geometry if due else self._geometry)\n",
        "",
        "another_geometry",
    ),
    LawMutant(
        "what waits for the disk is not looked at",
        "engine/cache/ssd.py",
        "        for item in self._spill_queue.items:\n",
        "        for item in ():\n",
        "waiting_for_the_disk",
    ),
    LawMutant(
        "nobody closes what was interrupted",
        "engine/service.py",
        "        atexit.register(self.close)\n",
        "",
        "interrupted_while_it_closes",
    ),
    LawMutant(
        "an interrupted wait is the thread's end",
        "engine/service.py",
        "            self._served.wait()\n",
        "            pass\n",
        "interrupted_while_it_closes",
    ),
)
