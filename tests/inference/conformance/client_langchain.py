"""LangChain's `ChatOpenAI`: whole, streamed, tools, forms, over chat completions and over responses."""

from __future__ import annotations

import os

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

PLACE = {"base_url": f"{os.environ['WEIR_URL']}/v1", "api_key": os.environ["WEIR_KEY"], "timeout": 60}
MODEL, TOOL_MODEL = os.environ["WEIR_MODEL"], os.environ["WEIR_TOOL_MODEL"]
TALK = [SystemMessage("Be brief."), HumanMessage("hello")]


@tool
def is_open(sluice: bool) -> str:
    """Whether the sluice is open."""
    return "yes" if sluice else "no"


class Level(BaseModel):
    is_high: bool


chat = ChatOpenAI(model=MODEL, max_tokens=7, seed=3, **PLACE)
whole = chat.invoke(TALK)
assert len(whole.content) == 7, whole
assert whole.usage_metadata["output_tokens"] == 7, whole
assert whole.response_metadata["finish_reason"] == "length", whole

parts = list(chat.stream(TALK, stream_usage=True))
assert "".join(part.content for part in parts) == whole.content, parts
assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) == 7, parts

responses = ChatOpenAI(model=MODEL, max_tokens=7, use_responses_api=True, **PLACE)
assert responses.invoke(TALK).usage_metadata["output_tokens"] == 7
streamed = list(responses.stream(TALK))
assert len("".join(part.text for part in streamed)) == 7, streamed

forced = ChatOpenAI(model=TOOL_MODEL, max_tokens=300, seed=1, **PLACE)
called = forced.bind_tools([is_open], tool_choice="is_open").invoke(TALK)
(call,) = called.tool_calls
assert call["name"] == "is_open", called
assert isinstance(call["args"]["sluice"], bool), called
answered = [*TALK, called, ToolMessage(is_open.invoke(call["args"]), tool_call_id=call["id"])]
assert isinstance(forced.invoke(answered, max_tokens=3), AIMessage)
for method in ("function_calling", "json_schema"):
    level = forced.with_structured_output(Level, method=method).invoke(TALK)
    assert isinstance(level, Level), (method, level)
print("ok")
