"""The store as pages: a report, a manifest, what a folder holds. Only below REFIT_STORE, only what a browser shows."""

from __future__ import annotations

import html
import mimetypes
import os
from urllib.parse import quote

from fastapi import Response
from fastapi.responses import HTMLResponse, RedirectResponse

from refit.store import join, store_for

SHOWN = (".html", ".json", ".jsonl", ".txt", ".log", ".md", ".css", ".png", ".svg", ".yaml")
LARGEST = 20 << 20
BY_LINE = ("datasets", "training", "evaluations", "jobs")
"""The folders whose second part is the line's name."""

# What the store holds was made from people's data: a page of it may show itself, run nothing and ask for nothing.
SEALED = (
    "sandbox allow-same-origin; default-src 'none'; style-src 'unsafe-inline' 'self'; img-src data: 'self'; "
    "font-src data: 'self'; frame-ancestors 'self'"
)
HEADERS = {"content-security-policy": SEALED, "x-content-type-options": "nosniff", "cache-control": "private, no-cache"}
LISTING = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.1rem; overflow-wrap: anywhere }}
ul {{ list-style: none; padding: 0 }}
a {{ text-decoration: none }}
</style>
<h1>{title}</h1><ul>{items}</ul>"""


def line_of(path: str) -> str | None:
    """The line that a path of the store belongs to; None where it is everybody's."""
    parts = _parts(path)
    return parts[1] if len(parts) > 1 and parts[0] in BY_LINE else None


def show(path: str, *, prefix: str) -> Response:
    """A file, or a folder's listing.

    Raises:
        FileNotFoundError: neither is there, or it is not for a browser.
    """
    parts = _parts(path)
    root = os.environ.get("REFIT_STORE", "")
    if not root:
        raise FileNotFoundError(path)
    uri = join(root, *(quote(part) for part in parts)) if parts else root
    store = store_for(uri)
    names = [name for name in store.children(uri) if not name.startswith(".")]
    if names:
        if not path.endswith("/") and path:
            return RedirectResponse(f"{prefix}/{quote('/'.join(parts))}/", headers=HEADERS)
        return HTMLResponse(_listing("/".join(parts) or "store", names), headers=HEADERS)
    if not parts or not parts[-1].endswith(SHOWN) or not store.exists(uri):
        raise FileNotFoundError(path)
    content = store.read(uri)
    if len(content) > LARGEST:
        raise FileNotFoundError(path)
    kind = mimetypes.guess_type(parts[-1])[0] or "text/plain"
    if kind == "application/json" or not kind.startswith(("text/", "image/")):
        kind = "text/plain"
    return Response(content, media_type=kind, headers=HEADERS)


def _parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part]
    if any(part.startswith(".") or "\\" in part or "\0" in part for part in parts):
        raise FileNotFoundError(path)  # nothing hidden, and no way up
    return parts


def _listing(title: str, names: list[str]) -> str:
    items = "".join(f'<li><a href="{quote(name)}">{html.escape(name)}</a></li>' for name in ["..", *names])
    return LISTING.format(title=html.escape(title), items=items)
