"""Tools: what a signature and a docstring tell a model, calls with JSON arguments, and the choice among tools."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic
import pytest

from kvasir.chat.functions import parse_doc, result_text
from kvasir.chat.tools import Tool, offer, toolset
from kvasir.errors import BadOption


class Unit(enum.Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


@dataclass
class Place:
    city: str
    zone: int | None = None


class Query(pydantic.BaseModel):
    text: str
    place: dict[str, int] = {}


def weather(place: Place, days: int = 3, *, unit: Unit = Unit.CELSIUS, kind: Literal["air", "sea"] = "air") -> Any:
    """Tell the weather.

    As good as it is known.

    Args:
        place (Place): where, by
            its city
        days: how many

    Returns:
        days: not an argument
    """
    return place, days, unit, kind


def test_a_signature_and_its_docstring_become_a_schema() -> None:
    tool = Tool.of(weather)
    assert tool.name == "weather"
    assert tool.description == "Tell the weather.\n\nAs good as it is known."
    assert tool.parameters["required"] == ["place"]
    properties = tool.parameters["properties"]
    assert properties["place"]["properties"]["city"] == {"type": "string"}
    assert properties["place"]["description"] == "where, by its city"
    assert properties["days"] == {"type": "integer", "description": "how many", "default": 3}
    assert sorted(properties["unit"]["enum"]) == ["C", "F"]
    assert properties["kind"]["enum"] == ["air", "sea"]
    assert "$ref" not in str(tool.schema())


def test_arguments_become_what_the_hints_ask_for() -> None:
    called = Tool.of(weather).call('{"place": {"city": "Oslo"}, "days": "4", "unit": "F"}')
    assert called == (Place("Oslo"), 4, Unit.FAHRENHEIT, "air")


def test_pydantic_models_and_lists_of_them_are_arguments() -> None:
    def search(queries: list[Query], limit: Annotated[int, "at most"] = 5) -> list[Query]:
        """Search."""
        return queries

    tool = Tool.of(search)
    assert tool.parameters["properties"]["queries"]["items"]["properties"]["text"]["type"] == "string"
    assert tool.parameters["properties"]["limit"]["description"] == "at most"
    (query,) = tool.call({"queries": [{"text": "rivers"}]})
    assert query == Query(text="rivers")


@pytest.mark.parametrize(
    "doc",
    ["Add.\n\nArgs:\n    a: first\n    b (int): second", "Add.\n\n:param a: first\n:param int b: second\n:return: sum",
     "Add.\n\na: first\nb -- second"],
)  # fmt: skip
def test_three_styles_of_docstring_say_the_same(doc: str) -> None:
    read = parse_doc(doc, ("a", "b"))
    assert (read.summary, read.arguments) == ("Add.", {"a": "first", "b": "second"})


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ('{"place": {"city": "Oslo"}, "dayz": 1}', "no argument 'dayz'. Did you mean 'days'"),
        ("{}", "needs the argument 'place'"),
        ('{"place": {"city": "Oslo"}, "days": "many"}', "cannot take 'many' as days"),
        ('{"place": {"city": "Oslo"}, "kind": "land"}', "cannot take 'land' as kind"),
        ("[1]", "must be a JSON object"),
        ("{", "are no JSON"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: str, why: str) -> None:
    with pytest.raises(BadOption, match=why):
        Tool.of(weather).call(arguments)


def test_a_described_tool_is_taken_in_both_shapes_and_cannot_be_called() -> None:
    function = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
    assert Tool.of(function) == Tool.of({"type": "function", "function": function})
    with pytest.raises(BadOption, match="only described"):
        Tool.of(function).call({})


def test_an_async_function_gives_something_to_await() -> None:
    async def later(x: int) -> int:
        return x + 1

    tool = Tool.of(later)
    assert tool.is_async
    assert asyncio.run(tool.call({"x": 1})) == 2


def test_methods_and_objects_are_functions_too() -> None:
    class Counter:
        def add(self, n: int) -> int:
            """Add n."""
            return n + 1

        def __call__(self, n: int) -> int:
            return n + 2

    assert Tool.of(Counter().add).parameters["required"] == ["n"]
    assert Tool.of(Counter()).call({"n": 1}) == 3


def test_what_cannot_be_named_is_no_argument() -> None:
    def any_number(*numbers: int) -> int:
        return sum(numbers)

    with pytest.raises(BadOption, match="need names"):
        Tool.of(any_number)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(BadOption, match="two tools are named 'weather'"):
        toolset([weather, {"name": "weather"}])


def test_a_choice_may_name_the_one_tool() -> None:
    tools = toolset([weather, {"name": "add"}])
    named = offer(tools, {"type": "function", "function": {"name": "add"}})
    assert named == offer(tools, "add")
    assert ([tool.name for tool in named.tools], named.choice) == (["add"], "required")
    assert offer(tools, "none").choice == "none"
    assert offer((), "auto").choice == "none"
    with pytest.raises(BadOption, match="Did you mean 'weather'"):
        offer(tools, "wether")
    with pytest.raises(BadOption, match="no tools were given"):
        offer((), "required")


def test_results_are_told_as_text() -> None:
    assert result_text("as it is") == "as it is"
    assert result_text({"t": 21.5, "place": Place("Oslo")}) == '{"t":21.5,"place":{"city":"Oslo","zone":null}}'
    assert result_text(Query(text="x")) == '{"text":"x","place":{}}'
    assert result_text(None) == "null"
