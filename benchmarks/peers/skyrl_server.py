"""SkyRL's Tinker server on JAX's CPU backend.

    python skyrl_server.py PORT MODEL FOLDER

Two things differ from its own entry point. That one starts the engine with ``uv run``, which would look for
SkyRL's source tree: here both processes run in this interpreter's environment. And on Python 3.11 its schemas need
``typing_extensions.TypedDict`` where they name ``typing``'s.
"""

from __future__ import annotations

import runpy
import sys
import typing

import typing_extensions

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict

ENGINE = "engine"
SETTINGS = {"max_lora_adapters": 12, "max_lora_rank": 8}


def serve(port: int, model: str, folder: str) -> None:
    import uvicorn
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, config_to_argv

    def command(parent: list[str], config: EngineConfig) -> list[str]:
        return [sys.executable, __file__, ENGINE, *config_to_argv(config)]

    api._build_uv_run_cmd_engine = command
    api.app.state.engine_config = EngineConfig.model_validate(
        {
            "base_model": model,
            "backend": "jax",
            "backend_config": SETTINGS,
            "checkpoints_base": f"{folder}/checkpoints",
            "database_url": f"sqlite:///{folder}/tinker.db",
        }
    )
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    if sys.argv[1] == ENGINE:
        sys.argv[:2] = ["skyrl.tinker.engine"]
        runpy.run_module("skyrl.tinker.engine", run_name="__main__")
    else:
        serve(int(sys.argv[1]), *sys.argv[2:])
