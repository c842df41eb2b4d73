"""Base models made ready: what the prepared folder computes is what the published one computes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.families import small_config
from tests.support.forked import ForkedProcess
from tests.support.processes import alive
from tests.support.small_model import save_small_model
from tests.support.tiny import FAMILIES, reference, smollm2_folder
from tests.support.waiting import until
from tests.worker.model.test_decoder import logits
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rookery.errors import EXIT_REFUSED, Unavailable, UserError
from rookery.network import PROXY_VARIABLES
from rookery.server.base_models import BaseModels
from rookery.tokenization import registry
from rookery.worker.model.convert import main, prepare
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.published import export, published
from rookery.worker.model.transformers_model import TransformersModel


def publish(folder: Path, family: str, shard: str = "5GB") -> transformers.PreTrainedModel:
    """A model folder as transformers writes it, its weights rounded to bfloat16."""
    model = reference(family)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    model.save_pretrained(folder, max_shard_size=shard)
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_local_folder(tmp_path: Path, family: str) -> None:
    model = publish(tmp_path / "published", family, "100KB" if family == "llama" else "5GB")
    folder = prepare(str(tmp_path / "published"), tmp_path / "cache")
    assert folder == registry.model_folder(tmp_path / "cache", str(tmp_path / "published"))
    assert {registry.CONFIG, "tokenizer.json", registry.WEIGHTS, "rookery.json"} <= {p.name for p in folder.iterdir()}
    mark = json.loads((folder / "rookery.json").read_text())
    assert mark["hash"] == hashlib.sha256((folder / registry.WEIGHTS).read_bytes()).hexdigest()
    assert mark["model_type"] == FAMILIES[family].model_type
    tokens = torch.randint(0, 211, (31,))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(logits(Decoder.load(folder, torch.float32), tokens), expected, atol=1e-4, rtol=1e-4)
    assert registry.status(tmp_path / "cache", str(tmp_path / "published")).state == "prepared"


def test_a_prepared_folder_is_not_taken_for_a_published_one(tmp_path: Path) -> None:
    """Nor does transformers make a model of its family from the folder's name."""
    for family in ("llama", "qwen3"):
        publish(tmp_path / family, family)
        folder = prepare(str(tmp_path / family), tmp_path / "cache")
        assert not {"config.json", "model.safetensors"} & {path.name for path in folder.iterdir()}
        for loads in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM, transformers.AutoModel):
            with pytest.raises((ValueError, OSError)):
                loads.from_pretrained(folder)
        with pytest.raises(UserError, match=rf"prepared for Rookery from {tmp_path / family}; give .* --export FOLDER"):
            prepare(str(folder), tmp_path / "cache")
        assert "--export" in registry.status(tmp_path / "cache", str(folder)).reason


@pytest.mark.parametrize("family", ["llama tied", "qwen3", "qwen3_moe", "gemma3_text"])
def test_the_exported_model_is_the_published_one(tmp_path: Path, family: str) -> None:
    if family in FAMILIES:
        model = publish(tmp_path / "published", family)
    else:
        save_small_model(tmp_path / "published", 0, small_config(family))
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published", dtype=torch.float32)
        for weight in model.parameters():
            weight.data = weight.data.bfloat16().float()
    folder = prepare(str(tmp_path / "published"), tmp_path / "cache")
    export(folder, tmp_path / "deep" / "exported")
    tokens = torch.randint(0, 97, (1, 31))
    for made in (tmp_path / "deep" / "exported", published(folder)):
        assert (made / "tokenizer.json").is_file()
        loaded, found = transformers.AutoModelForCausalLM.from_pretrained(
            made, dtype=torch.float32, output_loading_info=True
        )
        assert not found["missing_keys"] and not found["unexpected_keys"]
        with torch.no_grad():
            given, expected = loaded.eval()(tokens).logits, model.eval()(tokens).logits
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)
    assert not (tmp_path / "deep" / "exported" / "model.safetensors").is_symlink()
    with pytest.raises(UserError, match=r"--export: .* exists; give a new folder"):
        export(folder, tmp_path / "deep" / "exported")
    with pytest.raises(UserError, match=r"--export: .* cannot be written"):
        export(folder, tmp_path / "published" / "config.json" / "deeper")
    assert registry.inspect(tmp_path / "deep" / "exported").model_type == registry.inspect(folder).model_type


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_projections_of_a_prepared_model_are_recorded(tmp_path: Path, family: str) -> None:
    folder = tmp_path / "published"
    assert registry.projections(tmp_path / "cache", str(save_small_model(folder, 0, small_config(family)))) is None
    prepared = prepare(str(folder), tmp_path / "cache")
    recorded = registry.projections(tmp_path / "cache", str(folder))
    model = TransformersModel.load(prepared).projections
    assert recorded is not None
    assert (dict(recorded.shapes), recorded.prefix) == (dict(model.shapes), model.prefix)


def test_prepared_once_by_several_processes(tmp_path: Path) -> None:
    publish(tmp_path / "published", "llama")
    with ProcessPoolExecutor(3) as pool:
        folders = set(pool.map(prepare, [str(tmp_path / "published")] * 3, [tmp_path / "cache"] * 3))
    (folder,) = folders
    written = (folder / "rookery.json").stat().st_mtime_ns
    assert prepare(str(tmp_path / "published"), tmp_path / "cache") == folder
    assert (folder / "rookery.json").stat().st_mtime_ns == written
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name, folder.name + ".lock"]


def test_requests_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(UserError, match="no model is called"):
        prepare("no-such-model", cache)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        prepare(str(tmp_path / "empty"), cache)
    publish(tmp_path / "odd", "llama")
    about = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**about, "model_type": "gpt2"}))
    with pytest.raises(UserError, match="GPT2LMHeadModel has no linear modules"):
        prepare(str(tmp_path / "odd"), cache)
    publish(tmp_path / "cut", "llama")
    weights = load_file(tmp_path / "cut" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "cut" / "model.safetensors")
    with pytest.raises(UserError, match=r"lack model\.norm\.weight"):
        prepare(str(tmp_path / "cut"), cache)
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be read"):
        prepare(str(tmp_path / "cut"), cache)
    assert not [p for p in (cache / "prepared").iterdir() if p.suffix != ".lock"]


def test_the_module_prints_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path / "published", "llama")
    main([str(tmp_path / "published"), "--cache", str(tmp_path / "cache")])
    assert Path(capsys.readouterr().out.strip()).is_dir()
    with pytest.raises(SystemExit) as refusal:
        main(["no-such-model", "--cache", str(tmp_path / "cache")])
    assert refusal.value.code == EXIT_REFUSED
    assert "no model is called" in capsys.readouterr().err


def test_files_of_a_killed_attempt_are_removed(tmp_path: Path) -> None:
    publish(tmp_path / "published", "llama")
    folder = registry.model_folder(tmp_path / "cache", str(tmp_path / "published"))
    began = ForkedProcess(KILLED, [str(tmp_path / "published"), str(tmp_path / "cache")], dict(os.environ))
    began.communicate(60)
    assert began.wait() == -signal.SIGKILL
    assert any(path.is_dir() for path in folder.parent.iterdir())
    assert prepare(str(tmp_path / "published"), tmp_path / "cache") == folder
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]


KILLED = """
import os, sys
from pathlib import Path
from rookery.worker.model import convert
convert.save_file = lambda *_, **__: os.kill(os.getpid(), 9)
convert.prepare(sys.argv[1], Path(sys.argv[2]))
"""
"""A preparation that is killed when it comes to writing the weights."""

SERVICE = """
import asyncio, pathlib, sys
from rookery.server.base_models import BaseModels
asyncio.run(BaseModels(pathlib.Path(sys.argv[2])).chat(sys.argv[1]))
"""
"""As much of a service as prepares a model."""


def test_a_preparation_ends_with_the_service_that_began_it(tmp_path: Path) -> None:
    publish(tmp_path / "published", "llama")
    folder = registry.model_folder(tmp_path / "cache", str(tmp_path / "published"))
    folder.parent.mkdir(parents=True)
    with folder.with_name(folder.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # so that it lasts
        asked = [str(tmp_path / "published"), str(tmp_path / "cache")]
        service = subprocess.Popen([sys.executable, "-c", SERVICE, *asked])
        try:
            children = until(lambda: psutil.Process(service.pid).children())
        finally:
            service.kill()
            service.wait()
        psutil.wait_procs(children, timeout=60)
        assert not any(map(alive, children))


async def test_a_hub_that_does_not_answer_is_no_fault_of_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(Unavailable, match="the hub did not give org/model"):
        await BaseModels(tmp_path / "cache").chat("org/model")
    with pytest.raises(UserError, match="no model is called"):
        await BaseModels(tmp_path / "cache").chat("no-such-model")


COMMIT = "c0ffee00" * 5


@contextmanager
def hub(folder: Path, cut: str = "") -> Iterator[str]:
    """A hub, as much of it as a download asks for, with ``folder`` as ``org/model``. Its link breaks within ``cut``."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if path.startswith("/api/models/org/model/revision/"):
                return self.say(json.dumps({"id": "org/model", "sha": COMMIT}).encode())
            if path.startswith("/api/models/org/model/tree/"):
                files = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": file.name}
                    for file in folder.iterdir()
                ]
                return self.say(json.dumps(files).encode())
            file = folder / path.removeprefix(f"/org/model/resolve/{COMMIT}/")
            return self.say(file.read_bytes(), file.name) if file.is_file() else self.send_error(404)

        def do_HEAD(self) -> None:
            self.do_GET()

        def say(self, content: bytes, name: str = "listing") -> None:
            self.send_response(200)
            for header, value in {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"', "Content-Length": len(content)}.items():
                self.send_header(header, str(value))
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(content[: len(content) // 2] if name == cut else content)
            if name == cut:  # closed without lingering: the other end is told of a reset, not of an end
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())

        def log_message(self, *about: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def prepare_from(url: str, cache: Path, **variables: str) -> tuple[int, str]:
    """The exit code and the standard error of a separate process: the hub's library reads its variables once."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    given = {"HOME": str(cache.with_name("nobody")), "HF_ENDPOINT": url, **variables}
    process = ForkedProcess(CONVERT, ["--cache", str(cache), "org/model"], inherited | given)
    _, said = process.communicate(120)
    return process.wait(), said.decode()


CONVERT = "import runpy; runpy.run_module('rookery.worker.model.convert', run_name='__main__')"


@pytest.mark.heavy
def test_downloaded_files_stay_in_the_cache_until_the_model_is_prepared(tmp_path: Path) -> None:
    publish(tmp_path / "published", "llama")
    with hub(tmp_path / "published") as url:
        code, said = prepare_from(url, tmp_path / "cache", HOME=str(tmp_path / "home"))
        assert code == 0, said
        assert registry.status(tmp_path / "cache", "org/model").state == "prepared"
        prepared = registry.model_folder(tmp_path / "cache", "org/model")
        assert registry.base_reference(prepared) == registry.BaseReference("org/model", COMMIT)
        assert not list(tmp_path.rglob("models--*"))
        code, said = prepare_from(url, tmp_path / "other", HF_HOME=str(tmp_path / "shared"))
        assert code == 0, said
        assert (tmp_path / "shared" / "hub" / "models--org--model").is_dir()
        (tmp_path / "home" / ".cache" / "huggingface" / "hub").mkdir(parents=True)
        code, said = prepare_from(url, tmp_path / "third", HOME=str(tmp_path / "home"))
        assert code == 0, said
        assert (tmp_path / "home" / ".cache" / "huggingface" / "hub" / "models--org--model").is_dir()
        assert not (tmp_path / "other" / "hub").exists() and not (tmp_path / "third" / "hub").exists()


def test_a_download_that_breaks_in_the_middle_is_one_line_and_is_tried_again(tmp_path: Path) -> None:
    publish(tmp_path / "published", "llama")
    with hub(tmp_path / "published", cut="model.safetensors") as url:
        code, said = prepare_from(url, tmp_path / "cache")
    assert code == 1 and "Traceback" not in said
    assert "base_model: org/model cannot be fetched: the hub did not give org/model" in said
    with hub(tmp_path / "published") as url:
        assert prepare_from(url, tmp_path / "cache")[0] == 0


@pytest.mark.parametrize(
    ("variable", "proxy", "named"),
    [
        ("ALL_PROXY", "socks5://ada:hush@proxy:1080", "ALL_PROXY: given 'socks5://proxy:1080'"),
        ("https_proxy", "ftp://proxy:1", "https_proxy: given 'ftp://proxy:1'"),
    ],
)
def test_a_proxy_that_the_hub_s_library_cannot_use_counts_as_a_missing_source(
    variable: str,
    proxy: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in {name for names in PROXY_VARIABLES.values() for name in names}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, proxy)
    huggingface_hub.close_session()
    with pytest.raises(SystemExit) as ended:
        main(["org/model", "--cache", str(tmp_path / "cache")])
    said = capsys.readouterr().err
    assert ended.value.code == EXIT_REFUSED and named in said and said.count("\n") == 1
    publish(tmp_path / "published", "llama")
    sources = (registry.Source("hub", "org/model"), registry.Source("folder", str(tmp_path / "published")))
    monkeypatch.setattr(registry, "resolve", lambda name: registry.Model(name, "catalogue", sources))
    assert registry.is_prepared(prepare("org/model", tmp_path / "cache"))


def test_smollm2_comes_from_the_hub_or_the_package() -> None:
    assert registry.base_reference(smollm2_folder()).name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    mark = json.loads((smollm2_folder() / "rookery.json").read_text())
    assert mark["name"] == "smollm2-135m-instruct" and mark["model_type"] == "llama"
    decoder = Decoder.load(smollm2_folder())
    assert (decoder.config.layers, decoder.config.heads, decoder.config.kv_heads) == (30, 9, 3)
