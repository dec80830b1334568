"""Text out of tokens: stop strings, split characters, and what is held back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine import Target
from engine.stops import TextStream

TEXT = st.text(alphabet="abé日🙂 \n", max_size=12)
STOPS = st.lists(st.text(alphabet="abé日🙂 \n", min_size=1, max_size=4), max_size=3)


def feed(target: Target, tokens: list[int], stops: list[str]) -> tuple[TextStream, int, list[str]]:
    """Push tokens until the stream stops; how many were pushed, and each push's text."""
    stream = TextStream(target.tokenizer, stops)
    texts = [""] * len(tokens)
    pushed = 0
    for token in tokens:
        pushed += 1
        for piece in stream.push(token):
            texts[piece.index] = piece.text
        if stream.stopped:
            break
    for piece in stream.close():
        texts[piece.index] = piece.text
    return stream, pushed, texts


@given(text=TEXT, stops=STOPS)
def test_the_text_ends_where_the_first_stop_string_begins(
    target: Target, text: str, stops: list[str]
) -> None:
    """`stop`: as `str.find` says, at the token that completes it, split characters included."""
    text = "x" + text  # the detokenizer drops a leading space
    stream, pushed, texts = feed(target, target.encode(text), stops)
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if not ends:
        assert (stream.stopped, stream.text) == (False, text)
        assert stream.num_content == pushed == len(target.encode(text))
    else:
        cut = min(text.find(s) for s in stops if s in text[: min(ends)])
        assert (stream.stopped, stream.text) == (True, text[:cut])
        assert pushed == len(target.encode(text[: min(ends)]))
        assert stream.num_content == len(target.encode(text[:cut]))
    assert "".join(texts) + stream.tail == stream.text


@given(text=TEXT, stops=STOPS)
def test_nothing_certain_is_taken_back(target: Target, text: str, stops: list[str]) -> None:
    """Every released text is a prefix of the final one, at every moment."""
    stream = TextStream(target.tokenizer, stops)
    seen = ""
    snapshots = []
    for token in target.encode(text):
        seen += "".join(piece.text for piece in stream.push(token))
        snapshots.append(seen)
        if stream.stopped:
            break
    stream.close()
    assert all(stream.text.startswith(snapshot) for snapshot in snapshots)


def test_without_stop_strings_every_token_is_out_at_once(target: Target) -> None:
    stream = TextStream(target.tokenizer, [])
    for number, token in enumerate(target.encode("né🙂")):
        assert [piece.index for piece in stream.push(token)] == [number]
    assert stream.close() == []
    assert stream.text == "né🙂"


def test_an_incomplete_character_is_flushed_at_the_end(target: Target) -> None:
    """The bytes are generated content: they are shown, as a replacement character."""
    stream, _, _ = feed(target, target.encode("a🙂")[:-1], [])
    assert stream.text == "a\ufffd"
