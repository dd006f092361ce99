"""Frameworks that talk to OpenAI's API through clients of their own."""

from __future__ import annotations

from typing import Any, Literal

from rows import SAY, TOOL, WEATHER, At, City, Rows, check, check_text

ROWS = Rows()
ASK = "Name a city."
SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


def weather(city: Literal["Bern", "Paris"]) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"7 degrees in {city}"


def check_ran(found: object) -> None:
    """The tool ran: what it returned is among what the framework reports."""
    check("7 degrees in " in str(found), found)


def litellm_answer(at: At, **fields: Any) -> Any:
    import litellm

    given: dict[str, Any] = {"model": f"openai/{at.model}", "api_base": at.v1, "api_key": "any"}
    return litellm.completion(**{**given, "messages": SAY, **SHORT, "num_retries": 0, **fields})


@ROWS.add("litellm", "chat, streamed, tools")
def litellm_plain(at: At) -> None:
    parts = [chunk.choices[0].delta.content for chunk in litellm_answer(at, stream=True)]
    check_text(litellm_answer(at).choices[0].message.content, parts)
    check(litellm_answer(at, tools=[TOOL]).usage.completion_tokens, "nothing")


@ROWS.add("litellm", "response_format, forced call")
def litellm_structured(at: At) -> None:
    answer = litellm_answer(at, response_format=City, max_tokens=250)
    City.model_validate_json(answer.choices[0].message.content)
    answer = litellm_answer(at, tools=[TOOL], tool_choice="required", max_tokens=250)
    check(answer.choices[0].message.tool_calls, answer)


@ROWS.add("litellm", "anthropic/")
def litellm_anthropic(at: At) -> None:
    answer = litellm_answer(at, model=f"anthropic/{at.model}", api_base=at.url)
    check(answer.choices[0].message.content, answer)


def langchain_model(at: At, **fields: Any) -> Any:
    from langchain_openai import ChatOpenAI

    given: dict[str, Any] = {"base_url": at.v1, "api_key": "any", "model": at.model, "max_retries": 0}
    return ChatOpenAI(**{**given, "max_tokens": 250, "temperature": 0, **fields})


@ROWS.add("LangChain", "ChatOpenAI: invoke, stream")
def langchain_plain(at: At) -> None:
    model = langchain_model(at, max_tokens=8)
    check_text(model.invoke(ASK).text, (chunk.text for chunk in model.stream(ASK)))


def langchain_agent(model: Any, none: Any) -> None:
    """An agent whose first step must call the tool and whose second must not."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call

    @wrap_model_call
    def force(request: Any, handler: Any) -> Any:
        choice = "any" if len(request.messages) == 1 else none
        return handler(request.override(tool_choice=choice))

    agent: Any = create_agent(model, [weather], middleware=[force])
    _, _, result, last = agent.invoke({"messages": SAY})["messages"]
    check_ran(result.content)
    check(last.text, last)


@ROWS.add("LangChain", "ChatOpenAI: an agent with a tool")
def langchain_openai_agent(at: At) -> None:
    langchain_agent(langchain_model(at, max_tokens=60), "none")


for method in ("json_schema", "function_calling", "json_mode"):

    @ROWS.add("LangChain", f"with_structured_output, {method}")
    def langchain_structured(at: At, method: str = method) -> None:
        if method == "json_mode":  # nothing holds the model to the schema
            found = langchain_model(at).with_structured_output(None, method=method)
            check(isinstance(found.invoke("Name a city as JSON."), dict), "no object")
            return
        found = langchain_model(at).with_structured_output(City, method=method)
        check(isinstance(found.invoke(ASK), City), "no City")


@ROWS.add("LangChain", "ChatAnthropic: invoke, with_structured_output, an agent with a tool")
def langchain_anthropic(at: At) -> None:
    from langchain_anthropic import ChatAnthropic

    model: Any = ChatAnthropic(
        base_url=at.url, api_key="any", model=at.model, max_tokens=60, temperature=0, max_retries=0
    )
    check(model.invoke(ASK).text, "nothing")
    check(isinstance(model.with_structured_output(City).invoke(ASK), City), "no City")
    langchain_agent(model, {"type": "none"})


@ROWS.add("LlamaIndex", "OpenAILike: complete, chat, streamed")
def llama_index(at: At) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    given: dict[str, Any] = {"model": at.model, "api_base": at.v1, "api_key": "any", "max_retries": 0}
    model = OpenAILike(**given, **SHORT, is_chat_model=True)
    check(model.complete(ASK).text, "nothing")
    messages = [ChatMessage(role="user", content=ASK)]
    parts = [chunk.delta for chunk in model.stream_chat(messages)]
    check_text(model.chat(messages).message.content, parts)


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

    agent: Any = Agent(pydantic_model(at), model_settings=SHORT)
    check(agent.run_sync(ASK).output, "nothing")


@ROWS.add("pydantic-ai", "an agent with a tool")
def pydantic_tool(at: At) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.capabilities import AbstractCapability

    class Force(AbstractCapability[Any]):
        """The first step must call the tool, the second must not."""

        def get_model_settings(self) -> Any:
            return lambda run: {"tool_choice": "required" if run.run_step == 1 else "none"}

    settings: Any = {"max_tokens": 60, "temperature": 0}
    agent: Any = Agent(
        pydantic_model(at), tools=[weather], model_settings=settings, capabilities=[Force()], retries=0
    )
    found = agent.run_sync(ASK)
    check_ran(found.all_messages()[2])
    check(found.output, found)


@ROWS.add("pydantic-ai", "output_type (a forced call), NativeOutput")
def pydantic_structured(at: At) -> None:
    from pydantic_ai import Agent, NativeOutput

    settings: Any = {"max_tokens": 250, "temperature": 0}
    for output in (City, NativeOutput(City)):
        agent: Any = Agent(pydantic_model(at), output_type=output, model_settings=settings, retries=0)
        check(isinstance(agent.run_sync(ASK).output, City), "no City")


def agents_run(at: At, model: Any, **fields: Any) -> Any:
    from agents import Agent, ModelSettings, Runner, set_tracing_disabled

    set_tracing_disabled(True)
    choice = "required" if "tools" in fields else None  # of the first turn alone
    settings = ModelSettings(max_tokens=60, temperature=0, tool_choice=choice)
    agent = Agent(name="one", model=model, model_settings=settings, **fields)
    return Runner.run_sync(agent, ASK, max_turns=2)


def agents_tool(at: At, model: Any) -> None:
    from agents import function_tool

    found = agents_run(at, model, tools=[function_tool(weather)])
    check_ran(found.new_items[1].output)
    check(found.final_output, found)


def agents_client(at: At) -> Any:
    import openai

    return openai.AsyncOpenAI(base_url=at.v1, api_key="any", max_retries=0)


@ROWS.add("openai-agents", "chat completions: tools, output_type")
def agents_chat(at: At) -> None:
    from agents import OpenAIChatCompletionsModel

    model = OpenAIChatCompletionsModel(at.model, agents_client(at))
    agents_tool(at, model)
    check(isinstance(agents_run(at, model, output_type=City).final_output, City), "no City")


@ROWS.add("openai-agents", "responses: tools")
def agents_responses(at: At) -> None:
    from agents import OpenAIResponsesModel

    agents_tool(at, OpenAIResponsesModel(at.model, agents_client(at)))


@ROWS.add("smolagents", "generate, an agent with a tool")
def smolagents_row(at: At) -> None:
    """Each step of the agent must call a tool; after the last it gets a request for its answer in text."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(at.model, api_base=at.v1, api_key="any", max_tokens=60, temperature=0)
    check(model.generate(SAY).content, "nothing")
    agent = ToolCallingAgent([tool(weather)], model, max_steps=1, verbosity_level=0)
    del agent.tools["final_answer"]
    check(agent.run("The weather in Bern?"), "nothing")
    check_ran(agent.memory.steps[1])


def dspy_model(at: At, **fields: Any) -> Any:
    import dspy

    given: dict[str, Any] = {"api_base": at.v1, "api_key": "any", "max_tokens": 250, "temperature": 0}
    return dspy.LM(f"openai/{at.model}", **{**given, "cache": False, "num_retries": 0, **fields})


@ROWS.add("dspy", "LM")
def dspy_plain(at: At) -> None:
    check(dspy_model(at, max_tokens=8)(ASK)[0], "nothing")


@ROWS.add("dspy", "JSONAdapter, with a schema")
def dspy_json(at: At) -> None:
    """DSPy sends no schema of its own to a model with a name that it does not know."""
    import dspy

    class Name(dspy.Signature):
        """Name a city of the country."""

        country: str = dspy.InputField()
        city: str = dspy.OutputField()

    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": WEATHER}}
    with dspy.context(lm=dspy_model(at, response_format=form), adapter=dspy.JSONAdapter()):
        check(dspy.Predict(Name)(country="France").city in ("Bern", "Paris"), "no city")


if __name__ == "__main__":
    ROWS.main()
