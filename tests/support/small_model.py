"""A random Llama of a few hundred kilobytes with a byte-level tokenizer, as a folder such as a user may name."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def save_small_model(
    folder: Path,
    seed: int = 0,
    config: transformers.PreTrainedConfig | None = None,
    *,
    hidden: int = 64,
    context: int = 512,
    reverse: bool = False,
) -> Path:
    """Writes config, weights, tokenizer and chat template; ``context`` is in tokens. Another family's ``config`` gets
    the tokenizer's sizes. With ``reverse`` each token has another id than without."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    torch.manual_seed(seed)
    config = config or transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    config.vocab_size, config.bos_token_id = tokenizer.get_vocab_size(), None
    config.eos_token_id = tokenizer.token_to_id("<|end|>")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return folder
