"""What the route table becomes in Envoy's words."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from refit import files
from serving.bootstrap import bootstrap
from serving.gateway import Gateway
from serving.routes import clusters, routes
from serving.table import Line, Table, Target

GOLDEN = Path(__file__).parent / "golden"
ENVOY = Path(__file__).resolve().parents[2] / ".venv" / "bin" / "envoy"


def table(*lines: Line) -> Table:
    return Table(lines={line.pipeline: line for line in lines})


def envoy_routes(line: Line) -> dict[str, Any]:
    found = routes(table(line))["resources"][0]["virtual_hosts"][0]["routes"]
    return {route["name"]: route for route in found if "name" in route}


@pytest.mark.parametrize("kind", ["routes", "clusters"])
def test_a_split_is_rendered_as_it_was_agreed(line: Line, kind: str) -> None:
    rendered = (routes if kind == "routes" else clusters)(table(line))
    assert rendered == json.loads((GOLDEN / f"split_{kind}.json").read_text())


def test_the_challenger_stands_last_so_that_nobody_moves_back(line: Line) -> None:
    for weight in (1, 5, 20, 50, 99, 100):
        split = envoy_routes(line.model_copy(update={"weight": weight}))["tiny-split"]["route"]["weighted_clusters"]
        assert [(side["name"], side["weight"]) for side in split["clusters"]] == [
            ("release-" + "a" * 16, 100 - weight),
            ("b" * 16 + "-or-" + "a" * 16, weight),
        ]


def test_at_weight_0_no_route_leads_to_the_challenger(line: Line) -> None:
    assert "b" * 16 not in json.dumps(routes(table(line.without_challenger())))
    shadow = line.model_copy(update={"weight": 0, "shadow": True})
    assert list(envoy_routes(shadow)) == ["tiny-champion"]
    mirrored = envoy_routes(shadow)["tiny-champion"]["route"]["request_mirror_policies"]
    assert mirrored == [{"cluster": "release-" + "b" * 16}]


def test_two_rollouts_do_not_share_their_guinea_pigs(line: Line) -> None:
    def salt(rollout: str) -> str:
        split = envoy_routes(line.model_copy(update={"rollout": rollout}))["tiny-split"]
        found: str = split["route"]["hash_policy"][0]["header"]["regex_rewrite"]["substitution"]
        return found

    assert salt("one") == r"\1:one"
    assert salt("two") == r"\1:two"


def test_every_route_writes_over_what_a_client_claims(line: Line) -> None:
    for name, route in envoy_routes(line).items():
        marked = route["route"]["weighted_clusters"]["clusters"] if name == "tiny-split" else [route]
        for side in marked:
            added = {header["header"]["key"] for header in side["request_headers_to_add"]}
            removed = set(side["request_headers_to_remove"])
            assert {
                "x-refit-pipeline",
                "x-refit-assigned",
                "x-refit-rollout",
                "x-refit-step",
                "x-refit-challenger",
            } == added | removed
            assert all(h["append_action"] == "OVERWRITE_IF_EXISTS_OR_ADD" for h in side["request_headers_to_add"])


def test_the_champion_alone_gets_no_health_checks_that_could_take_it_away(line: Line) -> None:
    found = {cluster["name"]: cluster for cluster in clusters(table(line.without_challenger()))["resources"]}
    assert list(found) == ["release-" + "a" * 16]
    assert "health_checks" not in found["release-" + "a" * 16]


def test_a_warm_predecessor_answers_when_the_champion_is_gone(line: Line) -> None:
    assert line.challenger is not None
    warm = line.without_challenger().model_copy(update={"standby": line.challenger})
    assert envoy_routes(warm)["tiny-champion"]["route"]["cluster"] == "a" * 16 + "-or-" + "b" * 16


def test_a_share_without_a_challenger_cannot_be_said(line: Line) -> None:
    with pytest.raises(ValueError, match="needs a champion, a challenger"):
        Line(pipeline="tiny", champion=line.champion, weight=5)


def test_the_same_table_gives_the_same_version_and_another_table_another(line: Line) -> None:
    version = routes(table(line))["version_info"]
    assert routes(table(line.model_copy()))["version_info"] == version
    assert routes(table(line.model_copy(update={"weight": 21})))["version_info"] != version


def test_envoy_accepts_bootstrap_routes_and_clusters(line: Line, tmp_path: Path) -> None:
    assert line.challenger is not None
    named = Target(release=line.challenger.release, url="http://challenger.models.svc:8000")
    lines = [
        line,
        Line(pipeline="shadowed", champion=line.champion, challenger=named, rollout="s", shadow=True),
        Line(pipeline="warm", champion=line.champion, standby=named),
        Line(pipeline="empty"),
    ]
    Gateway(tmp_path / "envoy", "http://127.0.0.1:1").remember(table(*lines))
    path = Gateway(tmp_path / "envoy", "http://127.0.0.1:1").prepare(1, 2, tmp_path / "spool")
    done = subprocess.run([ENVOY, "--mode", "validate", "-c", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Dynamic resources are only loaded by a running Envoy; so the same ones, as static ones, are validated too.
    document = json.loads(bootstrap(tmp_path, tmp_path / "log", 1, 2))
    del document["dynamic_resources"]
    document["static_resources"]["clusters"] = [plain(c) for c in clusters(table(*lines))["resources"]]
    manager = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["rds"]
    manager["route_config"] = plain(routes(table(*lines))["resources"][0])
    files.write(tmp_path / "static.yaml", json.dumps(document).encode())
    done = subprocess.run(
        [ENVOY, "--mode", "validate", "-c", tmp_path / "static.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    manager["route_config"]["virtual_hosts"][0]["routes"][1]["route"]["cluster"] = 7
    files.write(tmp_path / "broken.yaml", json.dumps(document).encode())
    broken = subprocess.run(
        [ENVOY, "--mode", "validate", "-c", tmp_path / "broken.yaml"], capture_output=True, check=False
    )
    assert broken.returncode != 0


def plain(resource: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in resource.items() if name != "@type"}
