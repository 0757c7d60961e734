"""Output that must follow a grammar, on a tiny model that would rather say something else."""

from __future__ import annotations

import itertools
import json

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from engine_worker.engine.errors import InvalidRequest
from engine_worker.engine.grammar import GrammarError, Grammars
from engine_worker.protocol import FinishReason
from tests.engine_worker.driving import Driver, request

PROMPT = list(b"say it")
PERSON = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    defaults={"whitespace_pattern": "( |\n {0,8})?"},
)
SAMPLED = {"temperature": 1.0, "ignore_eos": False, "grammar": PERSON}


@pytest.mark.parametrize("seed", range(8))
def test_every_output_is_of_the_schema(build_tiny, seed):
    result = Driver(build_tiny()).run([request("a", PROMPT, 200, seed=seed, **SAMPLED)])["a"]
    person = json.loads(result.text)
    assert set(person) == {"name", "age", "tags"}
    assert 0 <= person["age"] <= 120
    assert result.finish.reason == FinishReason.STOP


def test_fault_27_a_model_that_favours_spaces_comes_to_an_end(build_tiny):
    spaces = {32: 50.0, 10: 50.0}
    result = Driver(build_tiny()).run([request("a", PROMPT, 400, logit_bias=spaces, **SAMPLED)])["a"]
    assert result.finish.reason == FinishReason.STOP
    assert json.loads(result.text)
    assert "  " in result.text


def test_the_batch_is_not_touched_by_a_neighbours_grammar(build_tiny):
    plain = {"temperature": 1.0, "seed": 3}
    alone = Driver(build_tiny()).run([request("plain", PROMPT, 30, **plain)])["plain"].token_ids
    own = Driver(build_tiny()).run([request("g", PROMPT, 200, seed=1, **SAMPLED)])["g"].token_ids
    digits = LLMatcher.grammar_from_regex("[0-9]{30}")
    results = Driver(build_tiny()).run(
        [
            request("plain", PROMPT, 30, **plain),
            request("g", PROMPT, 200, seed=1, **SAMPLED),
            request("d", PROMPT, 40, temperature=1.0, grammar=digits),
        ]
    )
    assert results["plain"].token_ids == alone
    assert results["g"].token_ids == own
    assert len(results["d"].text) == 30
    assert results["d"].text.isdigit()


def test_a_lark_grammar_and_min_tokens(build_tiny):
    grammar = LLMatcher.grammar_from_lark('start: ("ab" | "cd")+')
    ask = {"temperature": 1.0, "ignore_eos": False, "grammar": grammar, "logit_bias": {256: 100.0}}
    result = Driver(build_tiny()).run([request("a", PROMPT, 40, min_tokens=6, **ask)])["a"]
    assert result.finish.reason == FinishReason.STOP
    assert len(result.text) >= 6
    assert not result.text.replace("ab", "").replace("cd", "")


@pytest.mark.parametrize("at", range(0, 40, 3))
def test_a_resumed_request_goes_on_in_its_grammar(build_tiny, at):
    whole = Driver(build_tiny()).run([request("a", PROMPT, 200, seed=2, **SAMPLED)])["a"].token_ids
    at = min(at, len(whole) - 1)
    resumed = request("b", PROMPT, 200, seed=2, resumed_token_ids=whole[:at], **SAMPLED)
    assert Driver(build_tiny()).run([resumed])["b"].token_ids == whole[at:]


def test_a_preempted_request_goes_on_in_its_grammar(build_tiny):
    asked = [request(str(i), [i, 2, 3], 60, seed=i, **SAMPLED) for i in range(5)]
    free = Driver(build_tiny()).run(asked)
    tight = Driver(build_tiny(num_kv_blocks=19))
    results = tight.run(asked)
    assert tight.core.stats().preemptions > 0
    for name, result in free.items():
        assert results[name].token_ids == result.token_ids


def test_fault_27_a_matcher_that_rejects_ends_the_request_with_an_error(build_tiny):
    driver = Driver(build_tiny())
    good = Driver(build_tiny()).run([request("good", PROMPT, 20)])["good"].token_ids
    driver.add(request("good", PROMPT, 20))
    uid = driver.add(request("bad", PROMPT, 50, **SAMPLED))
    for _ in range(3):
        driver.step()
    # The matcher is at another place than the output: whatever comes next, it refuses.
    driver.core._live[uid].matcher._matcher.consume_token(0)
    results = driver.run()
    assert results["bad"].finish.reason == FinishReason.ERROR
    assert len(results["bad"].token_ids) <= 4
    assert results["good"].token_ids == good


@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_regex("(ab"),
        LLMatcher.grammar_from_json_schema({"type": "strin"}),
        LLMatcher.grammar_from_lark("start: nowhere"),
        "no grammar at all",
    ],
)
def test_fault_27_a_bad_grammar_is_refused_with_the_reason(build_tiny, grammar):
    driver = Driver(build_tiny())
    with pytest.raises(InvalidRequest, match=r"the grammar is not valid: .+"):
        driver.add(request("bad", PROMPT, grammar=grammar))
    assert len(driver.run([request("good", PROMPT, 5)])["good"].token_ids) == 5


@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_regex("(a{1000}){1000}"),
        LLMatcher.grammar_from_json_schema({"type": "string", "pattern": "^(a{1000}){1000}$"}),
    ],
)
def test_fault_27_a_grammar_that_is_too_large_ends_its_request_alone(build_tiny, grammar):
    """What takes long, the first mask, was done before: no step waits for it."""
    good = Driver(build_tiny()).run([request("good", PROMPT, 20)])["good"].token_ids
    driver = Driver(build_tiny())
    driver.add(request("good", PROMPT, 20))
    uid = driver.add(request("bad", PROMPT, 20, grammar=grammar))
    masks = driver.core._live[uid].matcher._took
    results = driver.run()
    assert len(masks) <= 2
    assert results["bad"].finish.error.code == "invalid_request"
    assert "Make it simpler" in results["bad"].finish.error.message
    assert results["good"].token_ids == good


@pytest.mark.parametrize(
    ("spent_s", "ends"), [((0.012,), True), ((0.001,), False), ((0.001, 0.5, 0.002), False)]
)
def test_fault_27_a_grammar_that_is_slow_to_follow_is_not_followed_for_long(build_tiny, spent_s, ends):
    """By the processor's time that most of its masks took; a single one may be slow."""
    good = Driver(build_tiny()).run([request("good", PROMPT, 40)])["good"].token_ids
    driver = Driver(build_tiny())
    driver.add(request("good", PROMPT, 40))
    uid = driver.add(request("bad", PROMPT, 40, grammar=LLMatcher.grammar_from_regex("[a-z]{100}")))
    waits = ((0.1, spent) for spent in itertools.cycle(spent_s))
    readings = itertools.accumulate(itertools.chain.from_iterable(waits))
    driver.core._live[uid].matcher._clock = lambda: next(readings)
    results = driver.run()
    assert results["good"].token_ids == good
    if not ends:
        assert results["bad"].finish.reason == FinishReason.LENGTH
        return
    assert results["bad"].finish.error.code == "invalid_request"
    assert "takes 12 ms to say what may come next" in results["bad"].finish.error.message
    assert len(results["bad"].token_ids) < 12


def test_large_grammars_of_use_are_followed(build_tiny):
    names = "|".join(f"item {number} of {number * 7919 % 10007}" for number in range(3000))
    fields = {
        f"field_{i}": {
            "anyOf": [{"type": "string", "maxLength": 200}, {"enum": [f"v{k}" for k in range(50)]}]
        }
        for i in range(150)
    }
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    expression = f"({names})(,[a-z]{{1,30}}){{0,100}}"
    for grammar in (LLMatcher.grammar_from_regex(expression), LLMatcher.grammar_from_json_schema(schema)):
        asked = request("a", PROMPT, 40, temperature=1.0, grammar=grammar)
        assert Driver(build_tiny()).run([asked])["a"].finish.error is None


CHOICE = LLMatcher.grammar_from_lark('start: "a"')
DEAD_END = LLMatcher.grammar_from_lark(r'start: "x" /[^\s\S]/')


@pytest.mark.parametrize(
    ("given", "made"), [({"grammar": CHOICE, "bad_words": ("a",)}, ""), ({"grammar": DEAD_END}, "x")]
)
@pytest.mark.parametrize("overlap", [False, True])
def test_fault_27_what_leaves_no_token_is_its_clients_to_mend(build_tiny, given, made, overlap):
    good = Driver(build_tiny()).run([request("good", PROMPT, 20)])["good"].token_ids
    built = build_tiny(overlap=overlap)
    asked = [request("good", PROMPT, 20), request("bad", PROMPT, 20, temperature=1.0, logprobs=2, **given)]
    results = Driver(built).run(asked)
    built.core.device.close()
    assert results["bad"].finish.reason == FinishReason.ERROR
    assert results["bad"].finish.error.code == "invalid_request"
    assert "No token may come next" in results["bad"].finish.error.message
    assert results["bad"].text == made
    assert results["good"].token_ids == good


def test_fault_27_a_grammar_without_an_end_is_its_clients_to_mend(build_tiny):
    endless = LLMatcher.grammar_from_lark('start: "a" start')
    good = Driver(build_tiny()).run([request("good", PROMPT, 20)])["good"].token_ids
    results = Driver(build_tiny()).run(
        [request("good", PROMPT, 20), request("bad", PROMPT, 7, grammar=endless)]
    )
    assert results["bad"].finish.error.code == "invalid_request"
    assert "Too many items" in results["bad"].finish.error.message
    assert results["good"].token_ids == good


def test_max_tokens_ends_in_mid_grammar_as_length(build_tiny):
    result = Driver(build_tiny()).run([request("a", PROMPT, 5, **SAMPLED)])["a"]
    assert (result.finish.reason, len(result.token_ids)) == (FinishReason.LENGTH, 5)


def test_a_model_whose_tokenizer_no_grammar_can_follow_is_served_without():
    grammars = Grammars(Tokenizer(WordLevel({"a": 0}, unk_token="a")), 1, frozenset((0,)))
    with pytest.raises(GrammarError, match="ask another model"):
        grammars.matcher(PERSON)
