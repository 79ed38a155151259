"""Where the plugin is hung into SGLang 0.5.23.

| target                                             | what for                                                    |
|----------------------------------------------------|-------------------------------------------------------------|
| ServerArgs.add_cli_args (after)                    | the flags; in every SGLang process, and all there is if     |
|                                                    | nobody asks for a cache                                     |
| ServerArgs.from_cli_args (around)                  | flags into the environment; an encoder gets the rest        |
| MMEncoder.__init__ (after)                         | its cache and publisher                                     |
| MMEncoder.batch_encode (around)                    | the bodies of the batch, which say what its items are       |
| MMEncoder._compute_direct_embedding (around)       | the step that is saved                                      |
| MMEncoder._prepare_encode_context (around)         | the step before, if that is to be saved as well             |
| runtime.execute_encode_pipeline (around)           | what the reply says of the cache (`replies`)                |
| runtime.launch_dp_worker (replaced)                | the same in encoder processes that are spawned (`children`) |
| MMReceiverBase.create_req (after)                  | language servers that outlive a failed encode (`guard`)     |

With tensor parallelism all ranks would have to agree on what is held before they enter the forward pass together; they
do not, so the cache stays off there. With data parallelism (``--dp-size``) each process has a cache of its own, and
SGLang chooses the process for a request; so the main process publishes what all of them hold (`ranks`, `common`).
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
from contextvars import ContextVar
from typing import Any, Final, NoReturn

from ..cache import EmbeddingCache
from ..publisher import EmbeddingCachePublisher
from .children import RANK, launch_dp_worker
from .encoder import Batch, ItemCache
from .guard import activate_guard
from .metrics import make_metrics
from .ranks import RankListener, RankReporter
from .replies import ATTRIBUTE, CacheHeader, encode_pipeline
from .settings import PluginSettings, add_flags, carry_over

__all__ = ["activate", "activate_encoder"]

_log = logging.getLogger("fullhit_publisher")

_SERVER_ARGS: Final = "sglang.srt.server_args.ServerArgs"
_ENCODER: Final = "sglang.srt.disaggregation.encoder.server.MMEncoder"
_PIPELINE: Final = "sglang.srt.disaggregation.encoder.runtime.execute_encode_pipeline"
_NEEDED: Final = (
    "__init__",
    "batch_encode",
    "slice_embedding",
    "_compute_direct_embedding",
    "_encode_missing",
    "_validate_embedding_token_count",
)
_batch: ContextVar[Batch | None] = ContextVar("fullhit_batch", default=None)


def activate() -> None:
    """The entry point: called once in each SGLang process that loads plugins. Raises nothing."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        _log.warning("the embedding-cache plugin stays out: SGLang has no %s", error.name)
        return
    HookRegistry.register(f"{_SERVER_ARGS}.add_cli_args", _flags_added, HookType.AFTER)
    HookRegistry.register(f"{_SERVER_ARGS}.from_cli_args", _args_read, HookType.AROUND)
    try:
        if PluginSettings.from_environ(os.environ).guard:  # a scheduler, told by the process that read the flags
            activate_guard()
    except ValueError as error:
        _log.warning("%s", error)


def activate_encoder() -> bool:
    """Hang the cache into this process's encoder. False, said in the log, when something it needs is not there."""
    try:
        from sglang.srt.disaggregation.encoder import runtime
        from sglang.srt.disaggregation.encoder.server import MMEncoder
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        _log.warning("the embedding cache stays off: SGLang has no %s", error.name or error)
        return False
    missing = [name for name in _NEEDED if not hasattr(MMEncoder, name)]
    if not hasattr(runtime, "launch_dp_worker"):
        missing.append("runtime.launch_dp_worker")
    if missing:
        _log.warning("the embedding cache stays off: SGLang's encoder has no %s", ", ".join(missing))
        return False
    HookRegistry.register(f"{_ENCODER}.__init__", _encoder_made, HookType.AFTER)
    HookRegistry.register(f"{_ENCODER}.batch_encode", _batch_encode, HookType.AROUND)
    HookRegistry.register(f"{_ENCODER}._compute_direct_embedding", _compute, HookType.AROUND)
    if PluginSettings.from_environ(os.environ).skip_preprocessing:
        if hasattr(MMEncoder, "_prepare_encode_context"):
            HookRegistry.register(f"{_ENCODER}._prepare_encode_context", _prepare, HookType.AROUND)
        else:
            _log.warning("preprocessing is not skipped: SGLang's encoder has no _prepare_encode_context")
    HookRegistry.apply_hooks()
    # A wrapper of the registry's could not be sent to a spawned process; this one is known by its name.
    runtime.launch_dp_worker = launch_dp_worker
    return True


def _mark_replies() -> None:
    """Let replies to ``/encode`` say what became of the request; where that cannot be, they say nothing."""
    try:
        from sglang.srt.disaggregation.encoder import http_server, runtime
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        if not hasattr(runtime, "execute_encode_pipeline"):
            raise ImportError("SGLang's encoder has no execute_encode_pipeline")
        http_server.app.add_middleware(CacheHeader)
        HookRegistry.register(_PIPELINE, encode_pipeline, HookType.AROUND)
        HookRegistry.apply_hooks()
    except Exception as error:
        _log.warning("replies do not say whether they were held: %s", error)


def _flags_added(result: Any, parser: Any, *_: Any) -> None:
    """Never raises, and never lets a parser end the process: a server without these flags is better than none."""
    try:
        # Tried on another one first: a malformed variable, or a flag that SGLang or another plugin has as well.
        trial = _Trial(add_help=False)
        add_flags(trial, os.environ)
        trial.parse_args([])
        taken = sorted(set(trial._option_string_actions) & set(parser._option_string_actions))
        if taken:
            raise ValueError(f"SGLang, or another plugin, has {', '.join(taken)} already; use environment variables")
        add_flags(parser, os.environ)
    except Exception as error:
        _log.warning("the embedding-cache plugin adds no flags: %s", error)


class _Trial(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _args_read(original: Any, *args: Any, **kwargs: Any) -> Any:
    namespace = kwargs.get("args", args[-1] if args else None)
    active = False
    try:
        carry_over(namespace, os.environ)
        settings = PluginSettings.from_environ(os.environ)
        if settings.publish and not settings.wanted:
            _log.warning("nothing to publish: set --multimodal-embedding-cache-capacity-gb above 0")
        if settings.wanted:
            if getattr(namespace, "encoder_only", False):
                active = activate_encoder()
                if active:
                    _mark_replies()
            else:
                _log.warning("the embedding cache is for encoders; this server has no --encoder-only and keeps none")
    except Exception:
        _log.exception("the embedding cache stays off")
    result = original(*args, **kwargs)
    if active and settings.publish and getattr(result, "dp_size", 1) > 1:
        try:
            _publish_for_all(settings, result)
        except Exception:
            _log.exception("the embedding caches are on, but nothing is published")
    return result


def _encoder_made(result: Any, encoder: Any, server_args: Any, *_: Any, **__: Any) -> None:
    """Never raises: an encoder without a cache is better than none."""
    try:
        settings = PluginSettings.from_environ(os.environ)
        if getattr(server_args, "tp_size", 1) > 1:
            _log.warning("the embedding cache stays off: with --tp-size above 1 the ranks would have to agree on it")
            return
        from .torch_tensors import TorchTensors

        cache: EmbeddingCache[Any] = EmbeddingCache(settings.capacity_bytes)
        metrics = make_metrics(cache)
        # With mooncake what is held goes back to the device; otherwise it leaves from host memory.
        tensors = TorchTensors(encoder.device, pinned=bool(getattr(encoder, "use_mooncake", False)))
        setattr(encoder, ATTRIBUTE, ItemCache(cache, encoder, tensors, metrics))
        _log.info("embedding cache of %.3g GB, per item", settings.capacity_bytes / 1024**3)
    except Exception:
        _log.exception("the embedding cache stays off")
        return
    try:
        if settings.publish:
            _publish(settings, cache, encoder, server_args)
    except Exception:
        _log.exception("the embedding cache is on, but nothing is published")


def _publish(settings: PluginSettings, cache: EmbeddingCache[Any], encoder: Any, server_args: Any) -> None:
    device = str(encoder.device)
    if getattr(server_args, "dp_size", 1) > 1:
        RankReporter(int(os.environ[RANK]), cache, device, os.environ)
        return
    publisher = _publisher(settings, server_args, device)
    publisher.attach(cache).start()


def _publish_for_all(settings: PluginSettings, server_args: Any) -> None:
    """In the main process of an encoder with several: publish what all of them hold, once they say it."""

    def make(device: str) -> EmbeddingCachePublisher:
        return _publisher(settings, server_args, device).start()

    listener = RankListener(server_args.dp_size, make, os.environ)
    atexit.register(listener.close)


def _publisher(settings: PluginSettings, server_args: Any, device: str) -> EmbeddingCachePublisher:
    publisher = EmbeddingCachePublisher(
        settings.url or _advertised(server_args),
        pool=settings.pool,
        event_plane=settings.event_plane,
        device=device,
        credentials=settings.credentials,
    )
    atexit.register(publisher.close)
    _log.info("publishing the embedding cache as %s in pool %s", publisher.url, settings.pool)
    return publisher


def _advertised(server_args: Any) -> str:
    """The URL that SGLang registers an encoder under: its host and port, or the machine's own address."""
    from sglang.srt.utils.network import NetworkAddress, get_local_ip_auto

    host = server_args.host
    if not host or host in ("0.0.0.0", "::"):
        host = get_local_ip_auto(host)
    return str(NetworkAddress(host, server_args.port).to_url("https" if server_args.ssl_certfile else "http"))


async def _batch_encode(original: Any, encoder: Any, requests: Any, modality: Any) -> Any:
    token = _batch.set(Batch(requests))
    try:
        return await original(encoder, requests, modality)
    finally:
        _batch.reset(token)


async def _prepare(original: Any, encoder: Any, requests: Any, modality: Any, **how: Any) -> Any:
    items: ItemCache | None = getattr(encoder, ATTRIBUTE, None)
    batch = _batch.get()
    if items is not None and batch is not None and not how.get("use_global_cache") and not how.get("is_health_check"):
        context = items.prepare(batch, modality)
        if context is not None:
            return context
    return await original(encoder, requests, modality, **how)


async def _compute(original: Any, encoder: Any, ctx: Any, *, keep_on_gpu: bool) -> Any:
    items: ItemCache | None = getattr(encoder, ATTRIBUTE, None)
    batch = _batch.get()
    if items is None or batch is None:
        return await original(encoder, ctx, keep_on_gpu=keep_on_gpu)

    async def plainly() -> Any:
        return await original(encoder, ctx, keep_on_gpu=keep_on_gpu)

    return await items.compute(plainly, ctx, batch, keep_on_gpu=keep_on_gpu, modality=ctx.modality.name)
