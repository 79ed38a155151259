"""The ``fullhit`` command: parses arguments, prints for people, maps every expected failure to a message.

Exit codes: 0 done, 1 it ran and failed, 2 the user's mistake, 130 interrupted. A stack trace is always our bug.
Heavy modules are imported by the command that needs them, so that ``--help`` and ``version`` answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

import fullhit
from fullhit.config import CONFIG_ENV, SETTINGS, Config, ConfigError, effective, load_config

__all__ = ["main"]

USER_ERROR = 2
INTERRUPTED = 130

EPILOG = """\
examples:
  fullhit serve                                          router with its own NATS server, encoders register themselves
  fullhit serve --encoder-url http://10.0.0.5:30000      one encoder known from the start
  fullhit serve --config fullhit.toml --event-plane nats://nats:4222
  fullhit demo                                           two minutes, no GPU: what the router is worth
  fullhit workers                                        who is there, how loaded, what they hold
"""

_LAB = {
    "demo": (
        "fullhit.lab.demo",
        "play the published image workload over mock encoders and print what routing saves",
    ),
    "mock-encoder": (
        "fullhit.lab.mock_encoder",
        "a mock encoder that speaks SGLang's encoder protocol, for tests",
    ),
    "bench": ("fullhit.lab.bench", "measure the router against its budgets and print one table"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(arguments)
    args = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] | None = getattr(args, "run", None)
    if run is None:
        parser.print_help()
        return USER_ERROR
    try:
        return run(args)
    except ConfigError as error:
        return _fail(f"configuration: {error}")
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fullhit",
        description="Cache-aware request router for vision-language serving.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fullhit {fullhit.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_serve(commands)
    for name, (module, summary) in _LAB.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name in arguments[:1]:
            _wire_lab(command, module)
    _add_workers(commands)
    explain = commands.add_parser("explain", help="show why a request went where it went")
    explain.add_argument("id", help="decision id, or the x-request-id of the request")
    _admin_arguments(explain)
    explain.set_defaults(run=_explain)
    check = commands.add_parser("check-config", help="print the effective configuration, or the exact mistake")
    check.add_argument("file", nargs="?", help="TOML file (without it: defaults and environment only)")
    check.set_defaults(run=_check_config)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)
    return parser


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve",
        help="run the router",
        description="Run the router. Every option has an environment variable (in brackets); options win over the "
        "environment, the environment over the file, the file over defaults.",
    )
    serve.add_argument("--config", metavar="FILE", default=os.environ.get(CONFIG_ENV), help=f"TOML file [{CONFIG_ENV}]")
    serve.add_argument(
        "--encoder-url",
        metavar="URL",
        action="append",
        default=[],
        help="an encoder known from the start; may be given several times [FULLHIT_ENCODER_URLS]",
    )
    for setting in SETTINGS:
        serve.add_argument(
            setting.flag, metavar=setting.metavar, dest=setting.key, help=f"{setting.help} [{setting.env}]"
        )
    serve.set_defaults(run=_serve)


def _wire_lab(command: argparse.ArgumentParser, module: str) -> None:
    try:
        lab = import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name

        def explain(_: argparse.Namespace) -> int:
            return _fail(f"this command needs the Python package {missing!r}: pip install 'fullhit[lab]'")

        command.set_defaults(run=explain)
        return
    lab.add_arguments(command)
    command.set_defaults(run=lab.run)


def _admin_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--admin",
        metavar="URL",
        default=os.environ.get("FULLHIT_ADMIN_URL", "http://127.0.0.1:8781"),
        help="the router's admin listener [FULLHIT_ADMIN_URL] (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_workers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    workers = commands.add_parser(
        "workers",
        help="list, add, remove, drain or resume the workers of a running router",
        description="Without an action: list the workers of a running router.",
    )
    workers.add_argument("action", nargs="?", choices=("list", "add", "remove", "drain", "resume"), default="list")
    workers.add_argument("worker", nargs="?", help="the worker's URL (or its numeric id)")
    workers.add_argument("--device", help="with add: cuda, cpu, xpu ...")
    workers.add_argument("--weight", type=float, help="with add: relative capacity")
    workers.add_argument("--pool", help="with add: the pool (default: default)")
    _admin_arguments(workers)
    workers.set_defaults(run=_workers)


def _load(args: argparse.Namespace, path: str | None) -> Config:
    warnings: list[str] = []
    flags = {setting.key: getattr(args, setting.key, None) for setting in SETTINGS}
    config = load_config(
        path,
        environ=os.environ,
        flags={key: value for key, value in flags.items() if value is not None},
        encoder_urls=getattr(args, "encoder_url", ()),
        warn=warnings,
    )
    for warning in warnings:
        print(f"fullhit: warning: {warning}", file=sys.stderr)
    return config


def _serve(args: argparse.Namespace) -> int:
    config = _load(args, args.config)
    from fullhit.app import serve

    return serve(config)


def _check_config(args: argparse.Namespace) -> int:
    import json

    config = _load(args, args.file)
    print(json.dumps(effective(config), indent=2))
    return 0


def _version(_: argparse.Namespace) -> int:
    print(f"fullhit {fullhit.__version__}")
    return 0


def _workers(args: argparse.Namespace) -> int:
    from fullhit.admin_client import AdminClient, AdminError, workers_table

    if args.action != "list" and not args.worker:
        return _fail(f"workers {args.action} needs a worker: fullhit workers {args.action} http://127.0.0.1:30000")
    client = AdminClient(args.admin, os.environ.get("FULLHIT_ADMIN_KEY", ""))
    try:
        if args.action == "list":
            listing = client.get("/workers")
            print(client.pretty(listing) if args.json else workers_table(listing))
            return 0
        result = client.change_worker(args.action, args.worker, device=args.device, weight=args.weight, pool=args.pool)
    except AdminError as error:
        return _fail(str(error), 1)
    done = {"add": "added", "remove": "removed", "drain": "draining", "resume": "resumed"}[args.action]
    print(client.pretty(result) if args.json else f"{done}: {args.worker}")
    return 0


def _explain(args: argparse.Namespace) -> int:
    from fullhit.admin_client import AdminClient, AdminError, explain_text

    client = AdminClient(args.admin, os.environ.get("FULLHIT_ADMIN_KEY", ""))
    try:
        record = client.decision(args.id)
    except AdminError as error:
        return _fail(str(error), 1)
    print(client.pretty(record) if args.json else explain_text(record))
    return 0


def _fail(message: str, code: int = USER_ERROR) -> int:
    print(f"fullhit: {message}", file=sys.stderr)
    return code
