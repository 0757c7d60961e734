"""The OpenAI Agents SDK: an agent with a tool, over chat completions and over responses, whole and streamed."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

CALLS: list[bool] = []


@function_tool
def is_open(sluice: bool) -> str:
    """Whether the sluice is open."""
    CALLS.append(sluice)
    return "yes" if sluice else "no"


async def main() -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(
        base_url=f"{os.environ['WEIR_URL']}/v1", api_key=os.environ["WEIR_KEY"], max_retries=0, timeout=60
    ) as client:
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            # A tool must be called in the first turn; the second is free, so that the agent can end.
            agent: Agent[Any] = Agent(
                name="keeper",
                instructions="Watch the sluice.",
                tools=[is_open],
                model=kind(model=os.environ["WEIR_TOOL_MODEL"], openai_client=client),
                # Hot, so that a random model comes upon its end token soon: an answer cut off is an error to this SDK.
                model_settings=ModelSettings(
                    tool_choice="required", parallel_tool_calls=False, temperature=2.0
                ),
            )
            CALLS.clear()
            result = await Runner.run(agent, "Is it open?", max_turns=3)
            assert len(CALLS) == 1, CALLS
            assert isinstance(result.final_output, str), result
            assert result.context_wrapper.usage.requests == 2, result
            streamed = Runner.run_streamed(agent, "Is it open?", max_turns=3)
            kinds = {event.type async for event in streamed.stream_events()}
            assert len(CALLS) == 2, CALLS
            assert {"raw_response_event", "run_item_stream_event"} <= kinds, kinds
            assert isinstance(streamed.final_output, str), streamed


asyncio.run(main())
print("ok")
