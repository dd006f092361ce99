"""Frameworks that talk to OpenAI's API through clients of their own."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import BaseModel
from rows import SAY, TOOL, WEATHER, At, Rows, check

ROWS = Rows()


class City(BaseModel):
    """A city."""

    city: Literal["Bern", "Paris"]


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"7 degrees in {city}"


def litellm_answer(at: At, **fields: Any) -> Any:
    import litellm

    given: dict[str, Any] = {"model": f"openai/{at.model}", "api_base": at.v1, "api_key": "any"}
    return litellm.completion(**{**given, "messages": SAY, "max_tokens": 8, "num_retries": 0, **fields})


@ROWS.add("litellm", "chat, streamed, tools")
def litellm_plain(at: At) -> None:
    check(litellm_answer(at).choices, "nothing")
    check(list(litellm_answer(at, stream=True)), "nothing")
    check(litellm_answer(at, tools=[TOOL]).choices, "nothing")


@ROWS.add("litellm", "response_format, forced call")
def litellm_structured(at: At) -> None:
    answer = litellm_answer(at, response_format=City, max_tokens=250, temperature=0)
    City.model_validate_json(answer.choices[0].message.content)
    answer = litellm_answer(at, tools=[TOOL], tool_choice="required", max_tokens=250, temperature=0)
    check(answer.choices[0].message.tool_calls, answer)


@ROWS.add("litellm", "anthropic/")
def litellm_anthropic(at: At) -> None:
    answer = litellm_answer(at, model=f"anthropic/{at.model}", api_base=at.url)
    check(answer.usage.completion_tokens, answer)


def langchain_model(at: At, **fields: Any) -> Any:
    from langchain_openai import ChatOpenAI

    given: dict[str, Any] = {"base_url": at.v1, "api_key": "any", "model": at.model, "max_retries": 0}
    return ChatOpenAI(**{**given, "max_tokens": 250, "temperature": 0, **fields})


@ROWS.add("LangChain", "ChatOpenAI: invoke, stream, bind_tools")
def langchain_plain(at: At) -> None:
    model = langchain_model(at, max_tokens=8)
    check(model.invoke("Name a city.").response_metadata, "nothing")
    check(list(model.stream("Name a city.")), "nothing")
    check(model.bind_tools([weather]).invoke("Name a city."), "nothing")


for method in ("json_schema", "function_calling", "json_mode"):

    @ROWS.add("LangChain", f"with_structured_output, {method}")
    def langchain_structured(at: At, method: str = method) -> None:
        if method == "json_mode":  # nothing holds the model to the schema
            found = langchain_model(at).with_structured_output(None, method=method)
            check(isinstance(found.invoke("Name a city as JSON."), dict), "no object")
            return
        found = langchain_model(at).with_structured_output(City, method=method)
        check(isinstance(found.invoke("Name a city."), City), "no City")


@ROWS.add("LangChain", "ChatAnthropic: invoke, with_structured_output")
def langchain_anthropic(at: At) -> None:
    from langchain_anthropic import ChatAnthropic

    model: Any = ChatAnthropic(
        base_url=at.url, api_key="any", model=at.model, max_tokens=250, temperature=0, max_retries=0
    )
    check(model.invoke("Name a city."), "nothing")
    check(isinstance(model.with_structured_output(City).invoke("Name a city."), City), "no City")


@ROWS.add("LlamaIndex", "OpenAILike: complete, chat, streamed")
def llama_index(at: At) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=at.model, api_base=at.v1, api_key="any", is_chat_model=True, max_tokens=8, max_retries=0
    )
    check(model.complete("Name a city.").raw, "nothing")
    messages = [ChatMessage(role="user", content="Name a city.")]
    check(model.chat(messages).raw, "nothing")
    check(list(model.stream_chat(messages)), "nothing")


for mode in ("TOOLS", "JSON", "JSON_SCHEMA"):

    @ROWS.add("instructor", f"Mode.{mode}")
    def instructor_row(at: At, mode: str = mode) -> None:
        import instructor
        import openai

        bare = openai.OpenAI(base_url=at.v1, api_key="any", max_retries=0)
        client = instructor.from_openai(bare, mode=instructor.Mode[mode])
        found = client.chat.completions.create(
            model=at.model,
            messages=[{"role": "user", "content": 'Name a city, as {"city": "its name"}.'}],
            response_model=City,
            max_retries=1,
            max_tokens=250,
            temperature=0,
        )
        check(isinstance(found, City), found)


def pydantic_model(at: At) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel(at.model, provider=OpenAIProvider(base_url=at.v1, api_key="any"))


@ROWS.add("pydantic-ai", "text")
def pydantic_text(at: At) -> None:
    from pydantic_ai import Agent

    agent: Any = Agent(pydantic_model(at), model_settings={"max_tokens": 8})
    check(agent.run_sync("Name a city.").output is not None, "nothing")


@ROWS.add("pydantic-ai", "output_type (a forced call), NativeOutput")
def pydantic_structured(at: At) -> None:
    from pydantic_ai import Agent, NativeOutput

    settings: Any = {"max_tokens": 250, "temperature": 0}
    for output in (City, NativeOutput(City)):
        agent: Any = Agent(pydantic_model(at), output_type=output, model_settings=settings, retries=0)
        check(isinstance(agent.run_sync("Name a city.").output, City), "no City")


def agents_run(at: At, model: Any, **fields: Any) -> Any:
    from agents import Agent, ModelSettings, Runner, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(
        name="one", model=model, model_settings=ModelSettings(max_tokens=250, temperature=0), **fields
    )
    return Runner.run_sync(agent, "Name a city.", max_turns=2)


def agents_client(at: At) -> Any:
    import openai

    return openai.AsyncOpenAI(base_url=at.v1, api_key="any", max_retries=0)


@ROWS.add("openai-agents", "chat completions: tools, output_type")
def agents_chat(at: At) -> None:
    from agents import OpenAIChatCompletionsModel, function_tool

    model = OpenAIChatCompletionsModel(at.model, agents_client(at))
    check(agents_run(at, model, tools=[function_tool(weather)]), "nothing")
    check(isinstance(agents_run(at, model, output_type=City).final_output, City), "no City")


@ROWS.add("openai-agents", "responses")
def agents_responses(at: At) -> None:
    from agents import OpenAIResponsesModel, function_tool

    model = OpenAIResponsesModel(at.model, agents_client(at))
    check(agents_run(at, model, tools=[function_tool(weather)]), "nothing")


@ROWS.add("smolagents", "generate, a forced call")
def smolagents_row(at: At) -> None:
    from smolagents import OpenAIServerModel, tool

    model = OpenAIServerModel(at.model, api_base=at.v1, api_key="any", max_tokens=250, temperature=0)
    check(model.generate(SAY), "nothing")
    message = model.generate(SAY, tools_to_call_from=[tool(weather)])
    check(message.tool_calls[0].function.name == "weather", message)


def dspy_model(at: At, **fields: Any) -> Any:
    import dspy

    given: dict[str, Any] = {"api_base": at.v1, "api_key": "any", "max_tokens": 250, "temperature": 0}
    return dspy.LM(f"openai/{at.model}", **{**given, "cache": False, "num_retries": 0, **fields})


@ROWS.add("dspy", "LM")
def dspy_plain(at: At) -> None:
    check(dspy_model(at, max_tokens=8)("Name a city.") is not None, "nothing")


@ROWS.add("dspy", "JSONAdapter, with a schema")
def dspy_json(at: At) -> None:
    """To a model whose name it does not know it sends none of its own."""
    import dspy

    class Name(dspy.Signature):
        """Name a city of the country."""

        country: str = dspy.InputField()
        city: str = dspy.OutputField()

    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": WEATHER}}
    with dspy.context(lm=dspy_model(at, response_format=form), adapter=dspy.JSONAdapter()):
        check(dspy.Predict(Name)(country="France").city is not None, "no city")


if __name__ == "__main__":
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    ROWS.main()
