"""The cookbook's ``math_rl`` recipe as it is, told where the tokenizer of a catalogue's model lies.

python cookbook_math_rl.py MODEL TOKENIZER_FOLDER name=value …
"""

from __future__ import annotations

import asyncio
import os
import sys

os.environ["TINKER_TELEMETRY"] = "0"

import chz
from tinker_cookbook.recipes.math_rl.train import CLIConfig, cli_main
from tinker_cookbook.tokenizer_utils import register_tokenizer
from transformers import AutoTokenizer

if __name__ == "__main__":
    model, folder, *arguments = sys.argv[1:]
    register_tokenizer(model, lambda: AutoTokenizer.from_pretrained(folder))
    config = chz.entrypoint(CLIConfig, argv=[f"model_name={model}", "renderer_name=role_colon", *arguments])
    asyncio.run(cli_main(config))
    sys.stdout.flush()
    os._exit(0)  # the SDK's threads would go on
