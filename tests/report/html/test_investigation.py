"""An agent's Markdown as HTML."""

from __future__ import annotations

import pytest

from runner.report.html.investigation import render_report

LINKS = {"a/b.txt:3-7": "lines-1"}


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("# one\n### three", "<h3>one</h3>\n<h4>three</h4>\n"),
        ("<script>x</script>", "<p>&lt;script&gt;x&lt;/script&gt;</p>\n"),
        ("[x](javascript:y)", "<p>[x](javascript:y)</p>\n"),
        ("[x](http://h/ 'title')", "<p>x (http://h/)</p>\n"),
        ("<http://h/>", "<p>http://h/ (http://h/)</p>\n"),
        ("![x](http://h/y.png)", "<p>[picture: x (http://h/y.png)]</p>\n"),
        ("[![x](http://h/y)](http://z)", "<p>[picture: x (http://h/y)] (http://z)</p>\n"),
        ("a &#x202e;b \u202ec", "<p>a \\u202eb \\u202ec</p>\n"),
        ("`\u2066`", "<p><code>\\u2066</code></p>\n"),
        ("```js onload=x\n\x1b[1m\ta\n```", "<pre><code>\\x1b[1m    a\n</code></pre>\n"),
        ("|a|\n|:-:|", "<table>\n<thead>\n<tr>\n<th>a</th>\n</tr>\n</thead>\n</table>\n"),
        ("`a/b.txt:3-7`", '<p><a href="#lines-1"><code>a/b.txt:3-7</code></a></p>\n'),
        ("a/b.txt:3-7, **a/b.txt:3**", '<p><a href="#lines-1">a/b.txt:3-7</a>, <strong>a/b.txt:3</strong></p>\n'),
        ("[a/b.txt:3-7](http://h)", '<p><a href="#lines-1">a/b.txt:3-7</a> (http://h)</p>\n'),
    ],
)  # fmt: skip
def test_a_report_is_text_with_links_into_the_page_only(source: str, rendered: str) -> None:
    assert render_report(source, LINKS) == rendered
