"""The gateway's live side: write the route table, and read back from Envoy that it is what routes.

A write is done when Envoy's own dump shows it, and not before. The order loses no request: clusters are added first,
then the routes change, and clusters that nothing names any more are removed by `prune` after a while.

    table.json → cds.json (old and new clusters) → active? → rds.json → live? → … later, prune → cds.json (new only)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from refit import files
from refit.errors import ServerUnavailable, StoreUnavailable
from serving import routes
from serving.bootstrap import ACCESS_LOG, bootstrap
from serving.table import Table

READ_BACK_SECONDS = 20.0
SILENT_SECONDS = 3.0
"""An Envoy that does not answer at all is waited for no longer than this: a rollback of another line may be next."""
PRUNE_SECONDS = 30.0
POLL_SECONDS = 0.05


class _Silent(ServerUnavailable):
    """Envoy does not answer at all."""


class Gateway:
    """One Envoy: the folder it watches and the admin address at which it tells what it does."""

    def __init__(self, folder: Path, admin: str, read_back_seconds: float = READ_BACK_SECONDS) -> None:
        self.folder = folder
        self._watched = folder / "routes"
        self._admin = httpx.Client(base_url=admin, timeout=5.0, trust_env=False)
        self._patience = read_back_seconds
        self._changed = time.monotonic()

    # ------------------------------------------------------------------------------------------------------- write

    def table(self) -> Table:
        """The route table as it was last written.

        Raises:
            StoreUnavailable: it is there and cannot be read; nothing is routed anew until a person has looked.
        """
        path = self.folder / "table.json"
        try:
            return Table.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return Table()
        except ValueError as error:
            raise StoreUnavailable(
                f"{path}: the route table cannot be read: {error}. Restore it, or remove it."
            ) from error

    def write(self, table: Table) -> None:
        """Put a table in force and return when Envoy follows it.

        Repeating is harmless. A kill between two files leaves a state that the next write of the same table completes.

        Raises:
            ServerUnavailable: Envoy does not answer, or does not accept it. The files are written all the same: an
                Envoy that starts now follows them.
        """
        self.remember(table)
        needed, wanted = routes.clusters(table), routes.routes(table)
        self._changed = time.monotonic()
        if self._put("cds.json", _union(self._read("cds.json"), needed)):
            with suppress(_Silent):  # an Envoy that is not there will read both files when it starts
                self._await(lambda dump: _missing_clusters(dump, needed), "clusters", wait_for_envoy=False)
        self._put("rds.json", wanted)
        self._await(lambda dump: _other_version(dump, wanted["version_info"]), "routes")

    def remember(self, table: Table) -> None:
        """Keep a table without putting it in force: for what does not change who answers (a champion to be)."""
        files.write(self.folder / "table.json", table.model_dump_json(indent=1).encode(), mode=0o600)

    def prune(self, table: Table) -> None:
        """Drop clusters that no route has named for a while."""
        wanted = routes.clusters(table)
        if time.monotonic() - self._changed > PRUNE_SECONDS and self._read("cds.json") != wanted:
            self._put("cds.json", wanted)

    def prepare(self, port: int, admin_port: int, spool: Path) -> Path:
        """Write the bootstrap, and routes and clusters from the table: what Envoy needs to start."""
        table = self.table()
        spool.mkdir(parents=True, exist_ok=True)
        path = self.folder / "bootstrap.yaml"
        files.write(path, bootstrap(self._watched, spool / ACCESS_LOG, port, admin_port).encode())
        self._put("cds.json", routes.clusters(table))
        self._put("rds.json", routes.routes(table))
        return path

    # --------------------------------------------------------------------------------------------------- read back

    def split(self, pipeline: str) -> int | None:
        """The challenger's share of users, in percent, as Envoy routes it now; None where it routes no such line."""
        names = {}
        for host in _route_config(self._dump()).get("virtual_hosts", []):
            names.update({route.get("name"): route for route in host.get("routes", [])})
        split = names.get(f"{pipeline}-split")
        if split is not None:
            return int(split["route"]["weighted_clusters"]["clusters"][-1].get("weight", 0))
        return 0 if f"{pipeline}-champion" in names else None

    def live(self, table: Table) -> bool:
        """Whether Envoy follows this very table now."""
        try:
            return _other_version(self._dump(), routes.routes(table)["version_info"]) is None
        except ServerUnavailable:
            return False

    def reopen_log(self) -> None:
        """Have Envoy open its access log by name again, after it was renamed."""
        try:
            self._admin.post("/reopen_logs").raise_for_status()
        except httpx.HTTPError as error:
            raise ServerUnavailable(f"the gateway does not answer on {self._admin.base_url}: {error}") from error

    def _await(
        self, problem: Callable[[dict[str, Any]], str | None], what: str, *, wait_for_envoy: bool = True
    ) -> None:
        started = time.monotonic()
        while True:
            patience = self._patience
            try:
                wrong = problem(self._dump())
            except _Silent as error:
                if not wait_for_envoy:
                    raise
                wrong, patience = str(error), min(SILENT_SECONDS, self._patience)
            if wrong is None:
                return
            if time.monotonic() - started > patience:
                raise ServerUnavailable(f"the gateway has not taken its new {what}: {wrong}")
            time.sleep(POLL_SECONDS)

    def _dump(self) -> dict[str, Any]:
        try:
            answer = self._admin.get("/config_dump")
            answer.raise_for_status()
            return {section["@type"].rsplit(".", 1)[-1]: section for section in answer.json()["configs"]}
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise _Silent(f"the gateway does not answer on {self._admin.base_url}: {error}") from error

    def _put(self, name: str, document: dict[str, Any]) -> bool:
        """Replace a watched file where it differs; whether it did."""
        differs = self._read(name) != document
        if differs:
            files.write(self._watched / name, json.dumps(document, indent=1).encode())
        return differs

    def _read(self, name: str) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads((self._watched / name).read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return document


def _union(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Old and new clusters; the version says which."""
    resources = {resource["name"]: resource for resource in old.get("resources", [])}
    added = {resource["name"]: resource for resource in new["resources"]}
    if not resources.keys() - added.keys():
        return new
    merged = {**resources, **added}
    version = f"{new['version_info']}+{len(merged) - len(added)}"
    return {"version_info": version, "resources": [merged[name] for name in sorted(merged)]}


def _missing_clusters(dump: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    section = dump.get("ClustersConfigDump", {})
    active = {entry["cluster"]["name"]: entry["cluster"] for entry in section.get("dynamic_active_clusters", [])}
    for resource in wanted["resources"]:
        name = resource["name"]
        if name not in active or _ports(active[name]) != _ports(resource):
            return f"{name} is not active{_refusal(section, 'dynamic_warming_clusters', 'dynamic_active_clusters')}"
    return None


def _ports(cluster: dict[str, Any]) -> str:
    return json.dumps(cluster.get("load_assignment", {}).get("endpoints", []), sort_keys=True)


def _other_version(dump: dict[str, Any], version: str) -> str | None:
    section = dump.get("RoutesConfigDump", {})
    configs = section.get("dynamic_route_configs", [])
    live = [config.get("version_info") for config in configs]
    if live == [version]:
        return None
    return f"version {live} is live, {version} was written{_refusal(section, 'dynamic_route_configs')}"


def _refusal(section: dict[str, Any], *names: str) -> str:
    states = [entry["error_state"] for name in names for entry in section.get(name, []) if "error_state" in entry]
    return "".join(f"; Envoy refused it: {state.get('details')}" for state in states)


def _route_config(dump: dict[str, Any]) -> dict[str, Any]:
    for config in dump.get("RoutesConfigDump", {}).get("dynamic_route_configs", []):
        found: dict[str, Any] = config.get("route_config", {})
        return found
    return {}
