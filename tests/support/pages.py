"""Support for the tests of the page: a service with runs of every kind, and its views."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from tests.support.faces import ThreadedWorker, job, served
from tests.support.waiting import PATIENCE_SECONDS, until

from rookery.client import Client, Job
from rookery.server.launcher import EmbeddedService

CHROMIUM = Path("/usr/bin/chromium")

WAIT = 1000 * PATIENCE_SECONDS
"""Milliseconds after which a test that waits for something on the page gives up."""

MARKUP = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>&lt;b&gt;"
"""Text of a prompt, a name or an error that would take over a page which shows it as markup."""


class Broken(BaseHTTPRequestHandler):
    """A server of metrics that answers every request with an error, whose text is markup."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(500)
        self.send_header("Content-Length", str(len(MARKUP)))
        self.end_headers()
        self.wfile.write(MARKUP.encode())

    def log_message(self, *arguments: Any) -> None:
        pass


class Town:
    """A service with a worker, two tenants, and finished jobs of the first, one of which writes to a broken server."""

    def __init__(self, service: EmbeddedService, admin: Client, sink: str) -> None:
        self.service = service
        self.sink = sink
        self.keys = {}
        for name in ("ada", "bob"):
            admin.add_tenant(name)
            self.keys[name] = str(admin.add_key(name).key)
        self.ada = Client(service.url, self.keys["ada"])
        self.bob = Client(service.url, self.keys["bob"])
        rows = [{"prompt": f"{MARKUP} {a}+{a}?", "answer": "4"} for a in range(8)]
        environment = {"id": "jsonl", "rows": rows[:6], "eval_rows": rows[6:], "verifier": "exact"}
        algorithm = {"group_size": 4, "groups_per_step": 3}
        self.done: Job = self.ada.submit(
            job(name="sums", environment=environment, algorithm=algorithm, evaluation={"prompts": 2, "every": 2},
                stop={"steps": 6})
        )  # fmt: skip
        assert self.done.wait().state == "completed"
        self.driven, self.episodes = self._driven()
        self.judged = self._judged()
        self.long = self._long()

    def _driven(self) -> tuple[Job, list[str]]:
        """A job of an agent whose texts are all markup: one episode fails, two have a branch and end well."""
        environment = {"id": "agent", "rows": [{"prompt": MARKUP}] * 2}
        driven = self.ada.submit(
            job(name="driven", environment=environment, metadata={"note": MARKUP}, stop={"steps": 1},
                algorithm={"group_size": 2, "groups_per_step": 1}, sinks=[{"url": self.sink}])
        )  # fmt: skip
        path, bearer = (
            f"{self.service.url}/api/v1/jobs/{driven.id}/episodes",
            {"Authorization": f"Bearer {self.keys['ada']}"},
        )
        until(lambda: driven.show().state == "running")
        ended: list[str] = []
        with httpx.Client(headers=bearer, timeout=60) as http:
            failed = until(lambda: http.post(path, json={"wait": 30}).json()["episode"])
            http.post(f"{path}/{failed}/fail", json={"reason": MARKUP}).raise_for_status()
            while (opened := http.post(path, json={"wait": 30})).status_code == 200:
                one = opened.json()
                if one["episode"] is None:
                    continue
                for messages in ([MARKUP], [MARKUP, "4", MARKUP], ["another"]):
                    said = [
                        {"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(messages)
                    ]
                    asked = {"model": "main", "messages": said, "temperature": 0.5 if len(messages) == 1 else 1.0}
                    key = {"Authorization": f"Bearer {one['key']}"}
                    http.post(f"{one['base_url']}/chat/completions", json=asked, headers=key).raise_for_status()
                about = {"reward": float(len(ended) % 2), "metrics": {MARKUP[:60]: 1.0}}
                if http.post(f"{path}/{one['episode']}/finish", json=about).is_success:
                    ended.append(one["episode"])
        assert driven.wait().state == "completed"
        return driven, [failed, *ended]

    def _long(self) -> Job:
        """A job whose name, prompt and answer are long and have no place to break."""
        rows = [{"prompt": "prompt" * 60, "answer": "answer" * 60}] * 4
        job_of_it = job(name="long" * 25, environment={"id": "jsonl", "rows": rows, "verifier": "exact"})
        long = self.ada.submit(job_of_it)
        assert long.wait().state == "completed"
        return long

    def _judged(self) -> Job:
        """A job with two policies and a grader whose prompt is markup."""
        rows = [{"prompt": f"{MARKUP} {a}?", "answer": "4"} for a in range(4)]
        verifier = {"name": "judge", "policy": "judge", "prompt": MARKUP + " Is it {answer}?", "scale": 4}
        policies = {"solver": {"rank": 4, "targets": ["q"]}, "judge": {"train": False, "base": True}}
        judged = self.ada.submit(
            job(name="judged", environment={"id": "jsonl", "rows": rows, "verifier": verifier}, policies=policies)
        )
        assert judged.wait().state == "completed"
        return judged


@contextmanager
def opened(folder: Path) -> Iterator[Town]:
    """A town that ends with the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as broken:
        threading.Thread(target=broken.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{broken.server_port}"
        with (
            served(folder, reachable_hosts=address) as service,
            ThreadedWorker.of(service),
            Client(service.url, service.key) as admin,
        ):
            yield Town(service, admin, f"http://{address}")
        broken.shutdown()


@contextmanager
def endless(town: Town, name: str) -> Iterator[Job]:
    """A run that takes steps until the block ends, however slow the machine is."""
    running = town.ada.submit(job(name=name, stop={"steps": 99_999}))
    try:
        yield running
    finally:
        running.cancel()


READS = """{
  const reads = window.reads = { asked: {}, address: location.hash }, { fetch } = window;
  addEventListener("hashchange", () => { Object.assign(reads, { asked: {}, address: location.hash }); });
  window.fetch = async (...request) => {
    const one = reads.asked[request[0]] ??= { open: 0, answered: false };
    one.open += 1;
    try {
      const answer = await fetch(...request);
      await answer.clone().arrayBuffer();
      one.answered = true;
      return answer;
    } finally { one.open -= 1; }
  };
}"""
"""Notes what a view asks for, and whether it was answered to the last byte; a stream of events is no request."""

SETTLED = """async (patience) => {
  const deadline = performance.now() + patience;
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const reads = () => {
    const { asked, address } = window.reads, shown = document.querySelector("main")?.textContent ?? "Loading …";
    const all = Object.values(asked), waits = all.some((one) => one.open > 0 && !one.answered);
    return waits || address !== location.hash || shown.includes("Loading …") ? null : all.length;
  };
  for (let frames = 0, before = null; frames < 5;) {
    await frame();
    const now = reads();
    frames = now !== null && now === before ? frames + 1 : 0;
    before = now;
    if (performance.now() > deadline) throw new Error("the page does not settle");
  }
}"""
"""An answer is drawn at once, and what is read after it begins in the frame after that. What is asked again, as
every two seconds, was shown before."""


def new_context(browser: Any, **options: Any) -> Any:
    """A context whose pages :func:`settle`."""
    context = browser.new_context(**options)
    context.set_default_timeout(WAIT)
    context.add_init_script(READS)
    return context


def settle(page: Any) -> None:
    """Return when the page shows the view of its address with everything that the view reads."""
    page.evaluate(SETTLED, WAIT)


def show(page: Any, town: Town, view: str) -> None:
    """Open a view, and return when it shows everything that it reads."""
    page.goto(f"{town.service.url}/#/{view}")
    settle(page)


def sign_in(page: Any, town: Town, who: str) -> None:
    page.goto(town.service.url)
    page.fill("#key", town.keys[who])
    page.click("button.main")
    page.wait_for_selector("header.top")


def sign_out(page: Any) -> None:
    """Return when the service has answered: a page that is left earlier takes the request with it."""
    page.click("text=Sign out")
    page.wait_for_selector("#key")


def views(town: Town) -> list[str]:
    return [
        *others_of(town),
        *of_run(town.done),
        *of_run(town.long),
        f"run/{town.judged.id}",
        f"new?from={town.driven.id}",
    ] + [f"run/{town.driven.id}/episode/{episode}" for episode in town.episodes[:2]]


def others_of(town: Town) -> list[str]:
    return ["runs", "new", "chat", "timeline", "usage", "fleet", "tenants", f"compare/{town.done.id}/{town.judged.id}"]


def of_run(job: Job) -> list[str]:
    group = job.groups()[0].group
    inside = ["", "/steps", "/step/1", f"/group/{group}", f"/episode/{group}-0", "/episodes?text=fiv", "/events"]
    return [f"run/{job.id}{one}" for one in [*inside, "/timeline", "/episodes?failed=true"]]
