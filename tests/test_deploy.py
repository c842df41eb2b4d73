"""The deployment files work: the unit, the container's file and the manifest parse, and their options exist."""

from __future__ import annotations

import configparser
import json
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from rookery.cli import app
from rookery.errors import EXIT_REFUSED
from rookery.server.readiness import PATIENCE_SECONDS
from rookery.settings import TOKEN_VARIABLE, Settings

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "spot-nodes.md").read_text(encoding="utf-8")
OPERATIONS = (DEPLOY.parent / "docs/operations.md").read_text(encoding="utf-8")
MONITORING = {"grafana.json", "alerts.yaml"}
"""Files of deploy/ for other programs than Kubernetes; they are on the page of operations."""

DRAIN = Settings().worker.drain_seconds
"""The longest time of a drain, without sending."""


def worker_options(arguments: list[str]) -> dict[str, Any]:
    """The options of ``rookery worker`` in these arguments. Raises for an unknown one."""
    command = typer.main.get_command(app).commands["worker"]  # type: ignore[attr-defined]
    environment = ["--connect", "http://service"]  # as its variables give it
    return dict(command.make_context("rookery worker", [*environment, *arguments]).params)


def unit() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(DEPLOY / "rookery-worker.service")
    return parsed


@pytest.mark.parametrize("manifest", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: path.name)
def test_manifests_give_each_key_once(manifest: Path) -> None:
    """A parser would take the last of two without a word, or refuse the file."""

    def check(node: yaml.Node) -> None:
        children = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), f"{manifest.name}, line {node.start_mark.line + 1}: {keys}"
            children = [value for _, value in node.value]
        for child in children:
            check(child)

    for document in yaml.compose_all(manifest.read_text(encoding="utf-8"), yaml.SafeLoader):
        check(document)


def test_the_unit_starts_a_preemptible_worker_and_lets_it_drain() -> None:
    service = unit()["Service"]
    program, command, *arguments = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("rookery", "worker")
    options = worker_options(arguments)
    assert options["preemptible"] and options["roles"] == "rollout" and options["price"] > 0
    assert options["cache"] == Path("/var/cache") / service["CacheDirectory"]
    assert float(service["TimeoutStopSec"]) > DRAIN
    assert int(service["RestartPreventExitStatus"]) == EXIT_REFUSED


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "rookery-worker.service").read_text().replace("/opt/rookery/bin/rookery", sys.executable)
    path = tmp_path / "rookery-worker.service"
    path.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
    about = [line for line in (done.stdout + done.stderr).splitlines() if path.name in line]
    assert not about, about


def test_the_containers_first_process_is_the_worker() -> None:
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    steps = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]
    known = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "USER", "STOPSIGNAL", "ENTRYPOINT"}
    assert {name for name, _ in steps} <= known
    by_name = dict(steps)
    assert json.loads(by_name["ENTRYPOINT"]) == ["rookery", "worker"]
    assert "." not in by_name["FROM"].split(":")[0].split("/")[0], "no registry is named"
    assert by_name["USER"] not in ("0", "root")
    given = dict(part.split("=", 1) for part in by_name["ENV"].split())
    assert given["ROOKERY_CACHE"] == by_name["VOLUME"]
    assert {"HOME", "USER", "ROOKERY_DATA"} <= given.keys(), "it runs under any user, also without a name and a home"
    assert all(f" {folder}" in by_name["RUN"] for folder in (given["ROOKERY_CACHE"], given["ROOKERY_DATA"]))
    assert "--mode 1777" in by_name["RUN"]
    for sources in (value.split()[:-1] for name, value in steps if name == "COPY"):
        assert all((ROOT / source).exists() for source in sources)
    assert TOKEN_VARIABLE not in " ".join(value for _, value in steps)


def test_the_manifest_drains_and_its_arguments_are_options() -> None:
    manifest = yaml.safe_load((DEPLOY / "worker.yaml").read_text())
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert manifest["spec"]["selector"]["matchLabels"] == manifest["spec"]["template"]["metadata"]["labels"]
    environment = {entry["name"]: entry for entry in container["env"]}
    assert "value" not in environment[TOKEN_VARIABLE], "the token is a secret's"
    named = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
    assert named <= environment.keys()
    options = worker_options(container["args"])
    assert options["preemptible"] and options["price"] > 0
    assert options["peer_port"] in [port["containerPort"] for port in container["ports"]]
    assert pod["terminationGracePeriodSeconds"] > DRAIN
    (shell, flag, script) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert subprocess.run([shell, "-n", flag, script]).returncode == 0
    assert "kill -TERM 1" in script
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert mounted == re.findall(r"^VOLUME (.+)$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    assert "/" not in container["image"], "no registry is named"


def test_the_hook_ends_with_the_process_that_it_notified(tmp_path: Path) -> None:
    """Its script, for a process of this test instead of process 1."""
    manifest = yaml.safe_load((DEPLOY / "worker.yaml").read_text())
    command = manifest["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    told = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit()); print(1, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", told], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        script = re.sub(r"\b1\b", str(process.pid), command[-1])
        hook = subprocess.Popen([*command[:-1], script], stderr=subprocess.DEVNULL)
        assert process.wait(60) == 0
        assert hook.wait(60) == 0


def test_the_page_agrees_with_the_files() -> None:
    for path in DEPLOY.iterdir():
        assert f"deploy/{path.name}" in (OPERATIONS if path.name in MONITORING else PAGE)
    for name in set(re.findall(r"ROOKERY_([A-Z_]+)", PAGE)) - {"URL", "TOKEN"}:
        assert name.lower() in Settings().flat(), name
    for text in re.findall(r"^ +rookery-worker (--.+)$|rookery worker --connect \S+ (--.+)$", PAGE, re.MULTILINE):
        worker_options(shlex.split("".join(text)))


TEXTS = dict[str, str]
RAY_GROUP = {"rayStartParams": TEXTS, "template": {"spec": dict}}
RAY_CLUSTER = {
    "apiVersion": {"ray.io/v1"}, "kind": {"RayCluster"}, "metadata": {"name": str},
    "spec": {
        "rayVersion": str, "enableInTreeAutoscaling": bool,
        "autoscalerOptions": {"version": {"v1", "v2"}, "idleTimeoutSeconds": int, "env": list},
        "headGroupSpec": RAY_GROUP,
        "workerGroupSpecs": [
            RAY_GROUP | {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, "labels": TEXTS}
        ],
    },
}  # fmt: skip
"""The keys of a RayCluster that the manifest uses, each with its type in KubeRay's custom resource definition v1, which
no package has. A key that is not here is refused: look it up there first. Pods are checked by Kubernetes' schemas."""


def mistakes(found: Any, schema: Any, where: str = "") -> list[str]:
    """The keys and values of ``found`` that ``schema`` does not have."""
    if isinstance(schema, set):
        return [] if found in schema else [f"{where}: {found!r}"]
    if isinstance(schema, list):
        if not isinstance(found, list):
            return [f"{where}: no list"]
        return [line for number, one in enumerate(found) for line in mistakes(one, schema[0], f"{where}[{number}]")]
    if schema == TEXTS:
        right = isinstance(found, dict) and all(isinstance(text, str) for pair in found.items() for text in pair)
        return [] if right else [f"{where}: {found!r}"]
    if not isinstance(schema, dict):
        return [] if type(found) is schema else [f"{where}: {found!r} is no {schema.__name__}"]
    if not isinstance(found, dict):
        return [f"{where}: no mapping"]
    unknown = [f"{where}.{key}: unknown" for key in found.keys() - schema.keys()]
    return unknown + [
        line for key, kind in schema.items() if key in found for line in mistakes(found[key], kind, f"{where}.{key}")
    ]


def test_the_ray_cluster_has_known_keys_with_values_of_their_types() -> None:
    cluster, claim = yaml.safe_load_all((DEPLOY / "raycluster.yaml").read_text(encoding="utf-8"))
    assert mistakes(cluster, RAY_CLUSTER) == [] and claim["kind"] == "PersistentVolumeClaim"
    group = cluster["spec"]["workerGroupSpecs"][0]
    assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (["spec", "autoscalerOptions", "idleTimeout"], 60),
        (["spec", "autoscalerOptions", "version"], "v3"),
        (["spec", "autoscalerOptions", "idleTimeoutSeconds"], "60"),
        (["spec", "workerGroupSpecs", 0, "replicas"], "2"),
        (["spec", "workerGroupSpecs", 0, "replicas"], True),
        (["spec", "workerGroupSpecs", 0, "labels"], {"pool": 1}),
        (["spec", "headGroupSpec", "rayStartParams"], {"num-cpus": 0}),
        (["spec", "headGroupSpec", "replicas"], 1),
        (["spec", "rayVersion"], 2.6),
        (["kind"], "RayJob"),
    ],
)
def test_a_mistake_in_a_ray_cluster_is_found(path: list[Any], wrong: Any) -> None:
    cluster = next(yaml.safe_load_all((DEPLOY / "raycluster.yaml").read_text(encoding="utf-8")))
    part = cluster
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = wrong
    assert len(mistakes(cluster, RAY_CLUSTER)) == 1


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["service.yaml", "worker.yaml", "raycluster.yaml"])
def test_manifests_match_the_schemas_of_kubernetes(name: str) -> None:
    """The pods of a RayCluster are checked as a Deployment's."""
    validate = pytest.importorskip("kubernetes_validate").validate
    documents = list(yaml.safe_load_all((DEPLOY / name).read_text()))
    if name == "raycluster.yaml":
        cluster, *documents = documents
        groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
        labels = {"app": "ray"}
        documents += [
            {
                "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "pod"},
                "spec": {
                    "selector": {"matchLabels": labels},
                    "template": {**group["template"], "metadata": {"labels": labels}},
                },
            }
            for group in groups
        ]  # fmt: skip
    for document in documents:
        validate(document, "1.30", strict=True)


def test_no_worker_of_the_manifests_takes_all_cores_of_its_node() -> None:
    for name in ("service.yaml", "worker.yaml"):
        for pod in pods(list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))):
            (container,) = pod["containers"]
            environment = {entry["name"]: entry.get("value") for entry in container["env"]}
            assert environment["ROOKERY_THREADS"] == container["resources"]["requests"]["cpu"]


def test_workers_dial_the_service_of_the_same_cluster() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "service.yaml").read_text(encoding="utf-8")))
    (service,) = (one for one in documents if one["kind"] == "Service")
    (pod,) = pods([yaml.safe_load((DEPLOY / "worker.yaml").read_text(encoding="utf-8"))])
    environment = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    (port,) = service["spec"]["ports"]
    assert environment["ROOKERY_URL"] == f"http://{service['metadata']['name']}:{port['port']}"


def test_every_container_of_the_ray_cluster_has_its_token() -> None:
    """Also the autoscaler's, which KubeRay adds by itself."""
    spec = next(yaml.safe_load_all((DEPLOY / "raycluster.yaml").read_text(encoding="utf-8")))["spec"]
    containers = [one for pod in pods([spec]) for one in pod["containers"]]
    assert len(containers) == 2
    for container in (*containers, spec["autoscalerOptions"]):
        environment = {entry["name"]: entry for entry in container["env"]}
        assert environment["RAY_AUTH_MODE"]["value"] == "token"
        assert environment["RAY_AUTH_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "rookery-ray", "key": "token"}}


def test_the_ray_cluster_agrees_with_the_settings() -> None:
    spec = next(yaml.safe_load_all((DEPLOY / "raycluster.yaml").read_text()))["spec"]
    assert f"ray=={spec['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()
    label, value = Settings().cluster.ray_spot_label.split("=")
    assert [group["labels"] for group in spec["workerGroupSpecs"]] == [{label: value}]
    assert all(group["template"]["spec"]["terminationGracePeriodSeconds"] > DRAIN for group in spec["workerGroupSpecs"])
    (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    script = head["lifecycle"]["postStart"]["exec"]["command"][-1]
    assert subprocess.run(["/bin/sh", "-n", "-c", script], check=False).returncode == 0
    arguments = re.search(r"rookery serve ([^;]+);", script)
    assert arguments is not None
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert command.make_context("rookery serve", shlex.split(arguments[1])).params["cluster"] == "ray"


def pods(document: Any) -> Iterator[dict[str, Any]]:
    """Every pod's specification in a manifest."""
    if isinstance(document, dict):
        if "containers" in document:
            yield document
        document = list(document.values())
    for part in document if isinstance(document, list) else []:
        yield from pods(part)


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_no_pod_gets_variables_of_services(path: Path) -> None:
    """A Service named rookery would set ROOKERY_PORT=tcp://... in it."""
    found = list(pods(list(yaml.safe_load_all(path.read_text(encoding="utf-8")))))
    assert found or path.name in {"sky.yaml", *MONITORING}
    assert all(pod.get("enableServiceLinks") is False for pod in found)


LONGEST_START = 3600.0
"""Seconds that a start may take, such as with the migration of a large database, before a pod is ended."""


def test_a_container_that_serves_has_its_probes() -> None:
    """Ready and alive are different questions, and the service answers both. Until it does for the first time neither
    is asked, in Kubernetes by default a failure every ten seconds: a start that takes minutes would never end."""
    served = []
    for path in sorted(DEPLOY.glob("*.yaml")):
        for pod in pods(list(yaml.safe_load_all(path.read_text(encoding="utf-8")))):
            for container in pod["containers"]:
                ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
                if Settings().server.port not in ports.values():
                    assert not {"startupProbe", "readinessProbe", "livenessProbe"} & container.keys()
                    continue
                served.append(path.name)
                ready, alive = (container[f"{kind}Probe"]["httpGet"] for kind in ("readiness", "liveness"))
                assert (ready["path"], alive["path"]) == ("/readyz", "/healthz")
                assert {ports[ready["port"]], ports[alive["port"]]} == {Settings().server.port}
                assert container["readinessProbe"]["timeoutSeconds"] > PATIENCE_SECONDS
                start = container["startupProbe"]
                assert start["httpGet"] == alive
                assert start["periodSeconds"] * start["failureThreshold"] >= LONGEST_START
    assert served == ["raycluster.yaml", "service.yaml"]


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_a_manifest_has_the_volumes_that_it_claims(path: Path) -> None:
    """Its folders are writable for a user that is not root; a secret that it names is made by its first lines."""
    text = path.read_text(encoding="utf-8")
    documents = list(yaml.safe_load_all(text))
    claims = {one["metadata"]["name"] for one in documents if one.get("kind") == "PersistentVolumeClaim"}
    for pod in pods(documents):
        claimed = [one["persistentVolumeClaim"] for one in pod.get("volumes", []) if "persistentVolumeClaim" in one]
        assert {one["claimName"] for one in claimed} <= claims
        assert not claimed or pod["securityContext"]["fsGroup"]
        for name in re.findall(r"'secretKeyRef': {'name': '([^']+)'", str(pod)):
            assert f"kubectl create secret generic {name} " in text


def test_the_hook_of_a_ray_node_finds_the_workers_and_not_itself() -> None:
    """Its script, for processes of this test: their command lines have a word of their own."""
    spec = next(yaml.safe_load_all((DEPLOY / "raycluster.yaml").read_text()))["spec"]
    (container,) = spec["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    (shell, flag, script) = container["lifecycle"]["preStop"]["exec"]["command"]
    loop, _, rest = script.partition("sleep 10;")
    assert "[r]ookery.worker.process" in loop and rest.strip() == "ray stop"
    word = f"word{secrets.token_hex(8)}"
    loop = loop.replace("[r]ookery.worker.process", f"[w]{word[1:]}")
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", word]) as process:
        done = subprocess.run(
            [shell, flag, f"{loop} echo end"], capture_output=True, text=True, timeout=60, check=False
        )
        assert process.wait(60) == -signal.SIGTERM
    assert done.stdout == "end\n"
