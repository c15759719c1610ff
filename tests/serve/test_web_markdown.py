"""The chat's Markdown in a browser: independent of how a stream is cut, and safe with hostile texts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.browser import Page, browsing, opened
from tests.serve.running_server import RunningServer

RENDER = """async (texts) => {
  const { render } = await import("/markdown.js");
  return texts.map((text) => {
    const root = document.createElement("div");
    root.append(...render(text));
    return root.innerHTML;
  });
}"""

GROW = """async (cases) => {
  const { MarkdownStream, render } = await import("/markdown.js");
  return cases.filter(({ text, cuts }) => {
    const [root, whole] = [document.createElement("div"), document.createElement("div")];
    const stream = new MarkdownStream(root);
    for (const cut of [...cuts, text.length]) stream.update(text.slice(0, cut));
    whole.append(...render(text));
    return root.innerHTML !== whole.innerHTML;
  });
}"""

CASES = {
    "a *b* **c** ***d*** _e_ __f__ ~~g~~": "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> "
    "<em>e</em> <strong>f</strong> <del>g</del></p>",
    "snake_case_name 2*3*4 ~5 * 6": "<p>snake_case_name 2<em>3</em>4 ~5 * 6</p>",
    "**open and `code": "<p>**open and `code</p>",
    "*a **b** c*": "<p><em>a <strong>b</strong> c</em></p>",
    "**中文。**后": "<p><strong>中文。</strong>后</p>",
    "`a *b*` ``c`d`` ` e `": "<p><code>a *b*</code> <code>c`d</code> <code>e</code></p>",
    r"\*a\* \`b\` \[c](https://x.y) \q": r"<p>*a* `b` [c](<a>) \q</p>".replace("<a>", "<A>"),
    "one\ntwo": "<p>one<br>two</p>",
    "one\n\ntwo": "<p>one</p><p>two</p>",
    "# A\n### B #\n#C": "<h3>A</h3><h5>B</h5><p>#C</p>",
    "a\n---\nb": "<p>a</p><hr><p>b</p>",
    "- a\n- b": "<ul><li>a</li><li>b</li></ul>",
    "- a\n  - b\n    c\n- d": "<ul><li>a<ul><li>b<br>c</li></ul></li><li>d</li></ul>",
    "1. a\n  - b\n    - c\n  - d\n\n  e\n2. f": "<ol><li>a<ul><li>b<ul><li>c</li></ul></li><li>d</li></ul>"
    "<p>e</p></li><li>f</li></ol>",
    "1. a\n  - b\n2. c": "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>",
    "3) a\n4) b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "- a\n\n  more\n\n- b\n\nend": "<ul><li>a<p>more</p></li><li>b</li></ul><p>end</p>",
    "- [x] a\n- [ ] b": "<ul><li>☑ a</li><li>☐ b</li></ul>",
    "in the year\n1984. No list": "<p>in the year<br>1984. No list</p>",
    "> a\nb\n\n> c": "<blockquote><p>a<br>b</p></blockquote><blockquote><p>c</p></blockquote>",
    "<b>x</b> &amp;": "<p>&lt;b&gt;x&lt;/b&gt; &amp;amp;</p>",
}

FRAGMENTS = [
    "a", "word ", "**", "*", "_", "~~", "`", "``", "```", "```py\n", "~~~\n", "\n", "\n\n", "\r\n", "  ",
    "    ", "\t", "- ", "* ", "+ ", "1. ", "2) ", "# ", "#", "## b", "> ", ">", "---", "***", "|", ":--",
    "| a | b |\n", "|---|:-:|\n", "[x](https://a.b)", "[", "](", ")", "![", "https://a.b/c_d).",
    "<https://a.b>", "\\", "é", "😀", "中。", "[ ] ", "1", "$", "$$\n", "$$", "\\(", "\\)", "\\[\n", "\\]\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def page(server: RunningServer) -> Iterator[Page]:
    with browsing() as browser, opened(server, browser) as page:
        yield page


def test_each_construct(page: Page) -> None:
    link = '<a href="https://x.y" rel="noopener noreferrer" target="_blank">https://x.y</a>'
    shown = page.evaluate(RENDER, list(CASES))
    assert dict(zip(CASES, shown, strict=True)) == {
        text: expected.replace("<A>", link) for text, expected in CASES.items()
    }


def test_code_and_tables(page: Page) -> None:
    code, open_code, table, late = page.evaluate(
        RENDER,
        [
            "```py\n# <a>\n\n    b\n```\nafter",
            "  ~~~\n  ```\n   c",
            "t\n|a|b\\|c|\n|-:|:-:|\n|`1`|\n|2|3|4|\nnot | in\n\nend",
            "|a|b|\n|---|",
        ],
    )
    assert '<span>py</span><button type="button"' in code
    comment = '<span class="hljs-comment"># &lt;a&gt;</span>'
    assert f"<code>{comment}\n\n    b</code></pre></figure><p>after</p>" in code
    assert "<code>```\n c</code>" in open_code
    assert table.startswith("<p>t</p><div")
    assert '<th class="right">a</th><th class="center">b|c</th>' in table
    assert '<td class="right"><code>1</code></td><td class="center"></td>' in table
    assert '<td class="right">2</td><td class="center">3</td></tr>' in table
    assert "<p>end</p>" in table
    assert late == "<p>|a|b|<br>|---|</p>"


FORMULAS = {  # text → (TeX, whether it stands on a line of its own) of each formula
    r"so $a^2$ and \(b_1\)": [("a^2", False), ("b_1", False)],
    "$$\na\n+ b\n$$\nafter": [("a\n+ b", True)],
    "one\n\\[ x \\]\n\n- in $$y$$ a list": [("x", True), ("y", True)],
    "from $5 to $10, `$x$`, \\$a$ and $ b $": [],
    "$$\nnever closed\n\nafter": [],
    "```\n$x$\n```": [],
}


def test_formulas(page: Page) -> None:
    """KaTeX comes with the first formula; it keeps the source of each for screen readers."""
    found = page.evaluate(
        """async (texts) => {
          const { render } = await import("/markdown.js");
          const root = document.createElement("div");
          document.body.append(root);
          root.append(...render("$x$"));
          while (!root.querySelector(".katex")) await new Promise((done) => setTimeout(done, 20));
          const shown = texts.map((text) => {
            root.replaceChildren(...render(text));
            return [...root.querySelectorAll(".math")].map((one) => [
              one.querySelector("annotation").textContent,
              one.classList.contains("display") && !!one.querySelector(".katex-display"),
            ]);
          });
          root.remove();
          return shown;
        }""",
        list(FORMULAS),
    )
    assert found == [[list(one) for one in formulas] for formulas in FORMULAS.values()]


def test_a_formula_that_cannot_be_set_stays_text(page: Page) -> None:
    texts = [r"$\frac{$", r"$\href{javascript:alert(1)}{x}$", r"$\includegraphics{https://x.y/z.png}$"]
    shown = page.evaluate(
        """async (texts) => {
          const { render } = await import("/markdown.js");
          const roots = texts.map((text) => {
            const root = document.createElement("div");
            root.append(...render(text));
            return root;
          });
          await new Promise((done) => setTimeout(done, 500));
          const active = "a, img, [href], [src]";
          return roots.map((root) => [root.querySelectorAll(active).length, root.textContent]);
        }""",
        texts,
    )
    assert [count for count, _ in shown] == [0, 0, 0]
    assert shown[0][1] == texts[0]


def test_code_is_highlighted(page: Page) -> None:
    (shown, unknown) = page.evaluate(RENDER, ['```js\nconst a = "<b>"; // c\n```', "```nosuchlanguage\n<b>\n```"])
    assert '<span class="hljs-keyword">const</span> a = <span class="hljs-string">"&lt;b&gt;"</span>' in shown
    assert "<code>&lt;b&gt;</code>" in unknown


LINKS = {
    "[a](https://x.y/z)": ("https://x.y/z", "a"),
    '[*a*](<https://x.y/p q> "t")': ("https://x.y/p%20q", "a"),
    "(see https://x.y/a_(b).)": ("https://x.y/a_(b)", "https://x.y/a_(b)"),
    "**https://x.y**": ("https://x.y", "https://x.y"),
    "[![alt](https://i.j/k.png)](https://x.y)": ("https://x.y/", "alt"),
    "![alt](https://i.j/k.png)": ("https://i.j/k.png", "alt"),
    "[https://a.b](https://x.y)": ("https://x.y/", "https://a.b"),
}


def test_links(page: Page) -> None:
    found = page.evaluate(
        """async (texts) => {
          const { render } = await import("/markdown.js");
          return texts.map((text) => {
            const links = render(text).flatMap((node) => [...node.querySelectorAll("a")]);
            return links.map((a) => [a.getAttribute("href"), a.textContent, a.rel, a.target]);
          });
        }""",
        list(LINKS),
    )
    wanted = [[[*one, "noopener noreferrer", "_blank"]] for one in LINKS.values()]
    assert found == wanted


HOSTILE = [
    "<img src=x onerror=alert(1)><script>alert(1)</script>",
    "[a](javascript:alert(1)) [b](data:text/html,x) [c](vbscript:x) [d](//x.y) [e](/v1) <javascript:x>",
    "[a](\tjava\nscript:alert(1)) [a](https&#58;//x) [a]( https:x)",
    "![a](data:image/svg+xml,<svg onload=alert(1)>) ![b](file:///etc/passwd)",
    "```html\n<iframe src=javascript:alert(1)>\n```\n`<svg onload=x>`",
    "|<td onclick=x>|\n|-|\n|<b>|",
    "<a href='javascript:x'>x</a><style>*{display:none}</style>",
]


def test_hostile_texts_stay_texts(page: Page) -> None:
    tags = page.evaluate(
        """async (texts) => {
          const { render } = await import("/markdown.js");
          const root = document.createElement("div");
          for (const text of texts) root.append(...render(text));
          document.body.append(root);
          const all = [...root.querySelectorAll("*")];
          root.remove();
          return all.map((one) => [one.tagName, ...[...one.attributes].map((a) => a.name)]);
        }""",
        HOSTILE,
    )
    assert {tag for tag, *_ in tags} <= {
        *("P", "BR", "FIGURE", "FIGCAPTION", "SPAN", "BUTTON", "PRE", "CODE"),
        *("DIV", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"),
    }
    assert not [tag for tag, *names in tags if any(name.startswith("on") for name in names)]


def _cases(count: int) -> list[dict[str, Any]]:
    cases = []
    for _ in range(count):
        text = "".join(random.choices(FRAGMENTS, k=random.randint(1, 40)))
        text = text.encode("utf-16", "surrogatepass").decode("utf-16")
        places = range(len(text.encode("utf-16-le")) // 2)
        cuts = sorted(random.sample(places, random.randint(0, min(12, len(places)))))
        cases.append({"text": text, "cuts": random.choice([cuts, list(places)])})
    return cases


def test_every_way_of_cutting_a_text_ends_the_same(page: Page) -> None:
    assert page.evaluate(GROW, _cases(1000)) == []


def test_a_text_that_is_replaced(page: Page) -> None:
    shown = page.evaluate(
        """async () => {
          const { MarkdownStream } = await import("/markdown.js");
          const root = document.createElement("div");
          const stream = new MarkdownStream(root);
          for (const text of ["# a\\n\\nb\\n\\nc", "# a\\n\\nd"]) stream.update(text);
          return root.innerHTML;
        }"""
    )
    assert shown == "<h3>a</h3><p>d</p>"


def test_growing_code_keeps_its_nodes(page: Page) -> None:
    same = page.evaluate(
        """async () => {
          const { MarkdownStream } = await import("/markdown.js");
          const root = document.createElement("div");
          const stream = new MarkdownStream(root);
          stream.update("a\\n\\n```py\\nx");
          const button = root.querySelector("button");
          stream.update("a\\n\\n```py\\nxy\\nz\\n```\\n");
          return [root.querySelector("button") === button, root.querySelector("code").textContent];
        }"""
    )
    assert same == [True, "xy\nz"]


EVIL = [
    "*a ",
    "a* ",
    "**a _b ",
    "`",
    "[",
    "[a](",
    "![",
    "> ",
    "- ",
    "`a``",
    "|a",
    "https://",
    "((",
    "~~a",
    "<h",
    "\\",
]


def test_long_and_nasty_texts_are_quick(page: Page) -> None:
    texts = [one * 20_000 for one in EVIL] + [
        "- a\n" * 5_000,
        "|a|\n|-|\n" + "|b|\n" * 5_000,
        "[a](" + " " * 50_000,
        "https://a" + ")" * 20_000,
        "- a" + "\n" * 20_000 + "  b",
    ]
    texts.append("".join("`" * n + "a" for n in range(1, 500)))
    seconds = page.evaluate(
        """async (texts) => {
          const { render } = await import("/markdown.js");
          return texts.map((text) => {
            const begin = performance.now();
            render(text);
            return (performance.now() - begin) / 1000;
          });
        }""",
        texts,
    )
    # Generous, for busy machines: this is about how the time grows, not about speed.
    assert max(seconds) < 3, dict(zip((text[:8] for text in texts), seconds, strict=True))
