"""HTML: pages that were saved instead of read."""

from __future__ import annotations

import html
import re

from corpus.rules import Verdict, rule

# Elements of pages, with an attribute or none; `<think>`, `List<int>` and `a < b` are no HTML.
_NAMES = (
    "a|abbr|article|b|blockquote|body|br|button|center|dd|div|dl|dt|em|font|footer|form|h[1-6]|head|header|hr|html|i|"
    "iframe|img|input|label|li|link|main|meta|nav|ol|option|p|section|select|small|span|strong|sub|sup|table|tbody|td|"
    "tfoot|th|thead|title|tr|u|ul"
)
_TAG = re.compile(rf"</?(?:{_NAMES})(?:\s+[a-z-]+(?:\s*=\s*(?:\"[^\"]*\"|'[^']*'|[^\s>]+))?)*\s*/?>", re.IGNORECASE)
_SILENT = re.compile(r"<(script|style)\b[^>]*>.*?</\1\s*>|<!--.*?-->", re.IGNORECASE | re.DOTALL)
_BREAK = re.compile(r"<(?:br|/p|/div|/li|/tr|/h[1-6]|hr)\b[^>]*>", re.IGNORECASE)
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_MANY_BREAKS = re.compile(r"[ \t]*\n(?:[ \t]*\n){2,}")


@rule
def html_markup(text: str, *, min_tags: int = 3) -> Verdict:
    """Take HTML out of a text that has at least so many tags, and write its entities as characters.

    Scripts, styles and comments go with what is in them; paragraphs and lines stay apart. What stands in Markdown's
    code is meant as it is and stays. A rule for pages: an answer that is itself HTML, and no code block, loses its
    point.
    """
    if "<" not in text:
        return None
    parts = _CODE.split(text)
    if sum(len(_TAG.findall(part)) for part in parts[::2]) < min_tags:
        return None
    parts[::2] = [_plain(part) for part in parts[::2]]
    return _MANY_BREAKS.sub("\n\n", "".join(parts)).strip()


def _plain(text: str) -> str:
    return html.unescape(_TAG.sub("", _BREAK.sub("\n", _SILENT.sub("", text))))
