"""A small real server that takes vLLM's command line and speaks its API: what the serving tests put behind Envoy.

It stands where REFIT_COMPUTE_PYTHON points, so the command line that it is given is the one that vLLM would get. How
good, fast and reliable it is stands in `behaviour.json` of its model folder: {"accuracy", "seconds", "error_rate"}. The
right answer to "Ticket 7: refund" is {"intent": "refund"}. A stream pauses in the middle until there is a file `go`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


class Model:
    def __init__(self, folder: Path, names: list[str]) -> None:
        self.names = names
        self.folder = folder
        self.tokens = 0
        self.running = 0

    def behaviour(self) -> dict[str, float]:
        found: dict[str, float] = json.loads((self.folder / "behaviour.json").read_text())
        return found

    async def answer(self, question: str) -> tuple[int, str]:
        behaviour = self.behaviour()
        self.running += 1
        try:
            await asyncio.sleep(behaviour["seconds"])
        finally:
            self.running -= 1
        self.tokens += 5
        if luck("error", question) < behaviour["error_rate"]:
            return 500, ""
        right = question.rpartition(": ")[2]
        return 200, json.dumps({"intent": right if luck("right", question) < behaviour["accuracy"] else "nonsense"})


def luck(kind: str, question: str) -> float:
    return int.from_bytes(hashlib.sha256(f"{kind}{question}".encode()).digest()[:4], "big") / 2**32


def application(model: Model) -> Starlette:
    async def chat(request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        if body["model"] not in model.names:
            return JSONResponse({"error": f"no model {body['model']}"}, 404)
        status, text = await model.answer(body["messages"][-1]["content"])
        if status != 200:
            return JSONResponse({"error": "it happens"}, status)
        if body.get("stream"):
            return StreamingResponse(events(text), media_type="text/event-stream")
        return JSONResponse({"model": body["model"], "choices": [{"message": {"role": "assistant", "content": text}}]})

    async def completions(request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        model.tokens += 1
        return JSONResponse({"model": body["model"], "choices": [{"text": "yes"}]})

    async def events(text: str) -> AsyncIterator[str]:
        yield f"data: {json.dumps({'choices': [{'delta': {'content': text[:5]}}]})}\n\n"
        while not (model.folder / "go").exists():
            await asyncio.sleep(0.05)
        yield f"data: {json.dumps({'choices': [{'delta': {'content': text[5:]}}]})}\n\ndata: [DONE]\n\n"

    async def health(request: Request) -> Response:
        return Response()

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": name} for name in model.names]})

    async def metrics(request: Request) -> Response:
        numbers = {"generation_tokens_total": model.tokens, "num_requests_running": model.running}
        return PlainTextResponse("".join(f'vllm:{name}{{model="x"}} {value}\n' for name, value in numbers.items()))

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ]
    )


def main(argv: list[str]) -> None:
    assert argv[:2] == ["-m", "vllm.entrypoints.openai.api_server"], argv
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--served-model-name", nargs="+", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--middleware", required=True)
    given, _ = parser.parse_known_args(argv[2:])
    made = application(Model(given.model, given.served_model_name))
    module, _, name = given.middleware.rpartition(".")
    made.add_middleware(getattr(importlib.import_module(module), name))
    uvicorn.run(made, host=given.host, port=given.port, log_level="warning", timeout_graceful_shutdown=20)


if __name__ == "__main__":
    main(sys.argv[1:])
