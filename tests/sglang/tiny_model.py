"""Writes a Qwen2.5-VL so small that a CPU runs it in milliseconds: ``python tiny_model.py FOLDER``.

The folder gets configuration, tokenizer and processor files but no weights: SGLang is started with
``--load-format dummy``, which fills them from a fixed seed, so that every server holds the same ones. Two
text layers, two vision layers, hidden size 64; the tokenizer knows the 256 byte symbols and the family's
special tokens and nothing else. With a merge size of two patches of 14 pixels an image of 64 x 64 pixels
becomes four tokens. Runs inside the SGLang environment (it needs ``tokenizers``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN = 64
PATCH = 14
CONTEXT = 4096
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
PIXELS = {"min_pixels": 4 * (2 * PATCH) ** 2, "max_pixels": 128 * (2 * PATCH) ** 2}

TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ['image', 'image_url'] -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] in ['video', 'video_url'] -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif part['type'] == 'text' -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write the tokenizer's files; returns the ids of the special tokens."""
    symbols = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=symbols, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    write(folder / "vocab.json", symbols)
    (folder / "merges.txt").write_text("#version: 0.2\n")
    write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "processor_class": "Qwen2_5_VLProcessor",
            "chat_template": TEMPLATE,
            "model_max_length": CONTEXT,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "errors": "replace",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "additional_special_tokens": list(SPECIAL[1:]),
            "added_tokens_decoder": {str(ids[token]): {"content": token, **flags} for token in SPECIAL},
        },
    )
    return ids


def write_processor(folder: Path) -> None:
    write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.25, 0.25, 0.25],
            **PIXELS,
        },
    )
    write(folder / "chat_template.json", {"chat_template": TEMPLATE})


def write_config(folder: Path, ids: dict[str, int]) -> None:
    vision = {
        "depth": 2,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_heads": 4,
        "in_chans": 3,
        "in_channels": 3,
        "out_hidden_size": HIDDEN,
        "patch_size": PATCH,
        "spatial_patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 8 * PATCH,
        "fullatt_block_indexes": [1],
    }
    config: dict[str, Any] = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": "bfloat16",
        "vocab_size": 512,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "max_window_layers": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": vision,
    }
    write(folder / "config.json", config)
    write(
        folder / "generation_config.json",
        {
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": [ids["<|im_end|>"]],
            "pad_token_id": ids["<|endoftext|>"],
        },
    )


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1))


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(folder)
    write_processor(folder)
    write_config(folder, ids)


if __name__ == "__main__":
    main()
