"""Whether the page can be read and used: contrast, names, keyboard, themes, narrow screens, no JavaScript."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from playwright.sync_api import Page, expect
from running import Running
from steering import until

OpenPage = Callable[..., Page]

COLOURS = """
  const rgb = (text) => {
    const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
    canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const part = (c) => ((c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
"""
CONTRAST = (
    f"() => {{ {COLOURS}"
    + """
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const field = ['INPUT', 'SELECT', 'TEXTAREA'].includes(element.tagName);
    if (!(own || field) || !element.checkVisibility() || element.disabled) continue;
    const [a, b] = [light(rgb(getComputedStyle(element).color)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${element.outerHTML.slice(0, 80)}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
)
STATE_RATIOS = (
    f"() => {{ {COLOURS}"
    + """
  const of = (name) => { const span = document.createElement('span'); span.style.color = `var(--${name})`;
    document.body.append(span); const value = rgb(getComputedStyle(span).color); span.remove();
    return light(value); };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const found = {};
  for (const name of ['cached', 'pinned', 'shared', 'edge', 'accent'])
    found[name] = ratio(of(name), of('panel'));
  return found;
}"""
)
FREE_PIXEL = """() => { const c = document.querySelector('#pool');
  const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', {willReadFrequently: true});
  copy.drawImage(c, 0, 0);
  return [...copy.getImageData(c.width / 2, 4, 1, 1).data]; }"""
UNNAMED = """() => [...document.querySelectorAll('button, input, select, textarea, canvas, svg[role], a')]
  .filter((element) => !(element.labels?.length || element.getAttribute('aria-label')
    || element.getAttribute('aria-labelledby') || element.textContent.trim()))
  .map((element) => element.outerHTML.slice(0, 80))"""


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(page_server: Running, open_page: OpenPage, scheme: str) -> None:
    page = open_page(page_server, color_scheme=scheme)
    page.locator("#pool ~ details summary").click()
    page.fill("#prompt", "sun")
    page.locator("#chat summary").first.click()
    page.fill("#chat-max-tokens", "3")
    page.fill("#chat-message", "GO")
    page.press("#chat-message", "Enter")
    expect(page.locator("#chat .assistant .error").first).to_contain_text("cut off")
    assert page.evaluate(CONTRAST) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_states_stand_out_from_the_panel(page_server: Running, open_page: OpenPage, scheme: str) -> None:
    """WCAG 2.2, 1.4.11: 3:1 for what carries meaning; free blocks are the ground of the map."""
    page = open_page(page_server, color_scheme=scheme)
    ratios = page.evaluate(STATE_RATIOS)
    assert {name: ratio for name, ratio in ratios.items() if ratio < 3} == {}


def test_everything_has_a_name(page_server: Running, open_page: OpenPage) -> None:
    page = open_page(page_server)
    assert page.evaluate(UNNAMED) == []
    assert page.evaluate("document.documentElement.lang") == "en"
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for role in ("main", "banner", "contentinfo"):
        expect(page.get_by_role(role)).to_have_count(1)
    described = page.evaluate(
        """() => document.querySelector('#pool').getAttribute('aria-describedby').split(' ')
          .map((id) => document.getElementById(id).textContent).join(' ')"""
    )
    assert "0 of 1,024 blocks in use by 0 requests" in described
    assert "Arrow keys" in described


def test_the_pool_is_announced_now_and_then(page_server: Running, open_page: OpenPage) -> None:
    page = open_page(page_server)
    announcer = page.locator("#pool-news")
    expect(announcer).to_have_attribute("aria-live", "polite")
    expect(announcer).to_contain_text("of 1,024 blocks in use")


def test_the_theme_follows_the_system_until_one_is_chosen(page_server: Running, open_page: OpenPage) -> None:
    page = open_page(page_server, color_scheme="dark")
    dark = background(page)
    cell = page.evaluate(FREE_PIXEL)
    page.emulate_media(color_scheme="light")
    light = background(page)
    assert sum(map(int, dark[4:-1].split(","))) < 100 < 600 < sum(map(int, light[4:-1].split(",")))
    until(lambda: page.evaluate(FREE_PIXEL) != cell)  # the canvas, too
    page.select_option("#theme", "dark")
    assert background(page) == dark
    page.reload()
    page.wait_for_selector("html[data-ready]")
    expect(page.locator("#theme")).to_have_value("dark")
    assert background(page) == dark


def test_it_fits_a_narrow_screen(page_server: Running, open_page: OpenPage) -> None:
    page = open_page(page_server, viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_without_javascript_it_says_what_is_missing(page_server: Running, open_page: OpenPage) -> None:
    page = open_page(page_server, ready=False, java_script_enabled=False)
    expect(page.get_by_role("heading", name="JavaScript is off")).to_be_visible()
    for path in ("/load", "/metrics"):
        expect(page.locator(f"noscript a[href='{path}']")).to_be_visible()
    expect(page.locator("main")).to_be_hidden()
    expect(page.locator("#theme")).to_be_hidden()
