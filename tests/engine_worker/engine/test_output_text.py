"""Characters and stop strings, whatever the borders between tokens are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine_worker.engine.admission import Admission
from engine_worker.engine.detokenizer import Detokenizer
from engine_worker.engine.grammar import Grammars
from engine_worker.engine.output_text import OutputText
from engine_worker.engine.types import EngineRequest
from engine_worker.protocol import SamplingParams
from tests.engine_worker.models import EOS, VOCAB_SIZE, byte_tokenizer

TOKENIZER = byte_tokenizer()
SPECIAL = frozenset({EOS})


def output_text(*stop: str) -> OutputText:
    return OutputText(Detokenizer(TOKENIZER, SPECIAL), stop)


def pieces(text: OutputText, token_ids: list[int]) -> tuple[list[str], str | None]:
    """What is handed out after each token, and at the end; the stop string that ended it."""
    given: list[str] = []
    for token_id in token_ids:
        stop = text.push(token_id)
        given.append(text.take())
        if stop is not None:
            text.close()
            return [*given, text.take()], stop
    text.close()
    return [*given, text.take()], None


@pytest.mark.parametrize("text", ["😀", "日本語", "naïve café", "a😀b🇫🇷c", "한국어 👩‍👩‍👧 x"])
def test_fault_09_characters_byte_by_byte(text):
    given, _ = pieces(output_text(), list(text.encode()))
    assert "".join(given) == text
    assert all("\ufffd" not in piece for piece in given)
    assert all(piece in ("", *text) for piece in given)


def test_fault_09_an_incomplete_character_is_flushed_at_the_end():
    given, _ = pieces(output_text(), [*b"ab", *"😀".encode()[:3]])
    assert given == ["a", "b", "", "", "", "\ufffd"]


@given(st.lists(st.integers(0, EOS), max_size=60))
@settings(max_examples=400, deadline=None)
def test_fault_10_no_character_twice_and_none_lost(token_ids):
    """Any bytes at all: the pieces join to the full decoding, so each stream is a prefix of the final text."""
    given, _ = pieces(output_text(), token_ids)
    assert "".join(given) == TOKENIZER.decode([t for t in token_ids if t != EOS], skip_special_tokens=True)


def test_endless_bad_bytes_are_let_out_and_cost_the_same_each():
    text = output_text()
    detokenizer = text._detokenizer
    given = ""
    for _ in range(200):
        text.push(0xFF)
        given += text.take()
    assert len(given) > 190
    assert len(detokenizer._window) <= 9


PIECES = ["\u2581", "\u2581\u2581", "a", "b", "\u2581a", "\u2581the", "\n", "é"]


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    """Tokens of bytes and of words with their space before them, as the tokenizers of Llama 2, Mistral, Phi-3 and Gemma
    have them."""
    names = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    made = Tokenizer(
        models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[], byte_fallback=True)
    )
    made.decoder = decoder
    made.add_special_tokens([AddedToken("<s>", special=True)])
    return made


SPACED = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
KINDS = {
    "llama 2, mistral, phi 3": sentencepiece(decoders.Sequence([*SPACED, decoders.Strip(" ", 1, 0)])),
    "gemma": sentencepiece(decoders.Sequence(SPACED)),
    "metaspace": sentencepiece(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)])
    ),
}
BOS = frozenset({0})
WORDS = st.lists(
    st.one_of(
        st.sampled_from(PIECES).map(lambda piece: [257 + PIECES.index(piece)]),
        st.sampled_from("€日😀é").map(lambda char: [1 + byte for byte in char.encode()]),
        st.just([0]),
    ),
    max_size=14,
).map(lambda parts: [token for part in parts for token in part])


@pytest.mark.parametrize("kind", KINDS)
@given(before=WORDS, token_ids=WORDS)
@example(before=[259], token_ids=[262, 261])
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_what_the_text_gains_by_them(kind, before, token_ids):
    """A completion's goes on where its prompt ends, its first space included; a chat's begins anew."""
    tokenizer = KINDS[kind]

    def decoded(ids: list[int]) -> str:
        return str(tokenizer.decode([each for each in ids if each], skip_special_tokens=False))

    given, _ = pieces(OutputText(Detokenizer(tokenizer, BOS)), token_ids)
    assert "".join(given) == decoded(token_ids)
    given, _ = pieces(OutputText(Detokenizer(tokenizer, BOS, before)), token_ids)
    assert decoded(before) + "".join(given) == decoded(before + token_ids)


def test_after_half_a_character_a_text_begins_anew():
    half, rest = "€".encode()[:2], "€".encode()[2:]
    given, _ = pieces(OutputText(Detokenizer(TOKENIZER, SPECIAL, [*b"ab", *half])), [*rest, *b"c"])
    assert "".join(given) == "\ufffdc"


@pytest.mark.parametrize(("continues_text", "expected"), [(True, " the"), (False, "the")])
def test_a_request_says_whether_its_text_goes_on_from_the_prompt(continues_text, expected):
    tokenizer = KINDS["llama 2, mistral, phi 3"]
    admission = Admission(
        tokenizer=tokenizer,
        special_token_ids=BOS,
        eos_token_ids=frozenset(),
        vocab_size=tokenizer.get_vocab_size(),
        grammars=Grammars(byte_tokenizer(), VOCAB_SIZE, frozenset({EOS})),
        max_model_len=20,
        model_revision="r",
        cached_block_size=None,
    )
    request = EngineRequest("r", [0, 259], SamplingParams(max_tokens=3), continues_text=continues_text)
    sequence = admission.admit(request, 1)
    sequence.append(257 + PIECES.index("\u2581the"))
    assert sequence.text.take() == expected


def _splits(text: str) -> list[list[str]]:
    """Every way to cut `text` into pieces."""
    result = []
    for cuts in itertools.product((False, True), repeat=len(text) - 1):
        parts, current = [], text[0]
        for char, cut in zip(text[1:], cuts, strict=True):
            if cut:
                parts.append(current)
                current = ""
            current += char
        result.append([*parts, current])
    return result


class _PieceDetokenizer(Detokenizer):
    """Tokens with text of their own, to put token borders anywhere."""

    def __init__(self, vocabulary: list[str]) -> None:
        super().__init__(TOKENIZER, frozenset())
        self._vocabulary = vocabulary

    def push(self, token_ids):
        return "".join(self._vocabulary[token_id] for token_id in token_ids)

    def flush(self):
        return ""


@pytest.mark.parametrize("parts", _splits("x\n\nEN\ny"))
def test_fault_08_stop_string_across_borders(parts):
    text = OutputText(_PieceDetokenizer(parts), ("\n\nEN", "never"))
    given, stop = pieces(text, list(range(len(parts))))
    assert stop == "\n\nEN"
    assert "".join(given) == "x"


def test_fault_08_text_that_only_looked_like_a_stop_is_let_out():
    given, stop = pieces(output_text("</end>"), list(b"a</en <b"))
    assert stop is None
    assert given == ["a", "", "", "", "", "</en ", "", "<b", ""]


def test_the_earliest_stop_wins_and_the_longest_of_those():
    for token_ids in (list(b"one two"),):
        assert pieces(output_text("two", "ne t", "ne"), token_ids)[1] == "ne"
    text = OutputText(_PieceDetokenizer(["abcd"]), ("bc", "bcd", "d"))
    given, stop = pieces(text, [0])
    assert ("".join(given), stop) == ("a", "bcd")


def test_a_stop_string_inside_itself():
    assert pieces(output_text("aab"), list(b"xaaab"))[0] == ["x", "", "", "a", "", ""]


def test_fault_11_a_stop_string_that_may_not_stop_is_text():
    text = output_text("end")
    given = ""
    for i, token_id in enumerate(b"end end"):
        stop = text.push(token_id, may_stop=i >= 4)
        given += text.take()
    assert stop == "end"
    assert given == "end "
