"""Two evaluations become a verdict and a page: pass, fail, hold, and never a pass without data."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from evaluator.answers import Answers
from evaluator.cli import HANDLERS, main
from evaluator.compare import Comparison
from evaluator.evaluate import KIND
from evaluator.exam import Item, general_items
from evaluator.report import render
from evaluator.server import Answer
from refit.errors import BadInput
from refit.job import Job, run
from refit.manifest import Manifest
from refit.pipeline import load
from refit.spec import Pipeline
from refit.store import store_for

from .conftest import LABELS, TINY, World

Model = Callable[[Item, random.Random], str]


def tickets(count: int = 200, question: str = "Ticket {n}: about my {label}.") -> list[Item]:
    return [
        Item(
            set="business", id=f"t{n}", domain=("mail", "chat", "phone")[n % 3], label=LABELS[n % 6],
            messages=({"role": "user", "content": question.format(n=n, label=LABELS[n % 6])},),
            reference=json.dumps({"intent": LABELS[n % 6]}),
        )
        for n in range(count)
    ]  # fmt: skip


def knows(share: float) -> Model:
    """A model that is right on a share of items, the same ones for the same seed."""

    def model(item: Item, dice: random.Random) -> str:
        right = dice.random() < share
        if item.check is not None:
            return "no idea"
        return item.reference if right else json.dumps({"intent": LABELS[(LABELS.index(item.label or "") + 1) % 6]})

    return model


def evaluation(
    world: World, name: str, model: Model, items: list[Item] | None = None, *sets: str, seed: int = 1, **facts: Any
) -> str:
    """A committed evaluation, as the job `evaluate` leaves it."""
    spec, dice = load(TINY, sets), random.Random(seed)
    asked = tickets() if items is None else items
    replies = {
        item.key: Answer(set=item.set, id=item.id, text=model(item, dice), seconds=0.1, tokens=7, finish="stop")
        for item in asked
    }
    answers = Answers.of(asked, replies, spec.evaluate)
    uri = world.uri(name)
    with store_for(uri).publish(uri) as draft:
        (draft.path / "answers.parquet").write_bytes(answers.parquet())
        told = {
            "release": name, "model_digest": name * 8, "sampling": spec.evaluate.sampling.model_dump(),
            "latency": {"p50": 0.1, "p95": 0.2}, **facts,
        }  # fmt: skip
        draft.commit(Manifest(kind=KIND, fingerprint=name, inputs={"dataset": "d", "release": name}, facts=told))
    return uri


def compare(world: World, candidate: str, champion: str, *sets: str) -> dict[str, Any]:
    job = Job.build(
        "compare", load(TINY, sets), store=world.uri("store"), output=world.uri("comparison"),
        inputs={"candidate": candidate, "champion": champion},
    )  # fmt: skip
    facts = run(job, HANDLERS["compare"]).facts
    assert (world.folder / "comparison" / "report.html").is_file()
    json.dumps(facts, allow_nan=False)
    return facts


def test_a_better_model_passes_and_the_figures_say_why(world: World):
    facts = compare(world, evaluation(world, "new", knows(0.9)), evaluation(world, "old", knows(0.5)))
    assert (facts["verdict"], facts["forced"]) == ("pass", False)
    assert "proven better on 200 items: +" in facts["why"]
    assert facts["candidate"]["release"] == "new"
    assert facts["champion"]["release"] == "old"
    assert facts["difference"]["value"] == pytest.approx(facts["candidate"]["score"] - facts["champion"]["score"])
    assert facts["difference"]["low"] > 0
    assert facts["gained"] - facts["lost"] == round(200 * facts["difference"]["value"])
    assert facts["p"] < 1e-6
    assert facts["candidate"]["low"] < facts["candidate"]["score"] < facts["candidate"]["high"]


def test_a_worse_model_fails(world: World):
    facts = compare(world, evaluation(world, "new", knows(0.3)), evaluation(world, "old", knows(0.9)))
    assert facts["verdict"] == "fail"
    assert facts["why"].startswith("worse on 200 items: -")


def test_a_model_that_is_only_as_good_is_not_proven_better(world: World):
    facts = compare(world, evaluation(world, "new", knows(0.7)), evaluation(world, "old", knows(0.7), seed=2))
    assert facts["verdict"] == "fail"
    assert "not proven better" in facts["why"]


def test_the_gain_must_be_above_what_the_gate_asks(world: World):
    new, old = evaluation(world, "new", knows(0.9)), evaluation(world, "old", knows(0.5))
    assert compare(world, new, old, "evaluate.gate.min_gain=0.5")["verdict"] == "fail"


def test_right_but_unreadable_answers_fail(world: World):
    """More right answers than the champion, and yet most of what it says is of no use."""

    def mumbles(item: Item, dice: random.Random) -> str:
        return item.reference if dice.random() < 0.4 else "Well, " + item.reference

    facts = compare(world, evaluation(world, "new", mumbles), evaluation(world, "old", knows(0.1)))
    assert facts["verdict"] == "fail"
    assert "of its answers can be read; the gate asks for 50 %" in facts["why"]


def test_too_few_items_hold(world: World):
    new, old = (evaluation(world, *side, tickets(99)) for side in (("new", knows(1.0)), ("old", knows(0.0))))
    facts = compare(world, new, old)
    assert facts["verdict"] == "hold"
    assert facts["why"] == "only 99 items were answered by both; the gate asks for 100"


@pytest.mark.parametrize(
    ("old_items", "said"),
    [
        (tickets(150), "the champion did not answer 50 business items (t150, t151, t152, …)"),
        (tickets(220), "the candidate did not answer 20 business items (t200, t201, t202, …)"),
        (tickets(question="Other words {n}: {label}?"), "200 business items were not the same question on both sides"),
        ([], "there are no answers of the champion to the business set"),
    ],
)
def test_different_items_hold(world: World, old_items: list[Item], said: str):
    new, old = evaluation(world, "new", knows(1.0)), evaluation(world, "old", knows(0.0), old_items)
    facts = compare(world, new, old)
    assert facts["verdict"] == "hold"
    assert said in facts["why"]


def test_other_sampling_holds(world: World):
    new = evaluation(world, "new", knows(1.0))
    old = evaluation(world, "old", knows(0.0), sampling={"temperature": 1.0})
    assert "same sampling" in compare(world, new, old)["why"]


def comparison(new: Answers, old: Answers, spec: Pipeline) -> Comparison:
    side = Manifest(
        kind=KIND, fingerprint="f", inputs={"dataset": "d"},
        facts={"release": "r", "model_digest": "m", "sampling": {}, "latency": {"p50": 0.1, "p95": 0.2}},
    )  # fmt: skip
    return Comparison.of(spec, candidate=side, champion=side, answers=new, champion_answers=old)


def scored(items: list[Item], model: Model, spec: Pipeline) -> Answers:
    dice = random.Random(1)
    replies = {
        item.key: Answer(set=item.set, id=item.id, text=model(item, dice), seconds=0.1, tokens=1, finish="stop")
        for item in items
    }
    return Answers.of(items, replies, spec.evaluate)


def test_a_missing_score_holds(world: World):
    spec = load(TINY)
    new, old = scored(tickets(), knows(1.0), spec), scored(tickets(), knows(0.0), spec)
    holed = Answers([{**row, "correct": None} if row["id"] == "t7" else row for row in new.rows])
    found = comparison(holed, old, spec)
    assert found.decision.verdict == "hold"
    assert found.decision.why == "scores of the business set are missing (NaN)"
    assert "not measured" in render(found)


def general(share: float) -> Model:
    def model(item: Item, dice: random.Random) -> str:
        if item.check is None:
            return item.reference
        examples = {"arithmetic": "12 5 18 19 99 25 7 60", "facts": "Paris Tokyo Rome Earth Sun ice Shakespeare Egypt"}
        return examples.get(item.domain, "yes hello CAT 1,2,3,4,5 ?") if dice.random() < share else "no idea"

    return model


def test_a_model_that_forgot_everything_else_fails(world: World):
    spec = load(TINY, ["evaluate.general=true"])
    items = tickets() + general_items()
    new = scored(items, general(0.0), spec)
    old_business = scored(tickets(), knows(0.2), spec)
    old = Answers([*old_business.rows, *scored(general_items(), general(1.0), spec).rows])
    facts = comparison(new, old, spec)
    assert facts.decision.verdict == "fail"
    assert "the general set got worse" in facts.decision.why


def test_a_general_loss_that_may_be_chance_holds(world: World):
    spec = load(TINY, ["evaluate.general=true", "evaluate.gate.max_general_loss=0.03"])
    business_new, business_old = scored(tickets(), knows(0.9), spec), scored(tickets(), knows(0.2), spec)
    right = scored(general_items(), general(1.0), spec)
    wrong_rows = [index for index, row in enumerate(right.rows) if row["correct"]][:2]
    slipped = [{**row, "correct": False} if index in wrong_rows else row for index, row in enumerate(right.rows)]
    found = comparison(Answers([*business_new.rows, *slipped]), Answers([*business_old.rows, *right.rows]), spec)
    assert found.decision.verdict == "hold"
    assert "cannot tell it from chance" in found.decision.why


def test_a_missing_general_set_holds(world: World):
    spec = load(TINY, ["evaluate.general=true"])
    new = scored(tickets() + general_items(), knows(1.0), spec)
    old = scored(tickets(), knows(0.0), spec)
    found = comparison(new, old, spec)
    assert found.decision.verdict == "hold"
    assert "no answers of the champion to the general set" in found.decision.why


def test_the_drill_lets_through_and_writes_it_down(world: World):
    new, old = evaluation(world, "new", knows(0.3)), evaluation(world, "old", knows(0.9))
    facts = compare(world, new, old, "evaluate.gate.force=true")
    assert (facts["verdict"], facts["forced"], facts["measured_verdict"]) == ("pass", True, "fail")
    assert "forced through (the gate said fail): worse" in facts["why"]
    assert "Let through by a drill" in (world.folder / "comparison" / "report.html").read_text()


def test_two_things_that_are_not_evaluations_are_bad_input(world: World):
    with pytest.raises(BadInput, match="holds a dataset, expected a"):
        compare(world, world.dataset, world.dataset)


def test_the_command_line_says_the_verdict_and_keeps_it(world: World, capsys: pytest.CaptureFixture[str]):
    new, old = evaluation(world, "new", knows(0.3)), evaluation(world, "old", knows(0.9))
    arguments = [
        "compare", str(TINY), "--candidate", new, "--champion", f"{old}/manifest.json", "--output", world.uri("c"),
    ]  # fmt: skip
    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert first["verdict"] == "fail"
    assert first["report"] == world.uri("c/report.html")
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == first
    assert main([*arguments, "--set", "evaluate.gate.min_gain=0.2"]) == 10


# ------------------------------------------------------------------------------------------------------------ report


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what a browser would act on."""

    VOID = frozenset({"meta", "br", "link", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attributes if name == "id"]
        for name, value in attributes:
            assert not name.startswith("on"), f"{tag} has {name}"
            if name in ("src", "href", "xlink:href"):
                assert (value or "").startswith("#"), f"{tag} reaches for {value}"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_report_is_one_page_that_reaches_for_nothing(world: World):
    compare(world, evaluation(world, "new", knows(0.9)), evaluation(world, "old", knows(0.5)))
    page = Page((world.folder / "comparison" / "report.html").read_text())
    text = " ".join(page.words)
    assert page.tags.count("svg") == 5
    assert len(page.ids) == len(set(page.ids))
    assert "The candidate is better" in text
    assert "Became right" in text
    assert text.count("about my") == 10
    assert "script" not in page.tags


def test_the_report_escapes_what_models_and_data_say(world: World):
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'& $\\frac{$ </svg>"
    items = [
        Item(
            set="business", id=f"t{n}", domain=f"<b>{n % 2}</b> $x$ &", label=LABELS[n % 6], reference=hostile,
            messages=({"role": "user", "content": hostile},),
        )
        for n in range(120)
    ]  # fmt: skip
    spec = load(TINY, ['title="<script>t</script>"', 'evaluate.labels=["<i>a</i>", "$$", "refund"]'])
    new = scored(items, lambda item, dice: hostile, spec)
    old = scored(items, lambda item, dice: json.dumps({"intent": item.label}), spec)
    page = Page(render(comparison(new, old, spec)))
    assert not {"script", "img"} & set(page.tags)
    assert "<b>0</b> $x$ &" in "".join(page.words)
    assert "<script>alert(1)</script>" in "".join(page.words)


def test_the_report_is_the_same_each_time(world: World):
    spec = load(TINY)
    found = comparison(scored(tickets(), knows(0.9), spec), scored(tickets(), knows(0.5), spec), spec)
    assert render(found) == render(found)
