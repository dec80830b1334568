"""Server-sent events from bytes, however the bytes are cut (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import codecs


class EventReader:
    """Feed it bytes in order; it returns the data of the events that became whole.

    Only data matters: comments and the fields `event`, `id` and `retry` are left out. `close` gives
    out what an empty line did not end, for servers that forget the last one.

    Raises:
        UnicodeDecodeError: the bytes are not UTF-8.

    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._line: list[str] = []
        self._data: list[str] = []
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[str]:
        """The data of each event that `chunk` completes."""
        return self._take(self._decoder.decode(chunk))

    def close(self) -> list[str]:
        """The data of an event that the end of the stream cut off."""
        return self._take(self._decoder.decode(b"", final=True) + "\n\n")

    def _take(self, text: str) -> list[str]:
        events: list[str] = []
        # CR LF is one end of a line, even if the two come apart.
        if self._after_cr and text:
            text = text.removeprefix("\n")
            self._after_cr = False
        self._after_cr = self._after_cr or text.endswith("\r")
        *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line in lines:
            events += self._end_line("".join((*self._line, line)))
            self._line.clear()
        if rest:
            self._line.append(rest)
        return events

    def _end_line(self, line: str) -> list[str]:
        if not line:
            data, self._data = self._data, []
            return ["\n".join(data)] if data else []
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        return []
