"""`/v1/embeddings` with the real `openai` SDK, against a direct forward; and the real model."""

from __future__ import annotations

import json
import time
from base64 import b64decode

import numpy as np
import openai
import pytest
from openai import OpenAI

from engine_worker.model_store import EMBEDDING_MODEL, ModelStoreError, ensure_model
from inference.batch_runner import run_batches
from inference.models import UsageRecord
from inference.services.usage import drain_usage_stream
from tenants.principal import LimitMetric
from tests.engine_worker.models import alone, make_tiny_encoder
from tests.factories import make_key, make_tenant, set_limit
from tests.inference.conftest import engine_of

pytestmark = pytest.mark.django_db(transaction=True)
NAME = "tiny-encoder"
TEXTS = ["one", "another text, past where the tokenizer file would cut", "\u00e9", "one more"]


@pytest.fixture(scope="module")
def encoder_dir(site, tmp_path_factory):
    directory = make_tiny_encoder(tmp_path_factory.mktemp(NAME))
    with engine_of(site, f"{NAME}={directory}", "--max-num-batched-tokens", "64"):
        yield directory


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def assert_is_of(vector: list[float], text: list[int], directory) -> None:
    np.testing.assert_allclose(vector, alone(directory, text).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_every_form_of_input_gives_the_vectors_of_a_direct_forward(sdk, key, encoder_dir, form, encoding):
    texts = TEXTS if form in ("texts", "lists of ids") else TEXTS[:1]
    given = {
        "text": texts[0],
        "texts": texts,
        "ids": ids_of(texts[0]),
        "lists of ids": [ids_of(text) for text in texts],
    }[form]
    wanted = {} if encoding is None else {"encoding_format": encoding}
    answer = sdk(key).embeddings.create(model=NAME, input=given, **wanted)
    assert (answer.object, answer.model) == ("list", NAME)
    assert [each.index for each in answer.data] == list(range(len(texts)))
    for each, text in zip(answer.data, texts, strict=True):
        vector = each.embedding
        if encoding == "base64":
            assert isinstance(vector, str), "the SDK leaves what was asked for as it came"
            vector = np.frombuffer(b64decode(vector), dtype="<f4").tolist()
        assert_is_of(vector, ids_of(text), encoder_dir)
    tokens = sum(len(ids_of(text)) for text in texts)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


def test_many_texts_are_one_request_of_the_quota_and_one_row_of_the_ledger(sdk, encoder_dir):
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 2)
    client = sdk(make_key(tenant).secret)
    texts = [f"text {number}" for number in range(300)]
    raw = client.embeddings.with_raw_response.create(model=NAME, input=texts)
    assert raw.headers["x-ratelimit-remaining-requests"] == "1"
    answer = raw.parse()
    assert len(answer.data) == 300
    assert_is_of(answer.data[217].embedding, ids_of("text 217"), encoder_dir)
    deadline = time.monotonic() + 30
    while not (rows := list(UsageRecord.objects.filter(tenant=tenant))):
        assert time.monotonic() < deadline, "no row in the ledger"
        drain_usage_stream()
        time.sleep(0.1)
    (row,) = rows
    assert (row.endpoint, row.model, row.finish_reason) == ("embeddings", NAME, "stop")
    assert (row.prompt_tokens, row.completion_tokens) == (sum(map(len, texts)), 0)
    client.embeddings.create(model=NAME, input="second")
    with pytest.raises(openai.RateLimitError):
        client.embeddings.create(model=NAME, input="third")


def test_a_budget_of_tokens_is_charged_exactly(sdk, encoder_dir):
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.TOKENS, 100)
    client = sdk(make_key(tenant).secret)
    client.embeddings.create(model=NAME, input=["x" * 50, "y" * 40])
    with pytest.raises(openai.RateLimitError) as refused:
        client.embeddings.create(model=NAME, input="z" * 30)
    assert refused.value.type == "tokens"


def test_what_can_not_be_given_is_refused_by_name(sdk, key, encoder_dir):
    client = sdk(key)
    for fields, param, words in [
        ({"input": "a", "dimensions": 8}, "dimensions", "gives 32 dimensions"),
        ({"input": ""}, "input", "Entry 0 of 'input' is empty"),
        ({"input": ["a", ""]}, "input", "Entry 1"),
        ({"input": []}, "input", "must be a string"),
        ({"input": ["a", [1]]}, "input", "must be a string"),
        ({"input": ["a", "b" * 65]}, "input", "input 1 has 65"),
        ({"input": [258]}, "input", "from 0 to 257"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": "a", "extra_body": {"encoding_format": "int8"}}, "encoding_format", "int8"),
        ({"input": "a", "extra_body": {"truncate": True}}, "truncate", "unknown field"),
    ]:
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            client.embeddings.create(model=NAME, **fields)
        assert refused.value.param == param
    assert len(client.embeddings.create(model=NAME, input="a", dimensions=32).data[0].embedding) == 32


def test_neither_kind_of_model_does_the_others_work(sdk, key, model, http, encoder_dir):
    client = sdk(key)
    asked = [
        lambda: client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hi"}]),
        lambda: client.completions.create(model=NAME, prompt="hi"),
    ]
    for ask in asked:
        with pytest.raises(openai.BadRequestError, match="is an embedding model") as refused:
            ask()
        assert refused.value.param == "model"
    for path in ("messages", "messages/count_tokens"):
        body = {"model": NAME, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
        if path.endswith("count_tokens"):
            del body["max_tokens"]
        answer = http.post(path, json=body)
        assert (answer.status_code, "is an embedding model" in answer.text) == (400, True), answer.text
    with pytest.raises(openai.BadRequestError, match="is no embedding model") as refused:
        client.embeddings.create(model=model, input="hi")
    assert refused.value.param == "model"
    assert NAME in [each.id for each in client.models.list()]


def test_a_key_that_may_not_use_the_model_gets_nothing(sdk, encoder_dir):
    key = make_key(allowed_models=["another"])
    with pytest.raises(openai.PermissionDeniedError) as refused:
        sdk(key.secret).embeddings.create(model=NAME, input="hi")
    assert refused.value.code == "model_not_allowed"


@pytest.mark.timeout(300)
def test_the_real_model_by_its_name(site, tmp_path):
    try:
        ensure_model(EMBEDDING_MODEL, tmp_path)
    except ModelStoreError as absent:
        pytest.skip(str(absent))
    with (
        engine_of(site, f"minilm={EMBEDDING_MODEL}"),
        OpenAI(base_url=f"{site.url}/v1", api_key=make_key().secret, timeout=60) as client,
    ):
        texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose again."]
        answer = client.embeddings.create(model="minilm", input=texts)
        cat, kitten, rates = (np.array(each.embedding) for each in answer.data)
        assert len(cat) == 384
        assert cat @ kitten > 0.5 > 0.2 > cat @ rates
        # Longer than where its tokenizer file cuts (128 tokens): the whole text counts, up to 256.
        long = "word " * 200
        assert client.embeddings.create(model="minilm", input=long).usage.prompt_tokens == 202
        with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens"):
            client.embeddings.create(model="minilm", input=long * 2)


def test_a_batch_of_embeddings(sdk, encoder_dir):
    client = sdk(make_key().secret)
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": NAME, "input": text},
        }
        for number, text in enumerate(TEXTS)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    run_batches(budget_s=60)
    done = client.batches.retrieve(batch.id)
    assert (done.status, done.request_counts.completed) == ("completed", len(TEXTS))
    for text, told in zip(TEXTS, client.files.content(done.output_file_id).text.splitlines(), strict=True):
        (vector,) = json.loads(told)["response"]["body"]["data"]
        assert_is_of(vector["embedding"], ids_of(text), encoder_dir)
