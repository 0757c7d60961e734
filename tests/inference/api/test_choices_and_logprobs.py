"""Several choices, log probabilities, echo and words that must not come, through the SDK and the real engine."""

from __future__ import annotations

import time

import openai
import pytest

from inference.models import UsageRecord
from inference.services.usage import drain_usage_stream
from tests.factories import make_key, make_tenant

ASK = [{"role": "user", "content": "Which way does it flow?"}]
LETTERS = {str(i): -100 for i in range(258) if not 97 <= i <= 122}
"""The tiny model's tokens are bytes: only small letters come."""


@pytest.fixture
def chat(sdk, key, engine_model):
    def create(**given):
        body = {"messages": ASK, "max_tokens": 8, "seed": 7, "logit_bias": LETTERS} | given
        return sdk(key).chat.completions.create(model=engine_model, **body)

    return create


@pytest.fixture
def complete(sdk, key, engine_model):
    def create(**given):
        body = {"prompt": "the weir", "max_tokens": 5, "temperature": 0, "logit_bias": LETTERS} | given
        return sdk(key).completions.create(model=engine_model, **body)

    return create


def test_n_choices_differ_and_the_first_is_what_one_alone_gives(chat):
    one, three = chat(), chat(n=3)
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == one.choices[0].message.content
    assert [choice.message.content for choice in chat(n=3).choices] == texts
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens == 24
    assert [choice.finish_reason for choice in three.choices] == ["length"] * 3


def test_n_choices_streamed(chat):
    whole = [choice.message.content for choice in chat(n=3).choices]
    texts, roles, ends = ["", "", ""], [], {}
    for chunk in chat(n=3, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.index] if choice.delta.role else []
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert texts == whole
    assert sorted(roles) == [0, 1, 2]
    assert ends == {0: "length", 1: "length", 2: "length"}


def test_choices_are_one_row_of_the_ledger(sdk, engine_model, transactional_db):
    tenant = make_tenant()
    sdk(make_key(tenant).secret).chat.completions.create(
        model=engine_model, messages=ASK, max_tokens=5, n=4, logit_bias=LETTERS
    )
    deadline = time.monotonic() + 30
    while not UsageRecord.objects.filter(tenant=tenant).exists():
        assert time.monotonic() < deadline
        drain_usage_stream()
        time.sleep(0.05)
    (row,) = UsageRecord.objects.filter(tenant=tenant)
    assert row.completion_tokens == 20
    assert row.prompt_tokens == len(f"user: {ASK[0]['content']}\nassistant:")


def test_chat_logprobs(chat):
    (choice,) = chat(logprobs=True, top_logprobs=3).choices
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content) == choice.message.content
    assert len(content) == 8
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.logprob < 0
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
    (plain,) = chat(logprobs=True).choices
    assert [entry.top_logprobs for entry in plain.logprobs.content] == [[]] * 8
    assert chat().choices[0].logprobs is None


def test_chat_logprobs_streamed(chat):
    whole = chat(logprobs=True, top_logprobs=1).choices[0]
    streamed = [
        entry
        for chunk in chat(logprobs=True, top_logprobs=1, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.logprobs.content]


def test_fault_29_logprobs_are_the_models_own_at_any_temperature(chat):
    def first(**given):
        return (
            chat(logprobs=True, logit_bias={"97": 100}, max_tokens=1, **given).choices[0].logprobs.content[0]
        )

    assert first(temperature=0.5).logprob == pytest.approx(first(temperature=1).logprob, abs=1e-3)
    assert first().token == "a"


def test_the_end_token_has_no_logprob_in_the_answer(chat):
    letters = {str(i): -100 for i in range(256)} | {"97": 100, "256": 99.5}
    for seed in range(20):
        (choice,) = chat(logit_bias=letters, logprobs=True, seed=seed, max_tokens=30).choices
        assert len(choice.logprobs.content) == len(choice.message.content)
        if choice.finish_reason == "stop":
            return
    raise AssertionError("it never ended by itself")


def test_completion_logprobs_and_echo(complete):
    plain = complete().choices[0]
    echoed = complete(echo=True, logprobs=2).choices[0]
    assert echoed.text == "the weir" + plain.text
    logprobs = echoed.logprobs
    assert "".join(logprobs.tokens) == echoed.text
    assert logprobs.text_offset == list(range(13))
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs[1:])
    assert complete(logprobs=0).choices[0].logprobs.tokens == list(plain.text)
    # A direct score of the longer text says the same of the same tokens.
    again = complete(prompt=echoed.text, max_tokens=0, echo=True, logprobs=2).choices[0]
    assert again.logprobs.token_logprobs[1:] == pytest.approx(logprobs.token_logprobs[1:], abs=1e-3)


def test_fault_18_max_tokens_0_scores_only(complete):
    answer = complete(max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "the weir"
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.tokens) == 8
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 0)


def test_echo_streamed_with_choices_and_prompts(complete):
    asked = {
        "prompt": [[*b"the weir"], [97, 98]],
        "n": 2,
        "echo": True,
        "logprobs": 1,
        "seed": 3,
        "temperature": 1,
    }
    whole = complete(**asked)
    assert len(whole.choices) == 4
    assert [choice.text[:2] for choice in whole.choices] == ["th", "th", "ab", "ab"]
    texts, tokens, offsets = [""] * 4, [[], [], [], []], [[], [], [], []]
    for chunk in complete(stream=True, **asked):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs:
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [choice.text for choice in whole.choices]
    assert ["".join(each) for each in tokens] == texts
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]


def test_the_prompts_own_logprobs_are_told_as_vllm_tells_them(complete, chat, http, engine_model):
    prompt = "the weir"
    (choice,) = complete(extra_body={"prompt_logprobs": 3}, echo=True, logprobs=1).choices
    scores = choice.prompt_logprobs
    assert scores[0] is None
    assert [next(iter(each)) for each in scores[1:]] == [str(token) for token in prompt.encode()[1:]]
    for token, told, echoed in zip(
        prompt[1:], scores[1:], choice.logprobs.token_logprobs[1 : len(prompt)], strict=True
    ):
        own = next(iter(told.values()))
        assert own["decoded_token"] == token
        assert own["logprob"] == pytest.approx(echoed, abs=1e-6)
        ranks = sorted(each["rank"] for each in told.values())
        assert ranks in ([1, 2, 3], [1, 2, 3, own["rank"]])
        by_rank = sorted(told.values(), key=lambda each: each["rank"])
        assert by_rank == sorted(told.values(), key=lambda each: -each["logprob"])
    assert {len(top) for top in choice.logprobs.top_logprobs[1 : len(prompt)]} <= {1, 2}, (
        "`logprobs` asked for one"
    )
    pair = complete(prompt=["ab", "abc"], n=2, temperature=1, extra_body={"prompt_logprobs": 0}).choices
    assert [len(each.prompt_logprobs) for each in pair] == [2, 2, 3, 3]
    assert all(len(told) == 1 for each in pair for told in each.prompt_logprobs[1:])

    answer = chat(extra_body={"prompt_logprobs": 1})
    text = f"user: {ASK[0]['content']}\nassistant:"
    told = [next(iter(each.values()))["decoded_token"] for each in answer.prompt_logprobs[1:]]
    assert "".join(told) == text[1:]
    plain = http.post(
        "chat/completions", json={"model": engine_model, "messages": ASK, "max_tokens": 1}
    ).json()
    assert "prompt_logprobs" not in plain
    for ask in (chat, complete):
        for given, stream in ((21, False), (-1, False), (0, True)):
            with pytest.raises(openai.BadRequestError) as refused:
                ask(extra_body={"prompt_logprobs": given}, stream=stream)
            assert refused.value.param == "prompt_logprobs"


def test_bad_words(complete):
    text = complete(max_tokens=40).choices[0].text
    pair = text[3:5]
    assert pair not in complete(max_tokens=40, extra_body={"bad_words": [pair]}).choices[0].text


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"extra_body": {"bad_words": [" "]}}, "bad_words[0]"),
    ],
)
def test_what_cannot_be_is_refused(chat, given, param):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(**given)
    assert refused.value.param == param


def test_best_of_tells_the_likeliest_and_charges_all(complete):
    asked = {"prompt": ["ab", "cd"], "temperature": 2, "seed": 4, "max_tokens": 6}
    every = complete(n=4, logprobs=0, **asked)
    best = complete(n=2, best_of=4, **asked)

    def per_token(choice) -> float:
        values = choice.logprobs.token_logprobs
        return sum(values) / len(values)

    expected = []
    for start in (0, 4):
        ranked = sorted(every.choices[start : start + 4], key=per_token, reverse=True)
        expected += [choice.text for choice in ranked[:2]]
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage.completion_tokens == every.usage.completion_tokens
    for given in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(**given)
        assert refused.value.param == "best_of"
