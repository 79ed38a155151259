"""A model folder with just enough for a frontend to tokenise a chat: ten words, no weights."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["write_toy_model"]

WORDS = ("[UNK]", "[BOS]", "[EOS]", "user", "assistant", "what", "is", "this", "fine", "[PICTURE]")
SPECIAL = (0, 1, 2, 9)
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}[PICTURE]{% endif %} "
    "{% endfor %}{% endif %}{% endfor %}assistant"
)


def write_toy_model(folder: Path) -> None:
    folder.mkdir()
    marks = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [{"id": number, "content": WORDS[number], **marks} for number in SPECIAL],
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {
                "type": "WordLevel",
                "vocab": {word: number for number, word in enumerate(WORDS)},
                "unk_token": WORDS[0],
            },
            **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": WORDS[1],
            "eos_token": WORDS[2],
            "unk_token": WORDS[0],
            "chat_template": TEMPLATE,
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(WORDS),
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
