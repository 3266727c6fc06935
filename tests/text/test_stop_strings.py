import hypothesis.strategies as st
from hypothesis import given

from support.examples import examples
from treadle.text import StopStringMatcher


def feed(pieces, stops, **options):
    """Return the emitted pieces of text and the stop string that was found."""
    matcher = StopStringMatcher(stops, **options)
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.found is not None:
            return shown, matcher.found
    return [*shown, matcher.flush()], None


def test_no_part_of_a_stop_string_across_pieces_is_emitted():
    shown, found = feed(["Hello <", "|e", "n", "d|> more"], ["<|end|>"])
    assert found == "<|end|>"
    assert shown == ["Hello ", "", "", ""]


def test_an_incomplete_stop_string_is_emitted():
    assert feed(["a<|e", "x"], ["<|end|>"]) == (["a", "<|ex", ""], None)
    assert feed(["a<|e"], ["<|end|>"]) == (["a", "<|e"], None)


def test_the_earliest_match_wins_and_then_the_first_in_the_list():
    assert feed(["one two three"], ["three", "two"]) == (["one "], "two")
    assert feed(["abc"], ["b", "bc"]) == (["a"], "b")


def test_the_stop_string_can_be_included():
    assert feed(["ab", "cd"], ["bc"], include_in_output=True) == (["a", "bc"], "bc")


def test_text_before_min_tokens_is_not_searched():
    matcher = StopStringMatcher(["END"])
    assert matcher.push("xEND E", may_stop=False) == "xEND E"
    assert matcher.push("ND END") == "ND "
    assert matcher.found == "END"


PIECES = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=12)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3)


@examples(1000)
@given(pieces=PIECES, stops=STOPS, keep=st.booleans())
def test_pieces_equal_a_search_in_the_whole_text(pieces, stops, keep):
    text = "".join(pieces)
    shown, found = feed(pieces, stops, include_in_output=keep)
    assert (found is not None) == any(stop in text for stop in stops)
    if found is None:
        assert "".join(shown) == text
        return
    start = text.find(found)
    assert "".join(shown) == (text[: start + len(found)] if keep else text[:start])
    # The text ends with the piece in which the first stop string is complete.
    first_complete = min(text.find(stop) + len(stop) for stop in stops if stop in text)
    assert start + len(found) >= first_complete
    assert len("".join(pieces[: len(shown) - 1])) < first_complete


def reference(pieces, stops):
    """What `feed` returns, from a search in the whole text after each piece."""
    text, num_shown, shown = "", 0, []
    for piece in pieces:
        text += piece
        matches = [(text.find(stop), i) for i, stop in enumerate(stops) if stop in text]
        if matches:
            position, number = min(matches)
            return [*shown, text[num_shown:position]], stops[number]
        starts = [stop[:length] for stop in stops for length in range(1, len(stop))]
        held = max((len(start) for start in starts if text.endswith(start)), default=0)
        shown.append(text[num_shown : len(text) - held])
        num_shown = len(text) - held
    return [*shown, text[num_shown:]], None


@examples(2000)
@given(
    pieces=st.lists(st.text("ab", max_size=6), max_size=16),
    stops=st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=6),
)
def test_each_piece_equals_a_search_in_the_whole_text(pieces, stops):
    assert feed(pieces, stops) == reference(pieces, stops)


def test_the_work_is_proportional_to_the_text(monkeypatch):
    tried = []
    may_start = StopStringMatcher._may_start
    monkeypatch.setattr(
        StopStringMatcher, "_may_start", lambda self, text: tried.append(text) or may_start(self, text)
    )
    # Almost a stop string, again and again: each time all that was held back is released.
    stops = ["a" * 1000 + f"b{i}" for i in range(64)]
    pieces = ["aaaa"] * 240 + ["c"] + ["aaaa"] * 400 + ["d"]
    shown, found = feed(pieces, stops)
    assert found is None
    assert "".join(shown) == "".join(pieces)
    assert len(tried) <= len("".join(pieces)) + len(pieces)
