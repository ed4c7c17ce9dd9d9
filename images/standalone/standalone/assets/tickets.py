"""Invented support tickets for the `tiny` line: a language small enough for two million weights."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterator
from typing import NamedTuple

TEMPLATES = {
    "refund": (
        "please give me my money back for the {thing}, order {number}",
        "I returned the {thing} {days} days ago and still wait for {amount} euro",
        "the {thing} was {flaw}, I would like to be paid back",
        "{hello}, order {number}: you charged {amount} euro twice, return one of them",
    ),
    "delivery": (
        "where is my {thing}? order {number} should have come {days} days ago",
        "{hello}, the parcel {number} did not arrive",
        "the driver left the {thing} with a neighbour I do not know",
        "tracking of {number} has not moved for {days} days",
    ),
    "password": (
        "I cannot log in, the reset mail never comes",
        "{hello}, my account {number} is locked after {days} attempts",
        "please reset the password of account {number}",
        "the code for the login of account {number} is refused",
    ),
    "invoice": (
        "I need the invoice of order {number} with our tax id",
        "{hello}, the bill for the {thing} says {amount} euro but names the wrong company",
        "please send the receipt of order {number} again",
        "our accounting misses the bill of {amount} euro for the {thing}",
    ),
    "cancel": (
        "stop order {number} before it ships, I do not need the {thing}",
        "please cancel my subscription {number}",
        "{hello}, I ordered the {thing} by mistake, take it off",
        "end the contract {number} in {days} days",
    ),
    "praise": (
        "the {thing} is wonderful, thank you",
        "{hello}, your colleague solved my problem {number} in {days} minutes, well done",
        "best {thing} I ever had for {amount} euro",
        "thanks for the quick answer about the {thing}",
    ),
}
THINGS = (
    "kettle",
    "lamp",
    "blue chair",
    "phone",
    "toaster",
    "backpack",
    "desk",
    "radio",
    "camera",
    "rug",
    "oven",
    "scarf",
)
FLAWS = ("broken", "scratched", "too small", "not what I ordered", "loud", "bent")
HELLOS = ("hello", "hi there", "good morning", "dear team", "hey")
CASES = (str.lower, str.capitalize, lambda text: text + ".", lambda text: text + " !", str)


class Ticket(NamedTuple):
    """A ticket and what it is about."""

    number: int
    text: str
    intent: str


def tickets(count: int, seed: int) -> Iterator[Ticket]:
    """`count` tickets, the intents in turn; the same seed gives the same tickets."""
    rng = random.Random(seed)
    intents = tuple(TEMPLATES)
    for number in range(count):
        intent = intents[number % len(intents)]
        text = rng.choice(TEMPLATES[intent]).format(
            thing=rng.choice(THINGS), flaw=rng.choice(FLAWS), hello=rng.choice(HELLOS),
            number=rng.randint(1000, 99999), days=rng.randint(2, 29), amount=rng.randint(5, 400),
        )  # fmt: skip
        yield Ticket(number, rng.choice(CASES)(text), intent)


def deliveries() -> dict[str, bytes]:
    """The files as three departments deliver them: alpaca, messages, csv."""
    mail = [
        {"instruction": ticket.text, "input": "", "output": _answer(ticket), "session": f"mail-{ticket.number}"}
        for ticket in tickets(1500, seed=11)
    ]
    chat = [
        {"messages": [{"role": "user", "content": ticket.text}, {"role": "assistant", "content": _answer(ticket)}]}
        for ticket in tickets(900, seed=12)
    ]
    phone = io.StringIO()
    table = csv.writer(phone)
    table.writerow(["note", "answer"])
    table.writerows((ticket.text, _answer(ticket)) for ticket in tickets(900, seed=13))
    return {
        "mail.jsonl": "".join(json.dumps(row) + "\n" for row in mail).encode(),
        "chat.jsonl": "".join(json.dumps(row) + "\n" for row in chat).encode(),
        "phone.csv": phone.getvalue().encode(),
    }


def _answer(ticket: Ticket) -> str:
    return json.dumps({"intent": ticket.intent})
