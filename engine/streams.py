"""What `Engine.submit` gives back: one request's events, for a thread or for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from .values import Finish, TokenEvent

Event = TokenEvent | Finish


class Stream(Iterator[Event], AsyncIterator[Event]):
    """`TokenEvent`s in order, then one `Finish`; filled by the model thread, read by one reader.

    `for event in stream` waits in a thread, `async for event in stream` in a coroutine. What went
    wrong is raised where the next event would have stood. After `cancel` nothing more comes.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._events: deque[Event] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._wake: Callable[[], object] | None = None

    def cancel(self) -> None:
        """End the request; its row leaves the group before the next round."""
        self._cancel()
        with self._changed:
            self._events.clear()
        self.close()

    def result(self) -> Finish:
        """Wait for the end and return it, whatever has been read so far.

        Raises:
            RuntimeError: the request was cancelled.
        """
        for event in self:
            if isinstance(event, Finish):
                return event
        raise RuntimeError("the request was cancelled")

    def put(self, *events: Event) -> None:
        """Called by the model thread."""
        with self._changed:
            if not self._closed:
                self._events.extend(events)
            self._notify()

    def close(self, error: BaseException | None = None) -> None:
        """Called by the model thread: nothing more will come."""
        with self._changed:
            if not self._closed:
                self._closed, self._error = True, error
            self._notify()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        with self._changed:
            self._changed.wait_for(self._has_news)
            event = self._taken()
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        while True:
            with self._changed:
                if self._has_news():
                    event = self._taken()
                    break
                self._wake = lambda: _set(news, loop)
            await news.wait()
            news.clear()
        if event is None:
            raise StopAsyncIteration
        return event

    def _has_news(self) -> bool:
        return bool(self._events) or self._closed

    def _taken(self) -> Event | None:
        if self._events:
            return self._events.popleft()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return None

    def _notify(self) -> None:
        self._changed.notify_all()
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()


def _set(news: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """Set an event of that loop, from any thread; if the loop is closed nobody waits any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(news.set)
