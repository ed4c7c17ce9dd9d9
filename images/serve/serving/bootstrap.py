"""Envoy's bootstrap: what does not change while the gateway runs. Routes and clusters come from files it watches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serving.routes import ROUTES
from serving.settings import HOST

_API = "type.googleapis.com/envoy"

ACCESS_LOG = "access.jsonl"

LOGGED = {
    # What the recorder makes an exposure from. The user's id is here in the clear; the recorder keeps a salted hash
    # and deletes the file behind it.
    "at": "%START_TIME(%Y-%m-%dT%H:%M:%S.%3fZ)%",
    "method": "%REQ(:METHOD)%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "user": "%REQ(X-USER-ID)%",
    "pipeline": "%REQ(X-REFIT-PIPELINE)%",
    "assigned": "%REQ(X-REFIT-ASSIGNED)%",
    "rollout": "%REQ(X-REFIT-ROLLOUT)%",
    "step": "%REQ(X-REFIT-STEP)%",
    "challenger": "%REQ(X-REFIT-CHALLENGER)%",
    "release": "%RESP(X-REFIT-RELEASE)%",
    "status": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "why": "%RESPONSE_CODE_DETAILS%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "host": "%UPSTREAM_HOST%",
    "milliseconds": "%DURATION%",
    "first_byte_milliseconds": "%RESPONSE_DURATION%",
}


def bootstrap(folder: Path, log: Path, port: int, admin_port: int) -> str:
    """The bootstrap document, as JSON (which YAML reads).

    Args:
        folder: where `cds.json` and `rds.json` lie; each is replaced by rename.
        log: the access log's file.
    """
    document = {
        "node": {"id": "refit", "cluster": "refit"},
        "admin": {"address": _address(admin_port)},
        "dynamic_resources": {"cds_config": _watched(folder, "cds.json")},
        "static_resources": {"listeners": [_listener(folder, log, port)]},
    }
    return json.dumps(document, indent=1) + "\n"


def _listener(folder: Path, log: Path, port: int) -> dict[str, Any]:
    manager = {
        "@type": f"{_API}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "codec_type": "AUTO",
        "use_remote_address": True,
        # Users name their requests, since feedback comes by that name; who gives none is told ours.
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "request_id_extension": {
            "typed_config": {
                "@type": f"{_API}.extensions.request_id.uuid.v3.UuidRequestIdConfig",
                "pack_trace_reason": False,
            }
        },
        "stream_idle_timeout": "300s",
        "rds": {"route_config_name": ROUTES, "config_source": _watched(folder, "rds.json")},
        "access_log": [
            {
                "name": "envoy.access_loggers.file",
                "filter": {
                    "header_filter": {"header": {"name": "x-refit-pipeline", "present_match": True}},
                },
                "typed_config": {
                    "@type": f"{_API}.extensions.access_loggers.file.v3.FileAccessLog",
                    "path": str(log),
                    "log_format": {"json_format": LOGGED},
                },
            }
        ],
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": f"{_API}.extensions.filters.http.router.v3.Router",
                    "suppress_envoy_headers": True,
                },
            }
        ],
    }
    return {
        "name": "gateway",
        "address": _address(port),
        # A request is asked again only if the whole of it is still here; the default of 1 MiB cuts long prompts short.
        "per_connection_buffer_limit_bytes": 4 << 20,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def _watched(folder: Path, name: str) -> dict[str, Any]:
    return {
        "resource_api_version": "V3",
        "path_config_source": {"path": str(folder / name), "watched_directory": {"path": str(folder)}},
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": HOST, "port_value": port}}
