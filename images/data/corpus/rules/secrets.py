"""Secrets: keys that somebody pasted. A model that has seen one can say it."""

from __future__ import annotations

import re

from corpus.rules import Drop, Verdict, rule

# Written so that nothing else looks like them: a prefix that the issuer chose for being found.
_SECRETS = {
    "a private key": re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"),
    "an AWS access key": re.compile(r"(?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])"),
    "a GitHub token": re.compile(r"(?<!\w)(?:gh[pousr]_\w{36,}|github_pat_\w{50,})"),
    "a Slack token": re.compile(r"(?<!\w)xox[abprs]-[\w-]{10,}"),
    "a Google API key": re.compile(r"(?<!\w)AIza[\w-]{35}(?![\w-])"),
    "an API key": re.compile(r"(?<!\w)sk-(?:[a-z]+-)?[A-Za-z0-9_-]{32,}"),
    "a JSON web token": re.compile(r"(?<!\w)eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{16,}"),
    "a password in an address": re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s/:@]+:[^\s/:@]{4,}@[^\s/]+", re.IGNORECASE),
}


@rule
def secrets(text: str) -> Verdict:
    """Drop a text with a secret in it; the reason says of which kind, never which."""
    for kind, pattern in _SECRETS.items():
        if pattern.search(text):
            return Drop(f"it holds {kind}", withheld=True)
    return None
