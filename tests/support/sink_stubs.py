"""Servers that keep what sinks of jobs send them, as Weights & Biases and trackio do."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class SinkStub(ThreadingHTTPServer):
    """While ``broken`` it answers 500 and repeats the headers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.broken = False
        self.seen: list[tuple[str, Any]] = []
        """Every path and body, in order."""
        self.headers: list[dict[str, str]] = []

    def answer(self, path: str, body: Any) -> Any:
        raise NotImplementedError

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that no longer waits is no fault."""


class WandbStub(SinkStub):
    """Runs by name: configuration, the lines of the history by number, summary, whether it is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, dict[str, Any]] = {}

    def answer(self, path: str, body: Any) -> Any:
        if path != "/graphql":
            run = self.runs[path.split("/")[-2]]
            for name, part in body.get("files", {}).items():
                if name == "wandb-history.jsonl":
                    lines = [json.loads(line) for line in part["content"]]
                    run["history"] |= dict(enumerate(lines, part["offset"]))
                elif name == "wandb-summary.json":
                    run["summary"] = json.loads(part["content"][-1])
            if body.get("complete"):
                run["exitcode"] = body["exitcode"]
            return {}
        query, given = body["query"], body.get("variables") or {}
        if "upsertBucket" in query:
            run = self.runs.setdefault(given["name"], {"history": {}, "summary": {}, "config": {}})
            run["config"] |= json.loads(given.get("config") or "{}")
            entity = given.get("entity") or "ada"
            project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": entity}}
            bucket = {"id": "b", "name": given["name"], "displayName": given.get("displayName"), "project": project}
            bucket |= {"historyLineCount": len(run["history"]), "config": "{}"}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "RunResumeStatus" in query:
            run = self.runs.get(given["name"])
            if run is None:
                return {"data": {"model": None}}
            bucket = {"summaryMetrics": json.dumps(run["summary"]), "historyLineCount": len(run["history"])}
            return {"data": {"model": {"bucket": bucket}}}
        if "viewer" in query:
            return {"data": {"viewer": {"id": "x", "entity": "ada", "username": "ada", "flags": "{}",
                                        "teams": {"edges": []}}}}  # fmt: skip
        if "createRunFiles" in query:
            return {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}}
        return {"data": {}}


class TrackioStub(SinkStub):
    """Rows by their ids, the first of each kept; alerts likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, dict[str, Any]] = {}
        self.alerts: dict[str, dict[str, Any]] = {}

    def answer(self, path: str, body: Any) -> Any:
        given = body["kwargs"]
        if path == "/api/get_run_summary":
            steps = [row["step"] for row in self.rows.values() if row["run_id"] == given["run_id"]]
            return {"data": {"last_step": max(steps, default=None)}}
        for row in given.get("logs", []):
            self.rows.setdefault(row["log_id"], row)
        for alert in given.get("alerts", []):
            self.alerts.setdefault(alert["alert_id"], alert)
        return {"data": None}


@contextmanager
def serving(stub: SinkStub) -> Iterator[None]:
    threading.Thread(target=stub.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        stub.shutdown()
        stub.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: SinkStub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        given = json.loads(body)
        self.server.seen.append((self.path, given))
        self.server.headers.append(dict(self.headers))
        if self.server.broken:
            self._reply(500, f"broken: {dict(self.headers)}".encode())
        else:
            self._reply(200, json.dumps(self.server.answer(self.path, given)).encode())

    def do_GET(self) -> None:
        self._reply(200, b"{}")

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass
