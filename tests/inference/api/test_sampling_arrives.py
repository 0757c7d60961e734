"""Each sampling parameter of each route reaches the engine with the value given: what a schema or a translation forgot
would be ignored without a word."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from django.conf import settings
from django.test import Client
from msgspec import structs
from websockets.sync.client import connect

from engine_worker.broker import Verdict, WorkerBroker
from engine_worker.protocol import Chunk, EngineError, Finish, GenerateRequest, ModelCard, SamplingParams
from inference.batch_lines import Line
from inference.errors import ApiError
from inference.runtime import Runtime
from inference.schemas.chat import ChatCompletionRequest
from inference.schemas.chat_socket import ChatParams
from inference.schemas.completions import CompletionRequest
from inference.schemas.messages import MessageRequest
from inference.schemas.responses import ResponseRequest
from inference.services.submission import cache_salt
from tenants.auth import authenticate_bearer
from tenants.models import Role
from tenants.principal import Scope
from tenants.services import add_member
from tests.engine_worker.broker.driving import publish
from tests.engine_worker.broker.driving import status as worker_status
from tests.engine_worker.models import a_card
from tests.factories import TEST, make_key, make_tenant, make_user
from tests.inference.api.test_life import as_its_worker, next_claim, until

pytestmark = pytest.mark.django_db(transaction=True)

Row = tuple[Any, str, Any]
"""What the client gives, the engine's name for it, and what the engine is to find there."""
SHARED: dict[str, Row] = {
    "temperature": (0.25, "temperature", 0.25),
    "top_p": (0.5, "top_p", 0.5),
    "frequency_penalty": (0.75, "frequency_penalty", 0.75),
    "presence_penalty": (-0.5, "presence_penalty", -0.5),
    "logit_bias": ({"65": 3.0}, "logit_bias", {65: 3.0}),
    "stop": (["end", "done"], "stop", ("end", "done")),
    "seed": (77, "seed", 77),
    "top_k": (9, "top_k", 9),
    "min_p": (0.125, "min_p", 0.125),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "min_tokens": (2, "min_tokens", 2),
    "stop_token_ids": ([70, 71], "stop_token_ids", (70, 71)),
    "bad_words": (["no"], "bad_words", ("no",)),
    "ignore_eos": (True, "ignore_eos", True),
    "max_tokens": (6, "max_tokens", 6),
}
CHAT: dict[str, Row] = {
    **SHARED,
    "n": (2, "n", 2),
    "logprobs": (True, "logprobs", 4),
    "top_logprobs": (4, "logprobs", 4),
    "prompt_logprobs": (3, "prompt_logprobs", 3),
}
TEXT: dict[str, Row] = {
    **SHARED,
    "n": (2, "n", 3),
    "best_of": (3, "n", 3),
    "logprobs": (5, "logprobs", 5),
    "prompt_logprobs": (3, "prompt_logprobs", 3),
}
MESSAGES: dict[str, Row] = {
    "stop_sequences": SHARED["stop"],
    **{name: SHARED[name] for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")},
}
RESPONSES: dict[str, Row] = {
    "max_output_tokens": SHARED["max_tokens"],
    **{name: SHARED[name] for name in ("temperature", "top_p", "seed")},
}
ROUTES: dict[str, tuple[dict[str, Any], dict[str, Row], type[msgspec.Struct]]] = {
    "chat/completions": ({"messages": [{"role": "user", "content": "x"}]}, CHAT, ChatCompletionRequest),
    "completions": ({"prompt": "x"}, TEXT, CompletionRequest),
    "messages": (
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
        MESSAGES,
        MessageRequest,
    ),
    "responses": ({"input": "x"}, RESPONSES, ResponseRequest),
}
IN_BATCHES = ("chat/completions", "completions", "responses")
OTHERS = {
    # What is asked, and of whom.
    *(
        "model",
        "messages",
        "prompt",
        "input",
        "instructions",
        "system",
        "previous_response_id",
        "conversation",
    ),
    *("max_completion_tokens", "cache_salt"),  # in tests of their own below
    # Forms of the answer, and tools: test_structured.py, test_tools.py.
    *(
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "response_format",
    ),
    *("output_config", "text", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
    "chat_template_kwargs",
    # How the answer comes, and which tier serves it.
    *("stream", "stream_options", "echo", "store", "background", "service_tier", "priority", "include"),
    # What changes nothing, and what is refused unless it changes nothing: test_errors.py.
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "cache_control"),
    *("suffix", "modalities", "audio", "prediction", "web_search_options", "reasoning_effort", "verbosity"),
    *("moderation", "thinking", "container", "inference_geo", "mcp_servers", "context_management", "speed"),
    *("thread", "max_tool_calls", "reasoning", "truncation"),
}
NOT_SAMPLED_SO = {ResponseRequest: {"prompt", "top_logprobs"}}
"""Of theirs, refused: other routes' fields of these names are honoured."""


@pytest.mark.parametrize(
    ("rows", "schema"),
    [(rows, schema) for _, rows, schema in ROUTES.values()] + [(SHARED, ChatParams)],
    ids=[*ROUTES, "socket"],
)
def test_no_parameter_is_without_a_row(rows, schema):
    unsaid = set(schema.__struct_fields__) - set(rows) - OTHERS - NOT_SAMPLED_SO.get(schema, set())
    assert not unsaid, "a new parameter: give it a row, or say why it has none"
    assert set(rows) <= set(schema.__struct_fields__)
    left_out = SamplingParams(max_tokens=0)
    for name, (_, parameter, expected) in rows.items():
        assert getattr(left_out, parameter) != expected, f"{name} could be dropped, and none would see it"


def test_no_parameter_of_the_engine_is_out_of_reach():
    assert {parameter for _, parameter, _ in [*CHAT.values(), *TEXT.values()]} | {"grammar"} == set(
        SamplingParams.__struct_fields__
    )


@pytest.fixture
def card(http: httpx.Client) -> ModelCard:
    card = structs.replace(a_card(), chat_template="{{ messages[0]['content'] }}")
    asyncio.run(as_its_worker(card, loads=True))
    until(lambda: http.get(f"models/{card.model}").status_code == 200, "the model")
    return card


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def taken(card: ModelCard) -> GenerateRequest:
    """The next request as a worker gets it; its client is told of an error."""
    worker = WorkerBroker(settings.REDIS_URL, model=card.model, worker_id="w", timeout_s=10)
    try:
        await worker.heartbeat(worker_status(worker), tokenizer_sha256=card.tokenizer_sha256)
        claim = await asyncio.wait_for(next_claim(worker), 30)
        failed = Finish(
            reason="error",
            prompt_tokens=len(claim.request.prompt_token_ids),
            completion_tokens=0,
            error=EngineError("engine_error", "A test."),
        )
        end = Chunk(
            request_id=claim.request.request_id,
            epoch=claim.epoch,
            seq=0,
            token_ids=[],
            text="",
            finish=failed,
        )
        assert await publish(worker, claim, end) == Verdict.OK
        return claim.request
    finally:
        await worker.aclose()


@pytest.fixture
def arrived(http, card, threads) -> Callable[..., GenerateRequest]:
    """What the engine is asked for when a client posts this."""

    def post(route: str, **fields: Any) -> GenerateRequest:
        body = {"model": card.model, **ROUTES[route][0], **fields}
        answer = threads.submit(http.post, route, json=body)
        request = asyncio.run(taken(card))
        assert answer.result(60).status_code >= 500
        return request

    return post


def check(sampling: SamplingParams, rows: dict[str, Row]) -> None:
    found = {name: getattr(sampling, parameter) for name, (_, parameter, _) in rows.items()}
    assert found == {name: expected for name, (_, _, expected) in rows.items()}


def given(rows: dict[str, Row]) -> dict[str, Any]:
    return {name: value for name, (value, _, _) in rows.items()}


@pytest.mark.parametrize("route", ROUTES)
def test_each_parameter_of_a_route_arrives(arrived, route):
    rows = ROUTES[route][1]
    check(arrived(route, **given(rows)).sampling, rows)


def test_the_newer_bound_of_tokens_wins(arrived):
    assert arrived("chat/completions", max_tokens=6, max_completion_tokens=5).sampling.max_tokens == 5


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_a_cache_salt_arrives_mixed_with_the_tenants(arrived, route):
    request = arrived(route, cache_salt="mine")
    assert request.cache_salt == cache_salt(request.tenant_id, "mine") != cache_salt(request.tenant_id, "")


def test_each_parameter_of_the_socket_arrives(site, card, threads):
    user = make_user()
    add_member(actor=TEST, tenant=make_tenant(), user=user, role=Role.DEVELOPER)
    client = Client()
    client.force_login(user)
    cookie = f"sessionid={client.cookies['sessionid'].value}"
    frame = {
        "type": "start", "id": "g", "model": card.model, "messages": [{"role": "user", "content": "x"}],
        "params": given(SHARED) | {"cache_salt": "mine"},
    }  # fmt: skip
    with connect(
        f"ws://localhost:{site.port}/ws/chat",
        additional_headers={"Cookie": cookie},
        origin=site.url,  # type: ignore[arg-type]  # a NewType of str
        proxy=None,
    ) as socket:
        socket.send(json.dumps(frame))
        request = asyncio.run(taken(card))
    check(request.sampling, SHARED)
    assert request.cache_salt == cache_salt(request.tenant_id, "mine")


@pytest.mark.parametrize("route", IN_BATCHES)
async def test_each_parameter_of_a_batchs_line_arrives(route, key, card):
    needed, rows, _ = ROUTES[route]
    runtime = Runtime()
    try:
        principal = await authenticate_bearer(key)
        line = Line(runtime, principal, "batch-1-1", lambda generation: None)
        body = {"model": card.model, **needed, **given(rows)}
        answer = asyncio.create_task(line.answer(f"/v1/{route}", body))
        request = await taken(card)
        with pytest.raises(ApiError):
            await answer
    finally:
        await runtime.aclose()
    check(request.sampling, rows)


def test_fault_28_a_seed_that_is_left_out_is_drawn_and_told(arrived, http):
    """To who asks why the request was admitted: with it the answer can be had again."""
    issued = make_key(scopes=[Scope.INFERENCE, Scope.USAGE_READ])
    http.headers["Authorization"] = f"Bearer {issued.secret}"
    requests = [arrived("completions") for _ in range(2)] + [arrived("completions", seed=7)]
    drawn, another, named = (request.sampling.seed for request in requests)
    assert len({drawn, another, 0, named}) == 4
    assert named == 7
    assert max(drawn, another) < 2**53, "a reader of JSON that has floats alone would read another"
    told = [http.get(f"requests/{request.request_id}/explain").json() for request in requests]
    assert [explained["decision"]["seed"] for explained in told] == [drawn, another, named]
