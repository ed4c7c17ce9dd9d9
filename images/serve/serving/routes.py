"""The route table in Envoy's words.

`clusters` and `routes` render it and know nothing else: the same table gives the same bytes.

The path of a request under /<pipeline>/:

    has x-user-id?  no ──────────────────────────────────────────────→ champion
         │ yes
    hash(user + rollout) % 100   < 100 - weight ─────────────────────→ champion
                                 otherwise ──→ challenger, and the champion where the challenger is gone

The challenger stands last in the list, so a user who has moved never moves back while the weight grows (5 ⊂ 20 ⊂ 50).
Each side writes `x-refit-assigned` over whatever the client sent; the server's own `x-refit-release` in the answer says
who served. At weight 0 there is no challenger in the list at all: a rollback cannot be undone by rounding.
"""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import urlsplit

from refit import fingerprint
from serving.table import Line, Table, Target

USER = "x-user-id"
ROUTES = "refit"
CHAMPION, CHALLENGER = "champion", "challenger"
IDLE_SECONDS = 3
"""We close idle upstream connections first: uvicorn closes its own after 5 s, and a request must not meet that."""


# -------------------------------------------------------------------------------------------------------- clusters


def clusters(table: Table) -> dict[str, Any]:
    """The clusters of a table, as the document that Envoy's CDS reads.

    A server has a plain cluster, used where nothing could be done about its failing, and a checked one (health checks),
    used as the first of a chain [first, then].
    """
    found: dict[str, dict[str, Any]] = {}
    for line in table.lines.values():
        for target in (line.champion, line.standby, line.challenger):
            if target:
                found[plain(target)] = _server(plain(target), target.url)
        for first, then in _chains(line):
            found[checked(first)] = _server(checked(first), first.url) | _HEALTH
            found[chain(first, then)] = _chain(chain(first, then), [checked(first), plain(then)])
    resources = [{"@type": f"{_API}.config.cluster.v3.Cluster", **found[name]} for name in sorted(found)]
    return _versioned(resources)


def plain(target: Target) -> str:
    """The name of a server's own cluster."""
    return f"release-{target.release.id}"


def checked(target: Target) -> str:
    """The name of a server's cluster with health checks."""
    return f"checked-{target.release.id}"


def chain(first: Target, then: Target) -> str:
    """The name of the cluster that tries `first` and falls back on `then`."""
    return f"{first.release.id}-or-{then.release.id}"


def _chains(line: Line) -> list[tuple[Target, Target]]:
    found = []
    if line.champion and line.challenger:
        found.append((line.challenger, line.champion))
    if line.champion and line.standby:
        found.append((line.champion, line.standby))
    return found


_API = "type.googleapis.com/envoy"
_BREAKERS = {
    # Envoy's own limits (3 retries at a time) are made for large fleets; a killed server means many retries at once.
    "thresholds": [{"max_connections": 4096, "max_pending_requests": 4096, "max_requests": 4096, "max_retries": 4096}]
}
_HEALTH: dict[str, Any] = {
    # Without this, Envoy sends requests to unhealthy hosts when most are unhealthy, and a chain never moves on.
    "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
    "health_checks": [
        {
            "http_health_check": {"path": "/health"},
            "timeout": "5s",
            "interval": "1s",
            "no_traffic_interval": "1s",
            "no_traffic_healthy_interval": "1s",
            "unhealthy_interval": "1s",
            "unhealthy_threshold": 3,
            "healthy_threshold": 1,
        }
    ],
}


def _server(name: str, url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"{url}: a server's address needs a host and a port")
    address = {"socket_address": {"address": parts.hostname, "port_value": parts.port}}
    return {
        "name": name,
        "type": "STATIC" if _is_ip(parts.hostname) else "STRICT_DNS",
        "connect_timeout": "2s",
        "circuit_breakers": _BREAKERS,
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_API}.extensions.upstreams.http.v3.HttpProtocolOptions",
                "common_http_protocol_options": {"idle_timeout": f"{IDLE_SECONDS}s"},
                "explicit_http_config": {"http_protocol_options": {}},
            }
        },
    }


def _chain(name: str, members: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "connect_timeout": "2s",
        "lb_policy": "CLUSTER_PROVIDED",
        "circuit_breakers": _BREAKERS,
        "cluster_type": {
            "name": "envoy.clusters.aggregate",
            "typed_config": {"@type": f"{_API}.extensions.clusters.aggregate.v3.ClusterConfig", "clusters": members},
        },
    }


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------- routes


def routes(table: Table) -> dict[str, Any]:
    """The routes of a table, as the document that Envoy's RDS reads."""
    found: list[dict[str, Any]] = [
        {"match": {"path": "/healthz"}, "direct_response": {"status": 200, "body": {"inline_string": "ok\n"}}}
    ]
    for name in sorted(table.lines):
        line = table.lines[name]
        if line.champion is None:
            continue
        if line.weight and line.challenger:
            found.append(_split(line, line.champion, line.challenger))
        found.append(_champion_only(line, line.champion))
    missing = {"inline_string": '{"error": "no such pipeline, or no champion serves it yet"}\n'}
    found.append({"match": {"prefix": "/"}, "direct_response": {"status": 404, "body": missing}})
    resource = {
        "@type": f"{_API}.config.route.v3.RouteConfiguration",
        "name": ROUTES,
        "virtual_hosts": [{"name": ROUTES, "domains": ["*"], "routes": found}],
    }
    return _versioned([resource])


def _split(line: Line, champion: Target, challenger: Target) -> dict[str, Any]:
    with_user = {"name": USER, "string_match": {"safe_regex": {"regex": ".+"}}}
    salted = {
        "header_name": USER,
        "regex_rewrite": {"pattern": {"regex": "^(.*)$"}, "substitution": f"\\1:{line.rollout}"},
    }
    sides = [
        {"name": _champion_cluster(line, champion), "weight": 100 - line.weight, **_marks(line, CHAMPION)},
        {"name": chain(challenger, champion), "weight": line.weight, **_marks(line, CHALLENGER)},
    ]
    action = {"weighted_clusters": {"clusters": sides, "use_hash_policy": True}, "hash_policy": [{"header": salted}]}
    return {
        "name": f"{line.pipeline}-split",
        "match": {"prefix": f"/{line.pipeline}/", "headers": [with_user]},
        "route": {**action, **_COMMON},
    }


def _champion_only(line: Line, champion: Target) -> dict[str, Any]:
    mirror: dict[str, Any] = {}
    if line.shadow and line.challenger:
        mirror["request_mirror_policies"] = [{"cluster": plain(line.challenger)}]
    return {
        "name": f"{line.pipeline}-champion",
        "match": {"prefix": f"/{line.pipeline}/"},
        "route": {"cluster": _champion_cluster(line, champion), **mirror, **_COMMON},
        **_marks(line, CHAMPION),
    }


def _champion_cluster(line: Line, champion: Target) -> str:
    return chain(champion, line.standby) if line.standby else plain(champion)


_COMMON: dict[str, Any] = {
    "prefix_rewrite": "/",
    "timeout": "0s",  # a long answer streams for as long as it takes; silence is what is limited
    "idle_timeout": "300s",
    "retry_policy": {
        # A completion changes nothing, so a request whose server died before answering may be asked again, elsewhere.
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
        "retriable_status_codes": [502, 503],
        "num_retries": 4,
        "retry_back_off": {"base_interval": "0.05s", "max_interval": "1s"},
        # A retry goes to the next server of a chain, not to the one that has just failed.
        "retry_priority": {
            "name": "envoy.retry_priorities.previous_priorities",
            "typed_config": {
                "@type": f"{_API}.extensions.retry.priority.previous_priorities.v3.PreviousPrioritiesConfig",
                "update_frequency": 1,
            },
        },
    },
}


def _marks(line: Line, side: str) -> dict[str, Any]:
    marks = {
        "x-refit-pipeline": line.pipeline,
        "x-refit-assigned": side,
        "x-refit-rollout": line.rollout,
        "x-refit-step": str(line.step) if line.rollout else "",
        "x-refit-challenger": line.challenger.release.id if line.challenger else "",
    }
    set_, unset = {k: v for k, v in marks.items() if v}, [k for k, v in marks.items() if not v]
    return {
        "request_headers_to_add": [
            {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
            for key, value in set_.items()
        ],
        "request_headers_to_remove": unset,
    }


def _versioned(resources: list[dict[str, Any]]) -> dict[str, Any]:
    return {"version_info": fingerprint.digest(resources)[:16], "resources": resources}
