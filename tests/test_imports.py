"""Light rooms stay light: each room is imported in a process of its own, and the imported modules are checked."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "safetensors.torch", "peft")
SERVER = ("fastapi", "uvicorn", "sqlalchemy", "rich", "typer", "httpx", "pydantic", "numpy")


def loaded_by(code: str) -> set[str]:
    """The modules that ``code`` leaves loaded."""
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules, sep=chr(10))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(shown.stdout.split())


def test_import_rookery_loads_nothing_of_weight() -> None:
    loaded = loaded_by("import rookery")
    assert not loaded & {*HEAVY, *SERVER}
    assert {name for name in loaded if name.startswith("rookery")} == {"rookery"}


def test_every_public_name_is_there() -> None:
    loaded = loaded_by(
        "import rookery\nfor name in rookery.__all__: getattr(rookery, name)\n"
        "assert set(rookery.__all__) <= set(dir(rookery))\n"
        "assert not hasattr(rookery, 'Nothing')"
    )
    assert not loaded & {*HEAVY, "fastapi", "uvicorn", "sqlalchemy"}


def test_an_environment_imports_only_its_room() -> None:
    assert not loaded_by("import rookery; rookery.Environment; rookery.Step") & {*HEAVY, *SERVER}


LIGHT = (
    "algorithms.advantages", "algorithms.schedules", "cli", "client", "cluster.local", "controller.controller",
    "environments.host", "scheduling.balancing", "server.launcher", "simulation.replay", "spec.job", "storage.db",
    "telemetry.metrics", "tokenization.chat", "protocol",
)  # fmt: skip


def test_no_room_but_the_worker_imports_torch() -> None:
    imports = "\n".join(f"import rookery.{room}\nassert not {HEAVY}[0] in sys.modules, 'by {room}'" for room in LIGHT)
    assert not loaded_by(f"import sys\n{imports}") & set(HEAVY)


def test_a_worker_starts_without_the_compiler() -> None:
    """It would be a third of a worker's start, and no processor's path runs it."""
    loaded = loaded_by("import rookery.worker.process")
    assert not loaded & {"torch._dynamo", "torch._inductor", "sympy", "transformers"}


def test_the_command_line_starts_without_the_server() -> None:
    loaded = loaded_by("from rookery.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass")
    assert not loaded & {*HEAVY, "fastapi", "uvicorn", "sqlalchemy"}


def test_only_modules_that_run_a_service_import_it() -> None:
    rooms = "rookery.controller.controller, rookery.client, rookery.environments.host, rookery.cluster.local"
    assert not {name for name in loaded_by(f"import {rooms}") if name.startswith("rookery.server")}
