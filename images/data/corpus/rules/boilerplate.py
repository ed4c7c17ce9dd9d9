"""Boilerplate: what a web page says to everybody, whatever it is about."""

from __future__ import annotations

import re

from corpus.rules import Drop, Verdict, rule

# Found anywhere in a line. The first two rows are C4's list; there "javascript" alone is enough, which would take out
# whatever speaks of programs.
_PHRASES = re.compile(
    r"(?:enable|requires?|turn on|without|disabled) .{0,20}javascript|javascript .{0,30}(?:enabled|disabled|required)"
    r"|terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies"
    r"|accept (?:all )?cookies|all rights reserved|(?:©|\(c\)|copyright) *(?:©|\(c\))? *(?:19|20)\d\d"
    r"|(?:proudly )?powered by (?:wordpress|drupal|joomla|shopify|blogger|phpbb|discuz)"
    r"|licen[sc]ed under (?:the|a) .{0,60}licen[sc]e|available under the creative commons"
    r"|permission is hereby granted, free of charge|the software is provided [\"“]as is[\"”]|spdx-license-identifier"
    r"|版权所有|版權所有|保留所有权利|隐私政策|隱私政策|隐私声明|使用条款|使用\s*cookies?|icp备\s*\d|公网安备",
    re.IGNORECASE,
)
# The whole of a line.
_NAVIGATION = re.compile(
    r"(?:skip to (?:main )?(?:content|navigation)|(?:back|return) to (?:top|home)|read (?:more|full article)|see also"
    r"|share (?:this|on)(?: \w+){0,2}|(?:log|sign) ?(?:in|out|up)|register|subscribe(?: (?:now|to .{1,40}))?|site ?map"
    r"|(?:next|previous|older|newer) (?:post|page|article|entry)s?|leave a (?:comment|reply)|toggle navigation"
    r"|advertisement|home|menu|search|contact us|about us|faqs?"
    r"|首页|返回顶部|返回首页|上一[篇页]|下一[篇页]|阅读更多|阅读全文|网站地图|联系我们|关于我们|登录|注册|点击查看更多"
    r")\W*",
    re.IGNORECASE,
)
# Links side by side: Home | Lamps | Contact us.
_BAR = re.compile(r"\s+[|»›·•]\s+")
_PLACEHOLDER = re.compile(r"\blorem ipsum\b", re.IGNORECASE)
_FENCE = "```"


@rule
def boilerplate(text: str, *, max_chars: int = 200) -> Verdict:
    """Take out lines of cookie notices, navigation, footers and licences; drop a text of nothing else, or of filler.

    Source: Raffel et al. 2020 (C4), section 2.2, which takes out a line however long it is; here one of more than
    `max_chars` characters may be about such things and stays. So does Markdown's code. A rule for pages: an answer
    that tells how to switch JavaScript on loses its point.
    """
    if _PLACEHOLDER.search(text):
        return Drop("it holds lorem ipsum, which fills a page that has no text yet")
    lines = text.split("\n")
    kept = []
    in_code = False
    for line in lines:
        in_code ^= line.lstrip().startswith(_FENCE)
        if in_code or not _is_boilerplate(line.strip(), max_chars):
            kept.append(line)
    if len(kept) == len(lines):
        return None
    left = "\n".join(kept).strip()
    return left if any(map(str.isalnum, left)) else Drop("nothing but boilerplate")


def _is_boilerplate(line: str, max_chars: int) -> bool:
    if not line or len(line) > max_chars:
        return False
    return bool(_PHRASES.search(line) or _NAVIGATION.fullmatch(line)) or _is_a_bar(line)


def _is_a_bar(line: str) -> bool:
    """At least three links, of which one is known for it: the rows of a table look the same otherwise."""
    parts = _BAR.split(line)
    return len(parts) >= 3 and any(map(_NAVIGATION.fullmatch, parts))
