"""`serving control`: the controller put together from its parts, with a thread for each thing that may wait."""

from __future__ import annotations

import fcntl
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from refit import log
from serving import api
from serving.alerts import Alerts
from serving.controller import Controller
from serving.database import Database
from serving.fleet import Fleet
from serving.gateway import Gateway
from serving.journal import Journal
from serving.ledger import Ledger
from serving.lines import Lines
from serving.servers import Records, SupervisorHost
from serving.settings import HOST, Settings, port_of

Loop = Callable[[threading.Event], None]


def control(settings: Settings) -> None:
    """Run the controller until it is stopped."""
    token = settings.token()
    with only_one(settings.rollouts / "controller.lock"):
        alerts = Alerts(Database(settings.database, "refit-alerts"), settings.alert_webhook)
        lines = Lines(Gateway(settings.envoy, settings.admin))
        records = Records(settings.servers, settings.first_server_port)
        fleet = Fleet(SupervisorHost(settings), records, alerts)
        journal = Journal(settings.rollouts)
        controller = Controller(lines, fleet, journal, alerts)
        fleet.needed = controller.needed
        leader, database = Database(settings.database, "refit-leader"), Database(settings.database, "refit-controller")
        ledger = Ledger(controller, journal, leader, database)
        with threads(controller.run, fleet.run, ledger.run, alerts.run):
            application = api.app(controller, fleet, journal, token)
            uvicorn.run(
                application, host=HOST, port=port_of(settings.controller), log_level="warning", access_log=False
            )


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Wait until no other controller of this home runs: the routes are files here, and have one writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        told = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    log.event("controller", state="waiting", why=f"another controller holds {path}")
                told = True
                time.sleep(0.5)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def threads(*loops: Loop) -> Iterator[None]:
    """Run loops beside the caller, each in a thread; they are told to stop at the end."""
    stop = threading.Event()
    started = [threading.Thread(target=_immortal, args=(loop, stop), daemon=True) for loop in loops]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in started:
            thread.join(5.0)


def _immortal(loop: Loop, stop: threading.Event) -> None:
    """A loop that dies of a defect is started again, loudly: a controller with a dead look would seem well."""
    while not stop.is_set():
        try:
            loop(stop)
        except Exception as error:  # noqa: BLE001  (the last line of defence)
            log.event("defect", loop=str(loop), error=repr(error), trace=_trace(error))
            stop.wait(1.0)


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-2000:]
