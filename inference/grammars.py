"""What a client says about the form of the answer, as a grammar for the engine. Checked here, so that what
can't be followed is a 400 that says why, before anything is promised."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer, grammar_from

from inference.errors import InvalidRequest

WHITESPACE: Final = "( |\n {0,32})?"
"""Between JSON's tokens: nothing, a space, or a new line and its indentation. A model that favours white
space would otherwise never come to an end."""
_GRAMMAR_BYTES_MAX: Final = 256 * 1024


def json_schema_grammar(schema: dict[str, Any], *, param: str) -> str:
    """Raises InvalidRequest: the schema is not valid, or uses what can't be followed."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE}
        )
    except ValueError as error:
        raise InvalidRequest(f"The schema is not valid: {error}", param=param) from error
    return checked(grammar, param=param)


def regex_grammar(regex: str, *, param: str) -> str:
    return checked(LLMatcher.grammar_from_regex(regex), param=param)


def choice_grammar(choices: list[str], *, param: str) -> str:
    return checked(LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices))), param=param)


def text_grammar(text: str, *, param: str) -> str:
    """A Lark grammar or GBNF, told apart by their looks."""
    try:
        return checked(grammar_from("grammar", text), param=param)
    except ValueError as error:
        raise InvalidRequest(f"The grammar is not valid: {error}", param=param) from error


def checked(grammar: str, *, param: str) -> str:
    """The grammar itself. Raises InvalidRequest: with llguidance's own words, or because no text is of that form."""
    if len(grammar.encode()) > _GRAMMAR_BYTES_MAX:
        raise InvalidRequest(f"'{param}' is too large: at most {_GRAMMAR_BYTES_MAX} bytes.", param=param)
    matcher = LLMatcher(_bytes_alone(), grammar, log_level=0)
    if matcher.is_error():
        # Or it only names tokens of the model's own: without a tokenizer that is no error.
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        if is_error:
            raise InvalidRequest(f"'{param}' can't be followed: {messages[0].strip()[:500]}", param=param)
        return grammar
    matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidRequest(f"'{param}' can't be followed: no text is of that form. Loosen it.", param=param)
    return grammar


@cache
def _bytes_alone() -> LLTokenizer:
    """A vocabulary of single bytes: whether a text can begin at all does not depend on the model's."""
    return LLTokenizer("byte")
