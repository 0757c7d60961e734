"""LiteLLM's client: its OpenAI and its Anthropic dialect, and what it makes of our errors."""

from __future__ import annotations

import os

import litellm

URL, KEY = os.environ["WEIR_URL"], os.environ["WEIR_KEY"]
MODEL, TOOL_MODEL = os.environ["WEIR_MODEL"], os.environ["WEIR_TOOL_MODEL"]
TALK = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "is_open",
        "parameters": {
            "type": "object",
            "properties": {"sluice": {"type": "boolean"}},
            "required": ["sluice"],
        },
    },
}


def ask(model: str, **given: object) -> object:
    base = {"api_base": f"{URL}/v1", "api_key": KEY, "messages": TALK, "max_tokens": 7, "num_retries": 0}
    return litellm.completion(model=model, **{**base, **given})


whole = ask(f"openai/{MODEL}", seed=3)
assert len(whole.choices[0].message.content) == 7, whole
assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (7, "length"), whole

parts = list(ask(f"openai/{MODEL}", seed=3, stream=True, stream_options={"include_usage": True}))
text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
assert text == whole.choices[0].message.content, parts
assert [part.usage.completion_tokens for part in parts if getattr(part, "usage", None)] == [7], parts

called = ask(
    f"openai/{TOOL_MODEL}",
    tools=[TOOL],
    tool_choice="required",
    parallel_tool_calls=False,
    max_tokens=300,
    seed=1,
)
(call,) = called.choices[0].message.tool_calls
assert (call.function.name, called.choices[0].finish_reason) == ("is_open", "tool_calls"), called

text = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", prompt="hello", api_base=f"{URL}/v1", api_key=KEY, max_tokens=5
)
assert len(text.choices[0].text) == 5, text

claude = ask(f"anthropic/{MODEL}", api_base=URL)
assert len(claude.choices[0].message.content) == 7, claude
parts = list(ask(f"anthropic/{MODEL}", api_base=URL, stream=True))
assert len("".join(part.choices[0].delta.content or "" for part in parts)) == 7, parts

for kind, given in [
    (litellm.NotFoundError, {"model": "openai/no-such-model"}),
    (litellm.AuthenticationError, {"model": f"openai/{MODEL}", "api_key": "wr_live_wrong"}),
    (litellm.ContextWindowExceededError, {"model": f"openai/{MODEL}", "max_tokens": 100_000}),
]:
    try:
        answer = ask(**given)
    except kind:
        continue
    raise AssertionError(f"{kind.__name__} expected, not {answer}")
print("ok")
