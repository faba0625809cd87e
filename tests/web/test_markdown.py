"""Answers as Markdown: what is written as Markdown is drawn as such, and nothing written can do harm."""

import json

from playwright.sync_api import Page, expect

from tests.server.serving import Server
from tests.web.conftest import OpenPage
from tests.web.test_page import answers, finished, say, set_limit

SHAPES = """(text) => import('/web/markdown.js').then(({ MarkdownView }) => {
  const root = document.createElement('div');
  new MarkdownView(root).show(text);
  const shape = (node) => node.nodeType === 3 ? node.data
    : [node.localName, ...[...node.childNodes].map(shape)];
  return [...root.childNodes].map(shape);
})"""

GROWS = """(text) => import('/web/markdown.js').then(({ MarkdownView }) => {
  const [whole, grown] = [document.createElement('div'), document.createElement('div')];
  new MarkdownView(whole).show(text);
  const view = new MarkdownView(grown);
  for (let end = 1; end <= text.length; end++) view.show(text.slice(0, end));
  return whole.isEqualNode(grown) ? '' : [whole.innerHTML, grown.innerHTML].join('\\n');
})"""

ALL = """# A title

Some *words*, **strong** ones, ***both***, ~~gone~~, `code` and snake_case_names stay.
A [link](https://example.org/a_b), <https://example.org>, and https://example.org/x.

- one
- two
  1. deeper
  2. still
- [x] done

> quoted
> - inside

```python
def f(x):  # a comment
    return "text" + str(12)
```

| a | b |
|---|--:|
| 1 | `2` |

---
The end."""

HOSTILE = [
    "<img src=x onerror='window.harmed = true'>",
    "[x](javascript:window.harmed=true)",
    "[x](JaVaScRiPt:window.harmed=true) [y](data:text/html,<script>window.harmed=true</script>)",
    '[x](https://example.org/" onmouseover="window.harmed=true)',
    "![x](https://example.org/pixel.png)",
    "<javascript:window.harmed=true>",
    "```<script>window.harmed=true</script>\n<script>window.harmed=true</script>\n```",
    "`<svg onload=window.harmed=true>`",
    "| <img src=x onerror=window.harmed=true> |\n|---|\n| <b>x</b> |",
    "> <iframe srcdoc='<script>parent.harmed=true</script>'>",
    "[x][y]\n\n[y]: javascript:window.harmed=true",
    "&lt;script&gt; &#x6A;avascript:",
    "**<style>*{display:none}</style>**",
]


def shapes(page: Page, text: str) -> list[object]:
    drawn: list[object] = page.evaluate(SHAPES, text)
    return drawn


DRAWN: list[tuple[str, list[object]]] = [
    ("plain", [["p", "plain"]]),
    ("## two", [["h4", "two"]]),
    ("a *b* c", [["p", "a ", ["em", "b"], " c"]]),
    ("***x***", [["p", ["strong", ["em", "x"]]]]),
    ("2 * 3 * 4", [["p", "2 * 3 * 4"]]),
    ("snake_case_name", [["p", "snake_case_name"]]),
    ("\\*not\\*", [["p", "*not*"]]),
    ("``a ` b``", [["p", ["code", "a ` b"]]]),
    ("- a\n- b", [["ul", ["li", "a"], ["li", "b"]]]),
    ("- a\n  - b\n- c", [["ul", ["li", "a", ["ul", ["li", "b"]]], ["li", "c"]]]),
    ("3. a\n4. b", [["ol", ["li", "a"], ["li", "b"]]]),
    ("> a\n> b", [["blockquote", ["p", "a\nb"]]]),
    ("one\n\ntwo", [["p", "one"], ["p", "two"]]),
    ("```\n<b>\n```", [["div", ["div", ["button"]], ["pre", ["code", "<b>"]]]]),
    ("---", [["hr"]]),
    (
        "|a|b|\n|-|-|\n|1|\n|1|2|3|",
        [
            [
                "div",
                [
                    "table",
                    ["thead", ["tr", ["th", "a"], ["th", "b"]]],
                    ["tbody", ["tr", ["td", "1"]], ["tr", ["td", "1"], ["td", "2"]]],
                ],
            ]
        ],
    ),
    ("[a](ftp://x)", [["p", "[a](ftp://x)"]]),
]


def test_blocks_and_lines(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    for text, drawn in DRAWN:
        assert shapes(page, text) == drawn, text


def test_an_answer_that_grows_letter_by_letter_ends_as_if_it_had_come_whole(
    server: Server, open_page: OpenPage
) -> None:
    page = open_page(server)
    assert page.evaluate(GROWS, ALL) == ""
    for text in HOSTILE:
        assert page.evaluate(GROWS, text) == ""


def test_what_is_drawn_stays_while_an_answer_grows(server: Server, open_page: OpenPage) -> None:
    """A node that was replaced would flicker, and lose what a reader has selected."""
    page = open_page(server)
    kept = page.evaluate(
        """() => import('/web/markdown.js').then(({ MarkdownView }) => {
          const root = document.createElement('div');
          const view = new MarkdownView(root);
          const text = 'Some **strong** words\\nand more\\n\\n- one\\n- two\\n\\nThe end';
          const seen = [];
          for (let end = 22; end <= text.length; end++) {
            view.show(text.slice(0, end));
            const [first] = root.children;
            seen.push([first, first.firstChild, first.querySelector('strong'), first.lastChild]);
          }
          return seen.every((nodes) => nodes.every((node, place) => node === seen[0][place]));
        })"""
    )
    assert kept is True


def test_an_answer_is_drawn_while_it_streams(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    set_limit(page, "2000")
    say(page, ALL)
    finished(page, 1)
    answer = page.locator(".answer")
    expect(answer.locator("h3")).to_have_text("A title")
    expect(answer.locator("strong").first).to_have_text("strong")
    expect(answer.locator("code .tok-keyword").first).to_have_text("def")
    expect(answer.locator("code .tok-comment")).to_have_text("# a comment")
    expect(answer.locator("th")).to_have_text(["a", "b"])
    links = answer.locator("a")
    expect(links).to_have_count(3)
    for place in range(3):
        assert (links.nth(place).get_attribute("href") or "").startswith("https://example.org")
        expect(links.nth(place)).to_have_attribute("rel", "noopener noreferrer nofollow")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.locator("[data-copy]").click()
    page.wait_for_function("navigator.clipboard.readText().then((text) => text.startsWith('def f(x):'))")
    page.locator(".actions").get_by_text("Copy").click()
    page.wait_for_function(
        "(all) => navigator.clipboard.readText().then((text) => text.trim() === all)", arg=ALL
    )


def test_hostile_markdown_does_nothing(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate("window.harmed = false")
    for number, text in enumerate(HOSTILE, 1):
        say(page, text)
        finished(page, number)
    made = page.locator(".answer img, .answer script, .answer style, .answer iframe, .answer svg, .answer b")
    assert made.count() == 0
    addresses = page.evaluate("[...document.querySelectorAll('.answer a')].map((each) => each.href)")
    # The text before a quotation mark is an address of its own; the image is a link.
    assert addresses == ["https://example.org/", "https://example.org/pixel.png"], addresses
    attributes = page.evaluate(
        "[...document.querySelectorAll('.answer *')].flatMap((each) => each.getAttributeNames())"
    )
    known = {
        "href",
        "rel",
        "target",
        "class",
        "data-language",
        "data-copy",
        "aria-label",
        "type",
        "tabindex",
        "scope",
    }
    assert set(attributes) <= known, attributes
    for link in page.locator(".answer a").all():
        link.hover()
    assert page.evaluate("window.harmed") is False
    assert [each for each in asked if not each.startswith(server.url)] == []
    assert len(answers(page)) == len(HOSTILE)


def test_text_that_is_made_to_be_slow_is_not(server: Server, open_page: OpenPage) -> None:
    """Each of these takes minutes where searches begin anew at every mark; the page would not answer."""
    page = open_page(server)
    length = 60_000
    slow = [
        "*" * length,
        "[" * length,
        "`a" * length,
        "**a _b " * (length // 7),
        "> " * length,
        "- " * length,
        "a](" * length,
    ]
    for text in slow:
        page.evaluate(SHAPES.replace("return [...root.childNodes].map(shape);", "return 0;"), text)
    assert page.evaluate("1 + 1") == 2, json.dumps([each[:10] for each in slow])


def test_a_table_has_no_more_cells_than_were_written(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    counted = SHAPES.replace("[...root.childNodes].map(shape)", "root.querySelectorAll('td, th').length")
    assert page.evaluate(counted, "|" * 301 + "\n|-|\n" + "|x|\n" * 300) == 300 + 300
