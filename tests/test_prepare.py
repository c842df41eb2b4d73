"""Base models made ready: what the prepared folder computes is what the published one computes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rookery.errors import UserError
from rookery.text import catalogue
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.prepare import prepare
from test_decoder import logits
from tiny import FAMILIES, reference, smollm2_folder


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
    assert folder == catalogue.model_folder(tmp_path / "cache", str(tmp_path / "published"))
    assert {"config.json", "tokenizer.json", "model.safetensors", "rookery.json"} <= {p.name for p in folder.iterdir()}
    mark = json.loads((folder / "rookery.json").read_text())
    assert mark["hash"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert mark["model_type"] == FAMILIES[family].model_type
    tokens = torch.randint(0, 211, (31,))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(logits(Decoder.load(folder, torch.float32), tokens), expected, atol=1e-4, rtol=1e-4)
    assert catalogue.status(tmp_path / "cache", str(tmp_path / "published")).state == "prepared"


def test_prepared_once_by_several_processes(tmp_path: Path) -> None:
    publish(tmp_path / "published", "llama")
    with ProcessPoolExecutor(3) as pool:
        folders = set(pool.map(prepare, [str(tmp_path / "published")] * 3, [tmp_path / "cache"] * 3))
    (folder,) = folders
    written = (folder / "rookery.json").stat().st_mtime_ns
    assert prepare(str(tmp_path / "published"), tmp_path / "cache") == folder
    assert (folder / "rookery.json").stat().st_mtime_ns == written
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name, folder.name + ".lock"]


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(UserError, match="no model is called"):
        prepare("no-such-model", cache)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        prepare(str(tmp_path / "empty"), cache)
    publish(tmp_path / "odd", "llama")
    about = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**about, "model_type": "gpt2"}))
    with pytest.raises(UserError, match="gpt2"):
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
    assert not [p for p in (cache / "models").iterdir() if p.suffix != ".lock"]


def test_the_module_prints_the_folder(tmp_path: Path) -> None:
    publish(tmp_path / "published", "llama")
    command = [sys.executable, "-m", "rookery.worker.model.prepare", "--cache", str(tmp_path / "cache")]
    done = subprocess.run([*command, str(tmp_path / "published")], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_dir()
    done = subprocess.run([*command, "no-such-model"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no model is called" in done.stderr and "Traceback" not in done.stderr


def test_smollm2_comes_from_the_hub_or_the_package() -> None:
    mark = json.loads((smollm2_folder() / "rookery.json").read_text())
    assert mark["name"] == "smollm2-135m-instruct" and mark["model_type"] == "llama"
    decoder = Decoder.load(smollm2_folder())
    assert (decoder.config.layers, decoder.config.heads, decoder.config.kv_heads) == (30, 9, 3)
