"""Prints what SGLang is made of where the plugin could have touched it, after its own start-up has loaded plugins and
read these arguments. Runs in SGLang's environment, as its launcher would; imports nothing of ours.

Code is named by where it was written, so a wrapper around a function, or another one in its place, shows.
"""

import argparse
import inspect
import json
import sys

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.disaggregation.encoder import http_server, receiver, runtime, server  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
arguments, unknown = parser.parse_known_args(sys.argv[1:])
ServerArgs.from_cli_args(arguments)


def origin(thing):
    code = getattr(getattr(thing, "__func__", thing), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


found = {}
for module in (http_server, receiver, runtime, server):
    for name, thing in inspect.getmembers(module, callable):
        found[f"{module.__name__}.{name}"] = origin(thing)
        if inspect.isclass(thing) and thing.__module__ == module.__name__:
            for inner, method in inspect.getmembers(thing, callable):
                found[f"{module.__name__}.{name}.{inner}"] = origin(method)
for name, thing in inspect.getmembers(ServerArgs, callable):
    found[f"ServerArgs.{name}"] = origin(thing)
print(
    "FINGERPRINT "
    + json.dumps(
        {
            "code": {name: place for name, place in found.items() if place},
            "flags": sorted(parser._option_string_actions),
            "layers": [layer.cls.__name__ for layer in http_server.app.user_middleware],
            "ours": sorted(name for name in sys.modules if name.startswith("fullhit")),
        }
    )
)
