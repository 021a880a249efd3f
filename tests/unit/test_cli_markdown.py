"""Markdown as it comes: nothing lost, nothing printed twice, the same however the text is cut up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style

from kvasir.cli.markdown import Markdown
from kvasir.cli.wrap import Piece

DOCUMENT = """

# Title with `code`

Some *italic*, **bold text** and `code()`; 2 * 3 * 4 = 24, snake_case_name, **not closed, and a line that is long.
A [link](https://example.com/a) and [no link] \\*escaped\\* 😀 你好世界你好世界你好世界你好世界



- an item that is long enough to run over the margin of the page and then some more
  - nested **bold**
* star
1. first
2) second

> quoted text

---
| a | **b** |
|---|:--:|
| 1 | `x` |
| 333 |

```python
def f(x):
    \"\"\"a text
    over lines\"\"\"

    return x + 1
```
after ~~struck~~ ***both***
"""


def render(text: str, *, step: int = 1, width: int = 60) -> list[Piece]:
    markdown = Markdown(lambda: width)
    pieces: list[Piece] = []
    for i in range(0, len(text), step):
        pieces += markdown.feed(text[i : i + step])
    return pieces + markdown.finish()


def shown(text: str, **more: int) -> str:
    return "".join(piece.text for piece in render(text, **more))


def style_of(text: str, word: str) -> Style:
    (style,) = [piece.style for piece in render(text, step=len(text)) if word in piece.text]
    return style if isinstance(style, Style) else Style.parse(style)


@pytest.mark.parametrize("step", [2, 3, 7, 50, len(DOCUMENT)])
def test_a_document_looks_the_same_however_it_comes(step: int) -> None:
    assert shown(DOCUMENT, step=step) == shown(DOCUMENT)


@given(st.text(st.sampled_from("ab *_`~[]()#->|1.\\\n!é你😀")), st.integers(1, 9), st.integers(1, 40))
def test_any_text_looks_the_same_however_it_comes(text: str, step: int, width: int) -> None:
    assert shown(text, step=step, width=width) == shown(text, width=width)


@given(st.text(st.sampled_from("abc déf.,;\n你"), max_size=200), st.integers(4, 40))
def test_plain_text_keeps_every_character_in_order(text: str, width: int) -> None:
    assert "".join(shown(text, width=width).split()) == "".join(text.split())


@given(st.text(st.sampled_from("abc dé 你"), max_size=200))
def test_no_row_is_wider_than_the_terminal(text: str) -> None:
    longest = max((cell_len(word) for word in text.split()), default=0)
    for row in shown(text, width=20).split("\n"):
        assert cell_len(row) <= max(20, longest)


def test_a_document_looks_like_this() -> None:
    rows = shown(DOCUMENT, width=40).split("\n")
    assert rows[0] == "Title with code"
    assert rows[1] == ""
    assert rows[2] == "Some italic, bold text and code(); 2 * 3"
    assert "**not closed," in "".join(rows)
    assert "link (https://example.com/a)" in " ".join(rows)
    assert "*escaped*" in " ".join(rows)
    item = rows.index("• an item that is long enough to run")
    assert rows[item + 1] == "  over the margin of the page and then"
    assert "  • nested bold" in rows
    assert rows[rows.index("1. first") + 1] == "2) second"
    assert "│ quoted text" in rows
    assert "─" * 40 in rows
    table = rows.index("a   │ b")
    assert rows[table + 1 : table + 4] == ["────┼──", "1   │ x", "333 │  "]
    code = rows.index("def f(x):")
    assert rows[code - 1] == "── python " + "─" * 30
    assert rows[code : code + 5] == ["def f(x):", '    """a text', '    over lines"""', "", "    return x + 1"]
    assert rows[-1] == "after struck both"


@pytest.mark.parametrize("n", [*range(230, 250)])
def test_a_long_bold_sentence_looks_the_same_however_it_comes(n: int) -> None:
    text = "**" + "a" * n + "** [" + "b" * n + "](c) `" + "d" * n + "` end"
    assert shown(text) == shown(text, step=len(text)) == shown(text, step=100)


def test_empty_lines_never_pile_up() -> None:
    assert "\n\n\n" not in shown(DOCUMENT)
    assert shown("\n\n  \na\n\n\n\nb\n\n") == "a\n\nb"


@pytest.mark.parametrize(
    ("text", "word", "style"),
    [
        ("x **bold** y", "bold", "bold"),
        ("*it* y", "it", "italic"),
        ("__b__ y", "b", "bold"),
        ("***both*** y", "both", "bold italic"),
        ("~~gone~~ y", "gone", "strike"),
        ("`code` y", "code", "cyan"),
        ("# Head", "Head", "bold underline"),
        ("## Head", "Head", "bold"),
        ("**a `b` c**", "b", "bold cyan"),
        ("[text](http://a.b)", "text", "underline"),
        ("> said", "said", "italic"),
    ],
)
def test_marks_become_styles(text: str, word: str, style: str) -> None:
    assert style_of(text, word) == Style.parse(style)
    assert not set("*_~`#") & set(shown(text))


@pytest.mark.parametrize(
    "text",
    [
        "2 * 3 * 4",
        "a_b_c",
        "**kwargs",
        "a ` b",
        "#hashtag",
        "3.14",
        "-5 degrees",
        "[x] done",
        "f(x)[0](y z)",
        "C:\\new",
        "~5 and ~6",
        "a * b*c",
        "| no table",
        "1.",
        "-",
        "##",
    ],
)
def test_what_only_looks_like_markdown_stays(text: str) -> None:
    assert shown(text) == text
    assert shown(text + "\n") == text


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    markdown = Markdown(lambda: 40)
    assert "".join(piece.text for piece in markdown.feed("one two ")) == "one two"
    assert markdown.feed("**three") == []  # it may become bold
    assert [piece for piece in markdown.feed("** four ") if piece.style == "bold"] == [Piece("three", "bold")]
    assert "".join(piece.text for piece in markdown.feed("`x" + "y" * 300)).startswith("\n`x")  # it never will


def test_a_word_without_end_does_not_wait_for_it() -> None:
    markdown = Markdown(lambda: 40)
    assert len("".join(piece.text for piece in markdown.feed("i" * 100))) == 100
    assert "".join(piece.text for piece in markdown.feed("i")) == "i"


def test_a_code_block_that_is_cut_off_is_closed() -> None:
    assert shown("```js\nlet x", width=20) == "── js " + "─" * 14 + "\nlet x\n" + "─" * 20


def test_a_fence_of_four_holds_one_of_three() -> None:
    rows = shown("````\n```\ninside\n```\n````\nout", width=10).split("\n")
    assert rows[1:4] == ["```", "inside", "```"]
    assert rows[-1] == "out"


def test_code_has_colours_of_its_language_and_no_language_has_none() -> None:
    assert style_of("```python\nreturn 1\n```", "return").color is not None
    assert style_of("```nosuch\nreturn 1\n```", "return 1") == Style()


def test_a_table_too_wide_stays_as_it_is() -> None:
    text = "| aaaaaaaaaa | bbbbbbbbbb |\n|---|---|\n| 1 | 2 |"
    assert shown(text, width=15) == text


def test_a_terminal_obeys_nothing_the_model_writes() -> None:
    assert shown("a\x1b[2Jb\x07 \x9b1m`\x1b]0;x\x07`\n```\n\x1b[H\n```").count("\x1b") == 0
    assert "\x9b" not in shown("\x9b1m")
