"""The job `compare`: two evaluations of the same exam become a verdict and a page that a person reads.

In:  inputs candidate and champion, two evaluations. Out: report.html, and the verdict as the manifest's facts.
It asks no server. A verdict of fail or hold is a result, not an error: what follows from it is the caller's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evaluator.answers import FILE, Answers
from evaluator.evaluate import KIND as EVALUATION
from evaluator.exam import BUSINESS, GENERAL
from evaluator.gate import Decision, decide
from evaluator.output import keep
from evaluator.pairs import Matched, Pair, match
from refit.errors import BadInput
from refit.fingerprint import comparison_fingerprint
from refit.job import Job, JobRun
from refit.manifest import Manifest
from refit.spec import Pipeline
from refit.statistics import Interval
from refit.store import join, store_for

KIND = "comparison"
REPORT = "report.html"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that the report shows and the manifest tells."""

    spec: Pipeline
    candidate: Manifest
    champion: Manifest
    business: Matched
    correct: Pair
    valid: Pair
    domains: dict[str, Pair]
    general: Pair | None
    general_domains: dict[str, Pair]
    decision: Decision

    @classmethod
    def of(
        cls, spec: Pipeline, *, candidate: Manifest, champion: Manifest, answers: Answers, champion_answers: Answers
    ) -> Comparison:
        """Pair the answers and decide."""
        confidence = spec.evaluate.confidence
        business = match(answers, champion_answers, BUSINESS)
        general = match(answers, champion_answers, GENERAL) if spec.evaluate.general else None
        correct, valid = business.pair("correct", confidence), business.pair("valid", confidence)
        general_pair = general.pair("correct", confidence) if general else None
        faults = [*business.faults, *(general.faults if general else ())]
        if candidate.facts.get("sampling") != champion.facts.get("sampling"):
            faults.append("the two were not asked with the same sampling parameters")
        return cls(
            spec=spec, candidate=candidate, champion=champion, business=business, correct=correct, valid=valid,
            domains=business.by_domain("correct", confidence), general=general_pair,
            general_domains=general.by_domain("correct", confidence) if general else {},
            decision=decide(
                spec.evaluate.gate, business=correct, valid=valid, general=general_pair, faults=faults,
                general_asked=spec.evaluate.general,
            ),
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "verdict": self.decision.verdict,
            "forced": self.decision.forced,
            "measured_verdict": self.decision.measured,
            "why": self.decision.why,
            "reasons": list(self.decision.reasons),
            "candidate": _side(self.candidate, self.correct.candidate),
            "champion": _side(self.champion, self.correct.champion),
            "difference": self.correct.difference.facts(),
            "items": self.correct.items,
            "gained": self.correct.gained,
            "lost": self.correct.lost,
            "p": self.correct.p,
            "validity": self.valid.facts(),
            "domains": {name: pair.facts() for name, pair in self.domains.items()},
            "general": self.general.facts() if self.general else None,
        }


def compare(run: JobRun) -> Manifest:
    """Compare, decide, and write the report.

    Raises:
        BadInput: one of the two is not an evaluation.
    """
    from evaluator.report import render  # matplotlib takes a second, and `evaluator run` does not need it

    job = run.job
    name, digests, manifests = identity(job)
    run.progress("compare", 0, 2)
    answers = {role: Answers.read(store_for(uri).local(join(uri, FILE))) for role, uri in job.inputs.items()}
    comparison = Comparison.of(
        job.spec, candidate=manifests["candidate"], champion=manifests["champion"], answers=answers["candidate"],
        champion_answers=answers["champion"],
    )  # fmt: skip
    run.progress("report", 1, 2)
    report = keep(run, REPORT, render(comparison).encode())
    run.progress("report", 2, 2)
    facts = {**comparison.facts(), "report": join(job.output, REPORT)}
    return Manifest(kind=KIND, fingerprint=name, inputs=digests, files=(report,), facts=facts)


def identity(job: Job) -> tuple[str, dict[str, str], dict[str, Manifest]]:
    """The comparison's fingerprint, the content digests of its inputs, and their manifests."""
    for role in ("candidate", "champion"):
        if role not in job.inputs:
            raise BadInput(f"{job.uri}: inputs.{role} is missing; a comparison needs two evaluations.")
    manifests = {role: store_for(uri).require(uri, EVALUATION) for role, uri in job.inputs.items()}
    digests = {role: manifest.content_digest() for role, manifest in manifests.items()}
    name = comparison_fingerprint(job.spec.evaluate, candidate=digests["candidate"], champion=digests["champion"])
    return name, digests, manifests


def _side(manifest: Manifest, accuracy: Interval) -> dict[str, Any]:
    facts = accuracy.facts()
    return {"release": manifest.facts["release"], "score": facts["value"], "low": facts["low"], "high": facts["high"]}
