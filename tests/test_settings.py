"""Settings from variables: which commands they concern, and variables that are none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rookery.errors import UserError
from rookery.settings import (
    CLIENT_SETTINGS,
    FILES,
    HOST_SETTINGS,
    SECTION_OF,
    STORAGE_SETTINGS,
    WORKER_SETTINGS,
    Settings,
    variable_notes,
)

KUBERNETES = {
    "ROOKERY_PORT": "tcp://10.0.0.7:7077",
    "ROOKERY_PORT_7077_TCP": "tcp://10.0.0.7:7077",
    "ROOKERY_PORT_7077_TCP_ADDR": "10.0.0.7",
    "ROOKERY_PORT_7077_TCP_PORT": "7077",
    "ROOKERY_PORT_7077_TCP_PROTO": "tcp",
    "ROOKERY_SERVICE_HOST": "10.0.0.7",
    "ROOKERY_SERVICE_PORT": "7077",
    "ROOKERY_SERVICE_PORT_HTTP": "7077",
}
"""As the kubelet sets them in every container beside a Service named rookery whose port is named http."""

LINKED = {
    "ROOKERY_PORT": "tcp://172.17.0.5:7077",
    "ROOKERY_PORT_7077_TCP_PORT": "7077",
    "ROOKERY_PORT_7077_TCP_START": "tcp://172.17.0.5:7077",
    "ROOKERY_PORT_7077_TCP_PORT_END": "7079",
    "ROOKERY_NAME": "/web/rookery",
    "ROOKERY_ENV_PYTHON_VERSION": "3.11.9",
}
"""As ``docker run --link`` sets them for a container of that name with a range of ports."""


PLATFORMS = pytest.mark.parametrize("platform", [KUBERNETES, LINKED], ids=["kubernetes", "docker"])


@PLATFORMS
def test_variables_of_a_service_named_rookery_are_no_settings(platform: dict[str, str]) -> None:
    assert Settings.load(platform).server.port == 7077
    (note,) = variable_notes(platform)
    assert all(name in note for name in platform) and "enableServiceLinks: false" in note
    assert Settings.load({**platform, "ROOKERY_PORT": "8000"}).server.port == 8000


@PLATFORMS
@pytest.mark.parametrize("service", ["ROOKERY_WORKER", "ROOKERY_RAY_HEAD_SVC", "ROOKERY_DB"])
def test_variables_of_services_whose_name_begins_so_are_no_settings(service: str, platform: dict[str, str]) -> None:
    theirs = {name.replace("ROOKERY", service, 1): value for name, value in platform.items()}
    (note,) = variable_notes(theirs)
    assert "did you mean" not in note and all(name in note for name in theirs)


ADDRESSES = ("url", "public_url", "artifacts_endpoint")


@pytest.mark.parametrize("value", ["tcp://10.0.0.7:9000", "minio:9000", "udp://h:1", "s3://h"])
@pytest.mark.parametrize("name", [*ADDRESSES, "database", "port", "workers", "stop_seconds"])
def test_only_names_of_a_platform_are_left_out_for_their_values(name: str, value: str) -> None:
    """An address in Docker's form in a setting that somebody wrote is a mistake: left out, an object store's would be
    Amazon's, and a database's a file."""
    variable = f"ROOKERY_{name.upper()}"
    if name == "port" and value.startswith(("tcp:", "udp:")):
        assert Settings.load({variable: value}) == Settings.load({})
    elif name == "database":
        assert Settings.load({variable: value}).server.database == value  # a service refuses it
    else:
        with pytest.raises(UserError, match=rf"setting {variable}: given '{value}'"):
            Settings.load({variable: value})


@pytest.mark.parametrize("name", FILES)
def test_a_home_is_found_in_the_name_of_every_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell replaces the ``~`` of a file of variables."""
    monkeypatch.setenv("HOME", "/home/ada")
    variable = f"ROOKERY_{name.upper()}"
    assert Settings.load({variable: "~/a.pem"}).flat()[name] == "/home/ada/a.pem"
    assert Settings.load({variable: "certs/a~.pem"}).flat()[name] == "certs/a~.pem"


def test_unknown_variables_are_named_with_the_closest_setting() -> None:
    assert variable_notes({"ROOKERY_MAX_ROW": "8"}) == ["ROOKERY_MAX_ROW is no setting; did you mean ROOKERY_MAX_ROWS?"]
    assert variable_notes({"ROOKERY_ZZZZZZ": "", "PATH": "x", "ROOKERY_TOKEN": "x", "ROOKERY_DATA": "x"}) == [
        "ROOKERY_ZZZZZZ is no setting"
    ]
    for name, value in (("ROOKERY_NAME", "mine"), ("ROOKERY_ENV_X", "1"), ("ROOKERY_HOST_NAME", "here")):
        assert f"{name} is no setting" in variable_notes({name: value})[0]  # no link's


WRONG = {
    "ROOKERY_RAY_CPUS": "many", "ROOKERY_MAX_ROWS": "-1", "ROOKERY_TRAINER": "none", "ROOKERY_LOG_LEVEL": "LOUD",
    "ROOKERY_PORT": "http", "ROOKERY_SEED_INITIAL_SECONDS": "x", "ROOKERY_JSON_BYTES": "1 MB",
}  # fmt: skip
"""A wrong value in every part of the settings."""


@pytest.mark.parametrize(
    ("uses", "fails"),
    [
        (CLIENT_SETTINGS, {"ROOKERY_PORT"}),
        (WORKER_SETTINGS, {"ROOKERY_MAX_ROWS", "ROOKERY_TRAINER", "ROOKERY_LOG_LEVEL"}),
        (HOST_SETTINGS, {"ROOKERY_LOG_LEVEL"}),
        (STORAGE_SETTINGS, set()),
        (None, set(WRONG)),
    ],
)
def test_wrong_values_fail_only_commands_that_use_them(uses: tuple[str, ...] | None, fails: set[str]) -> None:
    for name, value in WRONG.items():
        if name in fails:
            with pytest.raises(UserError, match=name):
                Settings.load({name: value}, uses=uses)
        else:
            Settings.load({name: value}, uses=uses)


@pytest.mark.parametrize("value", ["a\nb", "a\x1b[2J", "a\u2028b", "a\x00b"])
def test_a_site_is_one_line_of_printable_characters(value: str) -> None:
    assert Settings.load({"ROOKERY_SITE": "Frankfurt am Main\n"}).worker.site == "Frankfurt am Main"
    with pytest.raises(
        UserError, match=r"setting ROOKERY_SITE: given .*, printable characters, in one line$"
    ) as refused:
        Settings.load({"ROOKERY_SITE": value})
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("value", ["inf", "nan", "1e400"])
@pytest.mark.parametrize("name", ["ROOKERY_STOP_SECONDS", "ROOKERY_TENANT_REQUESTS_PER_SECOND"])
def test_numbers_are_finite(name: str, value: str) -> None:
    with pytest.raises(UserError, match=name):
        Settings.load({name: value})


def test_address_makes_host_and_port_needless_for_clients() -> None:
    settings = Settings.load({"ROOKERY_PORT": "x", "ROOKERY_URL": "http://a:1"}, uses=CLIENT_SETTINGS)
    assert settings.base_url == "http://a:1"


def test_uses_name_fields_and_sections() -> None:
    named = {*CLIENT_SETTINGS, *WORKER_SETTINGS, *HOST_SETTINGS, *STORAGE_SETTINGS}
    assert named <= {"data", "cache", *SECTION_OF, *SECTION_OF.values()}


@pytest.mark.parametrize(
    "command",
    [["doctor"], ["worker", "--connect", "http://127.0.0.1:9"], ["backup", "{folder}/b"], ["jobs", "list"]],
    ids=lambda command: command[0],
)
def test_commands_run_next_to_a_service_named_rookery(tmp_path: Path, command: list[str]) -> None:
    """None of them fails by a variable that Kubernetes sets."""
    environment = {**KUBERNETES, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "ROOKERY_TOKEN": "x"}
    program = "import sys; from rookery.cli import main; main(sys.argv[1:])"
    arguments = [part.format(folder=tmp_path) for part in command]
    environment["PYTHONPATH"] = ":".join(sys.path)
    running = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with running:
        if command[0] == "worker":  # it dials again and again
            assert running.stderr is not None
            said = b""
            while b"no connection" not in said and (line := running.stderr.readline()):
                said += line
            running.terminate()
            shown, rest = running.communicate(timeout=60)
            said += rest
            assert b"no connection to ws://127.0.0.1:9/" in said and shown == b""
            (named,) = [line for line in said.splitlines() if b"ROOKERY_PORT" in line]
            assert named.startswith(b"ignored: ROOKERY_PORT, ") and running.returncode == 0
        else:
            said = b"".join(running.communicate(timeout=60))
    assert b"setting ROOKERY_PORT" not in said
    if command[0] in ("doctor", "worker"):
        assert b"enableServiceLinks" in said


def test_fields_are_taken_in_any_order_with_a_section_of_the_same_name() -> None:
    given = {"ROOKERY_RAY_SPOT_WORKERS": "2", "ROOKERY_CLUSTER": "ray", "ROOKERY_RAY_CPUS": "3"}
    for settings in (
        Settings.load(given),
        Settings.load(dict(reversed(given.items()))),
        Settings.load({"ROOKERY_RAY_SPOT_WORKERS": "2", "ROOKERY_RAY_CPUS": "3"}, cluster="ray"),
        Settings(ray_spot_workers=2, cluster="ray", ray_cpus=3),  # type: ignore[arg-type]
        Settings.load({"ROOKERY_RAY_SPOT_WORKERS": "2"}).replace(cluster="ray", ray_cpus=3),
    ):
        cluster = settings.cluster
        assert (cluster.cluster, cluster.ray_spot_workers, cluster.ray_cpus) == ("ray", 2, 3)


@pytest.mark.parametrize("space", [" {} ", "{}\n", "\t{}", "{}\r\n"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("url", "http://h:1"), ("host", "::1"), ("port", "7078"), ("data", "/srv/data"), ("log_level", "INFO"),
        ("inference_engine", "auto"), ("artifacts_url", "s3://b/p"), ("memory_bytes", "1000000000"),
    ],
)  # fmt: skip
def test_white_space_around_a_variable_means_nothing(name: str, value: str, space: str) -> None:
    variable = f"ROOKERY_{name.upper()}"
    assert Settings.load({variable: space.format(value)}).flat()[name] == Settings.load({variable: value}).flat()[name]
