"""The controller, killed at every write it makes: whoever starts next ends the rollout right, and once.

Envoy is played by a small HTTP server that tells what the watched files say, as Envoy's admin does; the disk is real.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import refit.files
from refit.errors import ServerUnavailable
from refit.release import Release
from refit.spec import Rollout as Policy
from refit.statistics import Summary
from serving.controller import Controller
from serving.fleet import Health, ServerState
from serving.gateway import Gateway
from serving.journal import Journal
from serving.lines import Lines
from serving.rollout import Plan, Refused, State
from serving.verdicts import Measured, Side, Verdict

Make = Callable[[str], Release]


class Killed(BaseException):
    """The process ends here."""


class Envoy:
    """Envoy's admin address, as far as the gateway reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.deaf = folder / "routes", False
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if double.deaf:
                    self.close_connection = True
                    return
                body = json.dumps({"configs": double.dump()}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.admin = f"http://127.0.0.1:{self._server.server_port}"

    def dump(self) -> list[dict[str, Any]]:
        clusters, routes = (self._file(name) for name in ("cds.json", "rds.json"))
        active = [{"cluster": cluster} for cluster in clusters.get("resources", [])]
        config = {"version_info": routes.get("version_info"), "route_config": (routes.get("resources") or [{}])[0]}
        return [
            {"@type": "x.ClustersConfigDump", "dynamic_active_clusters": active},
            {"@type": "x.RoutesConfigDump", "dynamic_route_configs": [config]},
        ]

    def _file(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return {}
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Servers:
    """A fleet in which every server that is wanted is ready, but those in `down`."""

    def __init__(self) -> None:
        self.wanted: dict[str, float | None] = {}
        self.down: dict[str, Health] = {}

    def want(self, release: Release) -> None:
        self.wanted[release.id] = None

    def retire(self, release: str, after: float = 0.0) -> None:
        self.wanted[release] = after

    def due(self, release: str) -> bool:
        return self.wanted.get(release) == 0.0

    def health(self, release: str) -> Health:
        if release not in self.wanted:
            return Health(ServerState.STOPPED)
        return self.down.get(release, Health(ServerState.READY, f"http://127.0.0.1:{9000 + ord(release[0])}"))

    def releases(self) -> list[str]:
        return list(self.wanted)


class Alarm:
    def __init__(self) -> None:
        self.raised: list[str] = []

    def suspicious(self, source: str, message: str, **_: object) -> None:
        self.raised.append(f"suspicious: {message}")

    def dangerous(self, source: str, message: str, **_: object) -> None:
        self.raised.append(f"dangerous: {message}")


class House:
    """What lasts: the disk, Envoy and the servers. `controller()` starts one more process on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.envoy, self.servers, self.alarm = folder, Envoy(folder / "envoy"), Servers(), Alarm()
        self.journal = Journal(folder / "rollouts")

    def controller(self) -> Controller:
        self.gateway = Gateway(self.folder / "envoy", self.envoy.admin, read_back_seconds=0.3)
        made = Controller(Lines(self.gateway), self.servers, self.journal, self.alarm)  # type: ignore[arg-type]
        made.leading = True
        return made

    def weight(self) -> int | None:
        return self.gateway.split("tiny")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.envoy.close()


def plan(release: Make, **policy: Any) -> Plan:
    given = {"shadow_pairs": 0, "min_seconds": 0, "min_events": 1, "keep_warm_minutes": 1, **policy}
    return Plan(
        id="r", pipeline="tiny", candidate=release("b"), champion=release("a"), steps=(0, 5, 100),
        policy=Policy.model_validate(given),
    )  # fmt: skip


def seen(champion: float, challenger: float) -> Measured:
    sides = [
        Side(
            requests=n, users=n, recent=9, age=0.0, latencies=(0.1,) * 99, events=n, feedback_age=0.0,
            outcomes=Summary(n, mean, mean * (1 - mean)),
        )
        for n, mean in ((1900, champion), (100, challenger))
    ]  # fmt: skip
    return Measured(*sides, strata=((sides[0].outcomes, sides[1].outcomes),))


GOOD, BAD = seen(0.5, 0.95), seen(0.95, 0.2)


def first_champion(house: House, release: Make) -> Controller:
    controller = house.controller()
    controller.first_champion("tiny", release("a"), "test")
    controller.look()
    return controller


def go_on(controller: Controller, rollout: Plan, found: Measured) -> None:
    """What the DAG and the database do, from wherever the rollout stands, until it has ended."""
    for _ in range(12):
        state = controller.start(rollout)
        if not state.running:
            return
        controller.measured("r", state.step, found)
        controller.look()
        state = controller.rollouts()["r"]
        if state.running and state.passed:
            if state.last:
                controller.finish("r")
            else:
                controller.enter("r", state.step + 1)
    raise AssertionError(f"it does not end: {controller.rollouts()['r']}")


def killer(monkeypatch: pytest.MonkeyPatch, at: int, when: str) -> None:
    """Kill the process at its n-th write of a file, before or after the write."""
    count = 0

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == at and when == "before":
                raise Killed
            done = real(*arguments, **named)
            if count == at:
                raise Killed
            return done

        return write

    for name in ("write", "append"):
        monkeypatch.setattr(refit.files, name, deadly(getattr(refit.files, name)))


def writes_of(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> int:
    """How many files a piece of work writes."""
    count = 0

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            return real(*arguments, **named)

        return write

    with monkeypatch.context() as patch:
        for name in ("write", "append"):
            patch.setattr(refit.files, name, counting(getattr(refit.files, name)))
        work()
    return count


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("found", "ends"), [(GOOD, State.FINISHED), (BAD, State.ROLLED_BACK)])
def test_a_controller_killed_at_any_write_is_followed_by_one_that_ends_it_right(
    found: Measured, ends: State, when: str, release: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = plan(release)
    undisturbed = House(tmp_path / "undisturbed")
    controller = first_champion(undisturbed, release)
    total = writes_of(monkeypatch, lambda: go_on(controller, asked, found))
    undisturbed.envoy.close()
    assert total > 10
    for at in range(1, total + 1):
        house = House(tmp_path / f"{at}")
        controller = first_champion(house, release)
        with monkeypatch.context() as patch:
            killer(patch, at, when)
            with pytest.raises(Killed):
                go_on(controller, asked, found)
        controller = house.controller()
        go_on(controller, asked, found)
        controller.look()

        rollout = controller.rollouts()["r"]
        assert rollout.state is ends, f"write {at}"
        assert house.weight() == 0
        champion = release("b") if ends is State.FINISHED else release("a")
        line = controller.table().line("tiny")
        assert line.champion is not None
        assert (line.champion.release, line.rollout, line.challenger) == (champion, "", None)
        told = [change.champion.id[0] for change in house.journal.changes()]
        assert told == (["a", "b"] if ends is State.FINISHED else ["a"]), f"write {at}"
        assert house.journal.rollouts()["r"] == rollout, "the disk tells what the memory knows"
        house.envoy.close()


def killed_at(monkeypatch: pytest.MonkeyPatch, at: int, when: str, work: Callable[[], object]) -> bool:
    """Whether the process got as far as its n-th write, and died there."""
    with monkeypatch.context() as patch:
        killer(patch, at, when)
        try:
            work()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rollback_that_was_begun_is_ended_by_the_next_controller(
    when: str, release: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """argo-rollouts#4841: what was taken back must not go on, whatever a new look would say of it."""
    for at in range(1, 20):
        house = House(tmp_path / f"{at}")
        controller = first_champion(house, release)
        controller.start(plan(release))
        controller.look()
        controller.enter("r", 1)
        killed = killed_at(monkeypatch, at, when, lambda: controller.roll_back("tiny", "it smells", "vera"))  # noqa: B023
        begun = house.gateway.table().line("tiny").rollout == ""
        controller = house.controller()
        controller.measured("r", 1, GOOD)
        controller.look()
        assert (house.weight() == 0) is begun
        assert (controller.rollouts()["r"].state is State.ROLLED_BACK) is begun, f"write {at}"
        house.envoy.close()
        if not killed:
            break
    assert at > 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_change_of_champion_is_written_down_once_whenever_the_controller_dies(
    when: str, release: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(1, 20):
        house = House(tmp_path / f"{at}")
        killed = killed_at(monkeypatch, at, when, lambda: first_champion(house, release))  # noqa: B023
        first_champion(house, release)
        assert [change.champion for change in house.journal.changes()] == [release("a")], f"write {at}"
        assert house.gateway.split("tiny") == 0
        house.envoy.close()
        if not killed:
            break
    assert at > 3


def test_harm_takes_a_model_back_at_once_and_says_so(house: House, release: Make) -> None:
    controller = first_champion(house, release)
    controller.start(plan(release))
    controller.look()
    controller.enter("r", 1)
    assert house.weight() == 5
    controller.leading = False  # Postgres went away after the measurement
    controller.measured("r", 1, BAD)
    controller.look()
    assert house.weight() == 0
    assert controller.rollouts()["r"].state is State.ROLLED_BACK
    assert any(
        alert.startswith("dangerous: rollout r of tiny is taken back at step 1: users") for alert in house.alarm.raised
    )


def test_a_rollback_while_envoy_is_silent_is_done_only_when_it_was_seen(house: House, release: Make) -> None:
    controller = first_champion(house, release)
    controller.start(plan(release))
    controller.look()
    controller.enter("r", 1)
    house.envoy.deaf = True
    with pytest.raises(ServerUnavailable):
        controller.roll_back("tiny", "it smells", "test")
    assert controller.rollouts()["r"].running, "not said to be done before it was seen"
    assert controller.table().line("tiny").weight == 0
    with pytest.raises(Refused):
        controller.enter("r", 2)
    house.envoy.deaf = False
    assert house.weight() == 0, "an Envoy that comes back reads weight 0"
    controller.look()
    assert controller.rollouts()["r"].state is State.ROLLED_BACK
    assert controller.rollouts()["r"].why == "rolled back by test: it smells"


def test_without_the_lead_nothing_goes_forward_and_everything_goes_back(house: House, release: Make) -> None:
    controller = first_champion(house, release)
    controller.start(plan(release))
    controller.look()
    controller.leading = False
    for forward in (lambda: controller.enter("r", 1), lambda: controller.first_champion("other", release("c"), "test")):
        with pytest.raises(ServerUnavailable, match="does not lead"):
            forward()
    controller.roll_back("tiny", "no reason", "test")
    assert controller.rollouts()["r"].state is State.ROLLED_BACK


def test_a_pass_stands_while_the_database_is_away_but_none_is_given_without_it(house: House, release: Make) -> None:
    controller = first_champion(house, release)
    controller.start(plan(release))
    controller.look()
    controller.enter("r", 1)
    controller.look()
    assert controller.judgement(controller.rollouts()["r"]).verdict is Verdict.WAIT
    controller.measured("r", 1, GOOD)
    controller.look()
    controller.measured("r", 1, None)
    controller.look()
    assert controller.judgement(controller.rollouts()["r"]).verdict is Verdict.PASS


def test_a_measurement_of_the_step_before_does_not_pass_the_next(house: House, release: Make) -> None:
    controller = first_champion(house, release)
    controller.start(plan(release))
    controller.look()
    controller.enter("r", 1)
    controller.measured("r", 0, GOOD)
    controller.look()
    assert not controller.rollouts()["r"].passed


def test_the_previous_champion_comes_back_when_its_server_answers(house: House, release: Make) -> None:
    controller = first_champion(house, release)
    go_on(controller, plan(release), GOOD)
    house.servers.wanted.pop(release("a").id)  # retired since
    house.servers.down[release("a").id] = Health(ServerState.STARTING)
    controller.roll_back("tiny", "people complain", "vera")
    line = controller.table().line("tiny")
    assert line.champion is not None
    assert line.champion.release == release("b"), "nobody is sent to a server that does not answer"
    house.servers.down.clear()
    controller.look()
    line = controller.table().line("tiny")
    assert line.champion is not None
    assert (line.champion.release, line.previous, line.pending) == (release("a"), release("b"), None)
    last = house.journal.changes()[-1]
    assert (last.reason, last.actor) == ("rollback: people complain", "vera")
    with pytest.raises(Refused, match="no previous champion"):
        controller.roll_back("other", "?", "vera")


def test_a_former_champion_stays_on_the_routes_until_its_time_has_come(house: House, release: Make) -> None:
    controller = first_champion(house, release)
    go_on(controller, plan(release), GOOD)
    standby = controller.table().line("tiny").standby
    assert standby is not None
    assert standby.release == release("a")
    assert release("a").id in controller.needed()
    house.servers.wanted[release("a").id] = 0.0
    controller.look()
    assert controller.table().line("tiny").standby is None
    assert release("a").id not in controller.needed()


def test_nobody_becomes_champion_while_their_server_is_away(house: House, release: Make) -> None:
    controller = first_champion(house, release)
    finish = controller.finish
    controller.finish = lambda rollout: controller.rollouts()[rollout]  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="it does not end"):
        go_on(controller, plan(release), GOOD)
    house.servers.down[release("b").id] = Health(ServerState.STARTING, why="started again after it ended")
    with pytest.raises(ServerUnavailable, match="started again after it ended; ask again"):
        finish("r")
    assert controller.rollouts()["r"].running
    house.servers.down.clear()
    assert finish("r").state is State.FINISHED


def test_a_candidate_that_cannot_be_served_ends_its_rollout(house: House, release: Make) -> None:
    controller = first_champion(house, release)
    house.servers.down[release("b").id] = Health(ServerState.STARTING)
    controller.start(plan(release))
    controller.look()
    assert house.weight() == 0
    house.servers.down[release("b").id] = Health(ServerState.FAILED, why="the model is damaged")
    controller.look()
    assert controller.rollouts()["r"].why == "the candidate cannot be served: the model is damaged"


def test_a_candidate_that_keeps_ending_is_taken_back(house: House, release: Make) -> None:
    controller = first_champion(house, release)
    controller.start(plan(release))
    controller.look()
    controller.enter("r", 1)
    house.servers.down[release("b").id] = Health(ServerState.STARTING, restarts=3)
    controller.look()
    assert controller.rollouts()["r"].why == "the candidate cannot be served: its server ended 3 times"


def test_what_contradicts_itself_is_refused(house: House, release: Make) -> None:
    controller = first_champion(house, release)
    asked = plan(release)
    with pytest.raises(Refused, match="has a champion already"):
        controller.first_champion("tiny", release("c"), "test")
    controller.first_champion("tiny", release("a"), "test")
    with pytest.raises(Refused, match="is the champion of tiny already"):
        controller.start(asked.model_copy(update={"candidate": release("a")}))
    with pytest.raises(Refused, match="the champion of tiny has changed"):
        controller.start(asked.model_copy(update={"champion": release("c")}))
    controller.start(asked)
    with pytest.raises(Refused, match="has a running rollout: r"):
        controller.start(asked.model_copy(update={"id": "s"}))
    with pytest.raises(Refused, match="rollout r is another one"):
        controller.start(asked.model_copy(update={"candidate": release("c")}))
    with pytest.raises(Refused, match="step 0 of 2 is wait"):
        controller.finish("r")


def test_a_route_that_somebody_changed_is_put_right(
    house: House, release: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = first_champion(house, release)
    controller.start(plan(release))
    controller.look()
    controller.enter("r", 1)
    (house.folder / "envoy" / "routes" / "rds.json").write_text('{"version_info": "mine", "resources": []}')
    assert house.weight() is None
    monkeypatch.setattr("serving.lines.CHECK_SECONDS", -1.0)
    controller.look()
    assert house.weight() == 5
