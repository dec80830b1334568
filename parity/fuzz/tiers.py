"""The machine of two tiers: prefixes are put, taken, evicted, demoted, damaged, found by a restart.

Beside the engine's tiers and the list of what they hold (`our_tiers.py`) stands mlx-lm's prompt
cache (`lru.py`). What is handed out goes on as a request would, and must say what a state says that
never was in a tier; the entries must stay what they were, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, TypeAlias

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.state.membership import no_row_form
from engine.state.rows import Rows

from .contracts import Violation
from .entries import LONGEST, cut, sizes_of
from .history import Chunk, History, Reference
from .lru import TheirTier
from .namespaces import START, Namespace, namespaces_of
from .our_tiers import OurTiers, append
from .setup import Setup
from .worlds import VOCAB, kinds

TOKEN = st.integers(0, VOCAB - 1)
WIDTHS = st.lists(st.sampled_from((1, 1, 2, 5, 12)), max_size=4)
"""Of the forwards in which tokens are processed; what is left goes into one more."""

Prompt: TypeAlias = tuple[int, int, list[int], int | None]
"""Which of the latest texts that were put, how much of its front, and what follows; its namespace
or that one."""

PROMPT: st.SearchStrategy[Prompt] = st.tuples(
    st.integers(0, 5),
    st.sampled_from((LONGEST, LONGEST, LONGEST, 0, START - 2)) | st.integers(1, LONGEST),
    st.lists(TOKEN, max_size=2) | st.lists(TOKEN, max_size=9),
    st.sampled_from((None, None, None, None, None, 0, 1, 2)),
)

ASK = st.sampled_from((None, 0, 1, 2))
"""Which of the latest texts, or none."""

OTHER = 7
"""What the donors of states go on with."""


class TierMachine(RuleBasedStateMachine):
    """Made for a setup by `tier_machine`.

    Laws `longest-prefix`, `tier-agree`, `roundtrip`, `identity`, `cap`, `supersede`, `damage`.
    """

    setup: ClassVar[Setup]

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []
        self._folder = TemporaryDirectory()
        self._files = 0

    def teardown(self) -> None:
        self._folder.cleanup()

    @initialize(
        reference=st.runner().flatmap(lambda machine: st.sampled_from(machine.setup.references)),
        ram=st.sampled_from((3, 2, 2, 1, 0)),
        cold=st.sampled_from((1, 1, 0, 0, None)),
        home=st.integers(0, 2),
    )
    def start(self, reference: Reference, ram: int, cold: int | None, home: int) -> None:
        """Most is put in the namespace `home`."""
        self.world = reference.world
        self.setup.tally.sequences += 1
        self.namespaces = namespaces_of(self.world)
        caps = sizes_of(reference).caps(ram, cold)
        self.steps.append(f"world {self.world.name}, caps of {caps} bytes")
        self.texts: list[tuple[Namespace, Chunk]] = [(self._namespace(home), ())]
        folder = Path(self._folder.name, "ssd")
        self.ours = OurTiers(reference, caps, folder, self.setup.tally, self.steps)
        self.theirs = TheirTier(reference, self._violated, self._new_file)

    @rule(prompt=PROMPT, widths=WIDTHS, drafted=st.booleans())
    def put(self, prompt: Prompt, widths: list[int], drafted: bool) -> None:
        namespace, tokens = self._asked(prompt)
        chunks = cut(tokens, widths)
        self._step("put", f"{chunks} in {namespace.name!r}" + drafted * " with a drafter's")
        rows, history = self._filled(namespace, chunks)
        self._keep(namespace, rows, 0, history, drafted)
        append(rows, (OTHER,))
        self.theirs.put(namespace, self.theirs.feed(namespace, None, chunks))
        self._check()

    @precondition(lambda self: len(self.texts) > 1)
    @rule(
        prompt=PROMPT,
        widths=WIDTHS,
        more=st.lists(TOKEN, min_size=1, max_size=3),
        keep=st.booleans(),
        drafted=st.booleans(),
    )
    def take(
        self, prompt: Prompt, widths: list[int], more: list[int], keep: bool, drafted: bool
    ) -> None:
        """Go on from what is found; with `keep` the state then is put, as a row's that retires."""
        self._ask(*self._asked(prompt), widths, more, keep, drafted)

    @precondition(lambda self: not no_row_form(self.world.fresh()))
    @rule(prompts=st.lists(PROMPT, min_size=2, max_size=3), width=st.integers(1, 10))
    def put_extracts(self, prompts: list[Prompt], width: int) -> None:
        """Rows that went on together for a window of tokens are put one by one."""
        asked = [self._asked(prompt) for prompt in prompts]
        namespace, texts = asked[0][0], [tokens for _, tokens in asked]
        windows = [tuple((row + i) % VOCAB for i in range(width)) for row in range(len(texts))]
        if any(len({namespace.due(len(text) + n) for text in texts}) > 1 for n in (0, width)):
            namespace = self.namespaces[0]  # rows that are packed stand beside none that are not
        self._step("put extracts", f"of {texts} after {windows} in {namespace.name!r}")
        alone = [self._filled(namespace, [text]) for text in texts]
        rows, histories = alone[0][0], [history for _, history in alone]
        for other, _ in alone[1:]:
            rows = rows.joined(other)
        append(rows, *map(namespace.ids, windows))
        histories = [namespace.append(*pair) for pair in zip(histories, windows, strict=True)]
        for row, history in enumerate(histories):
            self._keep(namespace, rows, row, history, False)
        append(rows, *[(OTHER,)] * len(texts))
        self.theirs.put(namespace, self.theirs.feed(namespace, None, histories[-1].chunks))
        self._check()

    @precondition(lambda self: self.ours.model.ram)
    @rule(idle=st.sampled_from((0, 0, 1, 3)), entries=st.integers(0, 2), ask=ASK)
    def demote(self, idle: int, entries: int, ask: int | None) -> None:
        """mlx-lm has no colder tier, and evicts. With `ask` a text that was put is wanted again."""
        self._step("demote", f"what is idle for {idle} operations; mlx-lm keeps {entries}")
        self.ours.demote(idle)
        self.theirs.shrink(entries)
        self._check()
        self._ask_again(ask)

    @precondition(lambda self: self.ours.ssd is not None and self.ours.model.ram)
    @rule(which=st.integers(0, 5), front=st.sampled_from((LONGEST, LONGEST, 5)))
    def flush(self, which: int, front: int) -> None:
        """A text that was put, or its front."""
        namespace, tokens = self._asked((which, front, [], None))
        self._step("flush", f"{list(tokens)} of {namespace.name!r}")
        self.ours.flush(namespace, tokens)
        self._check()

    @precondition(lambda self: self.ours.model.ram and self.ours.model.cold)
    @rule(ask=ASK)
    def restart(self, ask: int | None) -> None:
        """With `ask` a text that was put is wanted again."""
        self._restart()
        self._ask_again(ask)

    @precondition(lambda self: self.ours.model.sound)
    @rule(
        number=st.integers(0, 5),
        how=st.sampled_from(("flip", "flip", "cut", "remove")),
        place=st.floats(0, 1, exclude_max=True),
        bit=st.integers(0, 7),
        ask=st.booleans(),
    )
    def damage(self, number: int, how: str, place: float, bit: int, ask: bool) -> None:
        """Of a file; with `ask` it is wanted when nothing else is there any more."""
        sound = self.ours.model.sound
        line = sound[number % len(sound)]
        self._step("damage", f"{how} the file of {list(line.tokens)} at {place:.3f}, bit {bit}")
        self.ours.damage(line, how, place, bit)
        if ask:
            self._restart()
            self._ask(line.namespace, (*line.tokens, 1), [], [2])

    def _restart(self) -> None:
        self._step("restart", "")
        self.ours.restart()
        self.theirs.restart()
        self._check()

    def _ask_again(self, which: int | None) -> None:
        if which is not None:
            namespace, tokens = self._asked((which, LONGEST, [], None))
            self._ask(namespace, (*tokens, 1), [], [2])

    def _ask(
        self,
        namespace: Namespace,
        tokens: Chunk,
        widths: list[int],
        more: list[int],
        keep: bool = False,
        drafted: bool = False,
    ) -> None:
        kept = keep * (", keep it" + drafted * " with a drafter's")
        self._step("take", f"{list(tokens)} of {namespace.name!r}, then {widths} and {more}{kept}")
        keep = keep and len(tokens) + len(more) <= LONGEST
        ends = [(token,) for token in more]
        found = self.ours.take(namespace, tokens)
        if found or keep:
            rows, history = found or (namespace.rows(self.world), History())
            chunks = [*cut(tokens[len(history) :], widths), *ends]
            history = self.ours.go_on(namespace, rows, history, chunks)
            if keep:
                self._keep(namespace, rows, 0, history, drafted)
        fetched = self.theirs.fetch(namespace, tokens)
        self.setup.tally.takes["mlx-lm: hit" if fetched else "mlx-lm: miss"] += 1
        if keep:
            rest = cut(tokens[len(fetched.history) if fetched else 0 :], widths)
            self.theirs.put(namespace, self.theirs.feed(namespace, fetched, [*rest, *ends]))
        self._check()

    def _keep(
        self, namespace: Namespace, rows: Rows, row: int, history: History, drafted: bool
    ) -> None:
        self.ours.put(namespace, rows, row, history, drafted)
        self.texts.append((namespace, history.tokens))

    def _filled(self, namespace: Namespace, chunks: Sequence[Chunk]) -> tuple[Rows, History]:
        """A row that was given the chunks."""
        rows, history = namespace.rows(self.world), History()
        for chunk in chunks:
            append(rows, namespace.ids(chunk))
            history = namespace.append(history, chunk)
        return rows, history

    def _check(self) -> None:
        self.ours.check()
        self.theirs.check()

    def _step(self, kind: str, what: str) -> None:
        self.steps.append(f"{kind} {what}".strip())
        self.ours.model.now_s += 1
        self.setup.tally.operation(f"tiers: {kind}", kinds(self.world.fresh()))

    def _violated(self, violation: Violation) -> None:
        self.setup.violated(violation, self.steps)

    def _namespace(self, number: int) -> Namespace:
        return self.namespaces[number % len(self.namespaces)]

    def _asked(self, prompt: Prompt) -> tuple[Namespace, Chunk]:
        """A namespace and at most `LONGEST` tokens, at least one."""
        which, front, tail, other = prompt
        namespace, text = self.texts[-1 - which % len(self.texts)]
        if other is not None:
            namespace = self._namespace(other)
        return namespace, (*text[:front], *tail)[:LONGEST] or (0,)

    def _new_file(self) -> Path:
        self._files += 1
        return Path(self._folder.name, f"{self._files}.safetensors")


def tier_machine(setup: Setup) -> type[TierMachine]:
    return type("TierMachine", (TierMachine,), {"setup": setup})
