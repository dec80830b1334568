"""Any text, made safe to show: what cannot be seen or stored is written as Python escapes it."""

from __future__ import annotations


def visible(text: str, keep: str = "\n\t") -> str:
    """`text` with every character that does not print escaped, but for those in `keep`.

    So a NUL, a lone surrogate, a right-to-left override or a no-break space stands there as such,
    and what is left can be encoded, and is allowed in XML 1.0.
    """
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)


def one_line(text: str) -> str:
    """`text` on one line; a line break is escaped too."""
    return visible(text, keep="")


def _escaped(character: str) -> str:
    return ascii(character)[1:-1]
