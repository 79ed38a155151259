"""What an encoder imports to keep an embedding cache and tell routers about it.

>>> cache = EmbeddingCache(capacity_bytes=4 << 30)                    # doctest: +SKIP
>>> with_events = EmbeddingCachePublisher(url).attach(cache).start()  # doctest: +SKIP
>>> cache.put(key_text(item_key(image_url)), embedding)               # doctest: +SKIP

Nothing here imports the router, and only the NATS transport imports a NATS client.
"""

from .args import add_cli_args, from_args
from .cache import EmbeddingCache, PutResult
from .dynamo import DynamoTarget
from .identity import device_name, normalize_url, worker_id_for
from .keys import Key, fold, item_key, key_text, text_key
from .publisher import EmbeddingCachePublisher
from .sender import Counters, PublisherOptions
from .state import CacheStats, PublisherState
from .transports import MemoryBroker, MemoryTransport, Transport, TransportError
from .wire import WireError

__all__ = [
    "CacheStats",
    "Counters",
    "DynamoTarget",
    "EmbeddingCache",
    "EmbeddingCachePublisher",
    "Key",
    "MemoryBroker",
    "MemoryTransport",
    "PublisherOptions",
    "PublisherState",
    "PutResult",
    "Transport",
    "TransportError",
    "WireError",
    "add_cli_args",
    "device_name",
    "fold",
    "from_args",
    "item_key",
    "key_text",
    "normalize_url",
    "text_key",
    "worker_id_for",
]
