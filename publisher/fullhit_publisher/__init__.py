"""What an encoder imports to keep an embedding cache and tell a router about it."""

from .identity import normalize_url, worker_id_for
from .keys import Key, fold, item_key, key_text, text_key
from .wire import WireError

__all__ = [
    "Key",
    "WireError",
    "fold",
    "item_key",
    "key_text",
    "normalize_url",
    "text_key",
    "worker_id_for",
]
