"""A plugin that gives stock SGLang encoders an embedding cache per picture, and lets them publish it.

SGLang finds it by the entry point ``fullhit`` of the group ``sglang.srt.plugins``; nothing else has to be done. It adds
its flags to SGLang's own parser and does nothing until one of them, or its environment variable, asks for a cache.
Inside an encoder (``--encoder-only``) it then stands around the step that runs the ViT: pictures whose embeddings are
held are not encoded again, the others alone are, and the answer is the same.

    settings   what is asked for, from flags and environment
    plan       which items are held, which must be encoded, in which order they go together (pure)
    encoder    the cache around one encoder's compute step
    replies    what a reply says of the cache
    common     what several processes of one encoder hold in common (pure); ``ranks``: how the main one learns it
    hooks      where all that is hung into SGLang, and only if everything it needs is there
    children   what spawned encoder processes run first
    guard      for language servers: a failed encode is not their end

Made for and tried with release 0.5.23. Nothing is looked up by version: an internal that is missing is named in the log
and the plugin stays out.
"""

from .hooks import activate

__all__ = ["activate"]
