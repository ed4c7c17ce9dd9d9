"""Whether a chat template is blind: it writes what messages say, and nothing else depends on what they say.

Of a blind template one rendering a row of roles is enough: with any contents in the places of the marks the text is
the one that the template would render. That is proved on the template's syntax tree, never tried out: a content may
be written, as it is or trimmed, or joined by `+` and `~` to what is written; asking for its type is allowed; any other
filter, comparison, condition, call or construct makes the template one that is rendered for every conversation.
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import nodes

MESSAGES, MESSAGE, CLEAN = "messages", "message", ""
CONTENT, JOINED = "content", "joined"  # one message's, trimmed or not; a text that contains contents

_TYPE_TESTS = {"defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean"}
_OF_A_LOOP = {"index", "index0", "revindex", "revindex0", "first", "last", "length"}
# Another text at another time, or a way to messages or to text that was written.
_NEVER = {"loop", "strftime_now", "lipsum", "self", "caller", "varargs", "kwargs"}


class _Sees(Exception):
    """The template may look at a content."""


def is_blind(tree: nodes.Template) -> bool:
    """Whether a parsed template is blind, for messages that have a role and a string as content, and nothing else."""
    proof = _Proof()
    try:
        proof.statements(tree.body)
    except _Sees:
        return False
    return True


class _Proof:
    """What each name holds, found in one pass: a name that holds different things is given up."""

    def __init__(self) -> None:
        self._names = {"messages": MESSAGES}

    def statements(self, body: Iterable[nodes.Node]) -> None:
        for node in body:
            self._statement(node)

    def _statement(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.Output):
            for part in node.nodes:
                self._text(part)
        elif isinstance(node, nodes.If):
            self._clean(node.test)
            for body in (node.body, node.elif_, node.else_):
                self.statements(body)
        elif isinstance(node, nodes.For) and not node.recursive:
            self._bind(node.target, {MESSAGES: MESSAGE, CLEAN: CLEAN}.get(self._kind(node.iter)))
            if node.test is not None:
                self._clean(node.test)
            self.statements(node.body)
            self.statements(node.else_)
        elif isinstance(node, nodes.Assign):
            self._bind(node.target, self._kind(node.node))
        elif not isinstance(node, nodes.Break | nodes.Continue):
            raise _Sees

    def _bind(self, target: nodes.Node, kind: str | None) -> None:
        if kind == CLEAN and isinstance(target, nodes.NSRef):
            return
        names = target.items if isinstance(target, nodes.Tuple) and kind == CLEAN else [target]
        for name in names:
            if kind is None or not isinstance(name, nodes.Name) or self._names.setdefault(name.name, kind) != kind:
                raise _Sees

    def _kind(self, node: nodes.Node) -> str:
        """What an expression's value is; raises where a content would decide it."""
        if isinstance(node, nodes.TemplateData):
            return CLEAN
        if isinstance(node, nodes.Name):
            if node.name in _NEVER:
                raise _Sees
            return self._names.setdefault(node.name, CLEAN)
        if isinstance(node, nodes.Getattr):
            return self._part(node.node, node.attr)
        if isinstance(node, nodes.Getitem):
            return self._part(node.node, node.arg.value) if isinstance(node.arg, nodes.Const) else self._at(node)
        if isinstance(node, nodes.Add | nodes.Concat):
            parts = node.nodes if isinstance(node, nodes.Concat) else [node.left, node.right]
            return self._joined(parts)
        if isinstance(node, nodes.CondExpr) and node.expr2 is not None:
            self._clean(node.test)
            return self._joined([node.expr1, node.expr2])
        if isinstance(node, nodes.Test) and node.name in _TYPE_TESTS:
            self._kind(node.node)
            return CLEAN
        if isinstance(node, nodes.Filter) and node.node is not None:
            if node.name == "random":
                raise _Sees
            if node.name in ("length", "count") and self._kind(node.node) == MESSAGES:
                return CLEAN
            if node.name == "trim" and self._kind(node.node) == CONTENT and not (node.args or node.kwargs):
                return CONTENT
        for child in node.iter_child_nodes():
            self._clean(child)
        return CLEAN

    def _part(self, of: nodes.Node, key: object) -> str:
        """An attribute or a constant item."""
        if isinstance(of, nodes.Name) and of.name == "loop":
            if key in _OF_A_LOOP:
                return CLEAN
            raise _Sees
        kind = self._kind(of)
        if kind == MESSAGE and isinstance(key, str) and not hasattr(dict, key):
            return CONTENT if key == "content" else CLEAN  # what is neither role nor content is not there
        if kind == MESSAGES and isinstance(key, int):
            return MESSAGE
        if kind == CLEAN:
            return CLEAN
        raise _Sees

    def _at(self, node: nodes.Getitem) -> str:
        """An item whose place is computed, or a slice."""
        self._clean(node.arg)
        kind = self._kind(node.node)
        if kind == MESSAGES:
            return MESSAGES if isinstance(node.arg, nodes.Slice) else MESSAGE
        if kind == CLEAN:
            return CLEAN
        raise _Sees

    def _text(self, node: nodes.Node) -> str:
        """An expression that is written: a content, or something that no content decides."""
        kind = self._kind(node)
        if kind not in (CLEAN, CONTENT, JOINED):
            raise _Sees
        return kind

    def _joined(self, parts: Iterable[nodes.Node]) -> str:
        kinds = {self._text(part) for part in parts}  # of all of them: each may see
        return JOINED if kinds - {CLEAN} else CLEAN

    def _clean(self, node: nodes.Node) -> None:
        if self._kind(node) != CLEAN:
            raise _Sees
