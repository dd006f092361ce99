"""Markdown of answers in headless Chromium: the elements that it becomes, and those that it cannot become."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.resources import files

import pytest
import web
from playwright.sync_api import Page, expect
from running import Running

OpenPage = Callable[..., Page]

WRITTEN = """# Title with `code`

First *line* and **bold _both_**,
second __line__ ~~gone~~ and 2 * 3 * 4, snake_case_name, \\*plain\\*.

- one
- two
  1. inner
  2. more **bold**

     a paragraph

3. three
4. four
> quoted
> - in it
---
| a | b |
|:--|--:|
| `x \\| y` | 2 |
| only |

See [the docs](https://example.org/a_(b) "title"), https://example.org/x, <b>no tag</b>.

```python
def f(x):
    return "<i>*x*</i>"
```
~~~
open
"""
DRAWN = """<h4>Title with <code>code</code></h4>\
<p>First <em>line</em> and <strong>bold <em>both</em></strong>,
second <strong>line</strong> <del>gone</del> and 2 * 3 * 4, snake_case_name, *plain*.</p>\
<ul><li>one</li><li>two<ol start="1"><li>inner</li>\
<li>more <strong>bold</strong><p>a paragraph</p></li></ol></li></ul>\
<ol start="3"><li>three</li><li>four</li></ol>\
<blockquote><p>quoted</p><ul><li>in it</li></ul></blockquote>\
<hr>\
<div><table><thead><tr><th>a</th><th>b</th></tr></thead>\
<tbody><tr><td><code>x \\| y</code></td><td>2</td></tr>\
<tr><td>only</td><td></td></tr></tbody></table></div>\
<p>See <a href="https://example.org/a_(b)">the docs</a>, \
<a href="https://example.org/x">https://example.org/x</a>, \
&lt;b&gt;no tag&lt;/b&gt;.</p>\
<figure><figcaption>python<button>Copy</button></figcaption><pre><code>def f(x):
    return "&lt;i&gt;*x*&lt;/i&gt;"</code></pre></figure>\
<figure><figcaption>code<button>Copy</button></figcaption><pre><code>open
</code></pre></figure>"""
PLAIN = """(text) => { const copy = text.cloneNode(true);
  for (const part of copy.querySelectorAll('*')) for (const name of part.getAttributeNames())
    if (!['href', 'start'].includes(name)) part.removeAttribute(name);
  return copy.innerHTML; }"""

HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 1">
[a](javascript:window.hit=1) [b](JaVaScRiPt:window.hit=1) [c](data:text/html,<script>window.hit=1</script>)
[d]( java&#x0A;script:window.hit=1) [e](//example.org/x) [f](file:///etc/passwd) [g](blob:x)
![picture](https://example.org/picture.png) ![p](x" onerror="window.hit=1)
<a href="https://example.org" onclick="window.hit=1">x</a>
| <b>a</b> | b |
|---|---|
| <img src=x onerror=window.hit=1> | [t](javascript:1) |

```html"><script>window.hit = 1</script>
<iframe srcdoc="<script>parent.hit = 1</script>"></iframe>
```
"""

TAGS = {
    "p",
    "a",
    "code",
    "div",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "figure",
    "figcaption",
    "button",
    "pre",
}


def pieces(text: str, size: int) -> Iterator[str]:
    for at in range(0, len(text), size):
        yield text[at : at + size]


@pytest.fixture
def answered(page_server: Running, open_page: OpenPage) -> Callable[..., Page]:
    """A page with one answer of this text."""

    def answered(text: str, *, size: int = 7, **options: object) -> Page:
        parts = [{"choices": [{"index": 0, "delta": {"content": part}}]} for part in pieces(text, size)]
        body = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
        page = open_page(page_server, **options)
        events = {"content_type": "text/event-stream", "body": body}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(**events))
        page.fill("#chat-message", "GO")
        page.press("#chat-message", "Enter")
        expect(page.locator("#chat .assistant .text")).not_to_be_empty()
        expect(page.locator("#chat-stop")).to_be_disabled()
        return page

    return answered


def test_markdown_is_drawn(answered: Callable[..., Page]) -> None:
    assert answered(WRITTEN).locator("#chat .assistant .text").evaluate(PLAIN) == DRAWN


def test_a_text_that_grows_is_drawn_as_the_whole(page_server: Running, open_page: OpenPage) -> None:
    page = open_page(page_server)
    drawn = page.evaluate(
        """async (text) => {
          const { Markdown } = await import('/page/static/markdown.js');
          const made = (upTo, markdown) => {
            markdown.show(text.slice(0, upTo));
            return markdown.element.innerHTML; };
          const fresh = () => new Markdown(document.createElement('div')), grown = fresh(), odd = [];
          for (let i = 0; i <= text.length; i += 1) if (made(i, grown) !== made(i, fresh())) odd.push(i);
          return odd; }""",
        WRITTEN,
    )
    assert drawn == []


def test_text_of_the_model_runs_nothing_and_loads_nothing(answered: Callable[..., Page]) -> None:
    """The fixture's end checks that no request went to another host, and no complaint of the policy."""
    page = answered(HOSTILE)
    text = page.locator("#chat .assistant .text")
    assert page.evaluate("window.hit") is None
    tags = set(text.evaluate("(text) => [...text.querySelectorAll('*')].map((each) => each.localName)"))
    assert tags <= TAGS
    links = text.locator("a").evaluate_all("all => all.map((a) => [a.href, a.rel])")
    assert links == [
        ["https://example.org/picture.png", "noopener noreferrer"],
        ["https://example.org/", "noopener noreferrer"],
    ]
    names = text.evaluate(
        "(text) => [...text.querySelectorAll('*')].flatMap((each) => each.getAttributeNames())"
    )
    assert [name for name in names if name.startswith("on")] == []


def test_no_script_writes_html() -> None:
    for file in (files("kvreclaim.page") / "static").iterdir():
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval("):
            assert word not in file.read_text(encoding="utf-8"), (file.name, word)


def test_the_policy_is_as_strict_as_ever(page_server: Running) -> None:
    assert web.get(page_server.base_url).headers["content-security-policy"] == (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    )


@pytest.mark.parametrize("is_secure", [True, False])
def test_code_is_copied(answered: Callable[..., Page], is_secure: bool) -> None:
    """Also where the browser has no clipboard for pages: over plain HTTP from another machine."""
    page = answered(WRITTEN, permissions=["clipboard-read", "clipboard-write"])
    read = page.evaluate_handle("() => { const own = navigator.clipboard; return () => own.readText(); }")
    if not is_secure:
        page.evaluate("() => { Object.defineProperty(navigator, 'clipboard', { value: undefined }); }")
    copy = page.locator("#chat figure button").first
    copy.click()
    expect(copy).to_have_text("Copied")
    assert read.evaluate("(read) => read()") == 'def f(x):\n    return "<i>*x*</i>"'


ENDLESS = [
    "> x " * 4000,
    "- " * 4000 + "x",
    "*a **b _c __d ~~e `f [g](" * 400,
    "[x" * 8000,
    "|x" * 8000 + "\n" + "|-" * 8000,
]


@pytest.mark.parametrize("text", ENDLESS, ids=range(len(ENDLESS)))
def test_endless_marks_keep_their_text(page_server: Running, open_page: OpenPage, text: str) -> None:
    """Repeated marks of a looping model: not too deep for the stack, not too long for a frame."""
    drawn = open_page(page_server).evaluate(
        """async (text) => {
          const { Markdown } = await import('/page/static/markdown.js');
          const element = document.createElement('div');
          new Markdown(element).show(text);
          return element.textContent; }""",
        text,
    )
    assert "".join(filter(str.isalpha, drawn)) == "".join(filter(str.isalpha, text))
