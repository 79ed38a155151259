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
from pathlib import Path
from typing import TYPE_CHECKING

import fullhit
from fullhit.config import CONFIG_ENV, SETTINGS, Config, ConfigError, effective, load_config

if TYPE_CHECKING:
    from fullhit.admin_client import AdminClient

__all__ = ["main"]

USER_ERROR = 2
INTERRUPTED = 130
ADMIN_KEY_ENV = "FULLHIT_ADMIN_KEY"
ADMIN_KEY_FILE_ENV = "FULLHIT_ADMIN_KEY_FILE"

EPILOG = """\
examples:
  fullhit serve                                          router with its own NATS server, encoders register themselves
  fullhit serve --encoder-url http://10.0.0.5:30000      one encoder known from the start
  fullhit serve --config fullhit.toml --event-plane nats://nats:4222
  fullhit demo                                           two minutes, no GPU: what the router is worth
  fullhit workers                                        who is there, how loaded, what they hold
  fullhit explain                                        why the latest request went where it went
"""

_ACTIONS = {
    "list": ("", "list the workers"),
    "add": ("added", "add a worker, or change what is known of one"),
    "remove": ("removed", "remove a worker; what it holds is forgotten at once"),
    "drain": ("draining", "send a worker no new requests"),
    "resume": ("resumed", "send a drained worker requests again"),
}
_WORKER_FACTS = ("device", "weight", "pool", "max_inflight")

_LAB = {
    "demo": (
        "fullhit.lab.demo",
        "play the published image workload over mock encoders and print what routing saves",
    ),
    "mock-encoder": (
        "fullhit.lab.mock_encoder",
        "a mock encoder that speaks SGLang's encoder protocol, for tests",
    ),
    "mock-worker": (
        "fullhit.lab.mock_worker",
        "a mock SGLang or vLLM server, alone or as prefill or decode, for tests",
    ),
    "bench": ("fullhit.lab.bench", "measure the router against its budgets and print one table"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit code."""
    _open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = _parser(arguments)
        args = parser.parse_args(arguments)
        run: Callable[[argparse.Namespace], int] | None = getattr(args, "run", None)
        if run is None:
            parser.print_help()
            return USER_ERROR
        return run(args)
    except ConfigError as error:
        return _fail(f"configuration: {error}")
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _open_standard_streams() -> None:
    """A process started with a standard stream closed (``2>&-``) gets the null device there. Otherwise the next socket
    takes the number: log lines would go to a peer, and libuv aborts when it closes one below 3."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


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
    explain = commands.add_parser(
        "explain",
        help="show why a request went where it went",
        description="Show why a request went where it went: which worker, why, and who else was considered.",
    )
    explain.add_argument(
        "id", nargs="?", help="decision id, x-request-id or SGLang req_id of the request (default: the latest decision)"
    )
    _admin_arguments(explain)
    explain.set_defaults(run=_explain)
    check = commands.add_parser("check-config", help="print the effective configuration, or the exact mistake")
    check.add_argument(
        "file",
        nargs="?",
        default=os.environ.get(CONFIG_ENV) or None,
        help=f"TOML file [{CONFIG_ENV}]; without one: defaults and environment only",
    )
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
    serve.add_argument(
        "--dynamo-frontend",
        metavar="URL",
        action="append",
        default=[],
        help="a Dynamo HTTP frontend behind --openai-listen (default http://127.0.0.1:8000); may be given several "
        "times [FULLHIT_DYNAMO_FRONTENDS]",
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


def _admin_arguments(parser: argparse.ArgumentParser, *, again: bool = False) -> None:
    """``again``: below a parser that has them too, whose values then stay when they are not repeated."""
    url = os.environ.get("FULLHIT_ADMIN_URL", "http://127.0.0.1:8781")
    parser.add_argument(
        "--admin",
        metavar="URL",
        default=argparse.SUPPRESS if again else url,
        help=f"the router's admin listener [FULLHIT_ADMIN_URL] (default {url}); its key, where it has one, comes from "
        f"{ADMIN_KEY_ENV} or the file {ADMIN_KEY_FILE_ENV}".replace("%", "%%"),
    )
    parser.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS if again else False,
        help="print JSON instead of text",
    )


def _add_workers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    workers = commands.add_parser(
        "workers",
        help="list, add, remove, drain or resume the workers of a running router",
        description="List the workers of a running router (the default), or change one.",
    )
    _admin_arguments(workers)
    workers.set_defaults(run=_workers, action="list")
    actions = workers.add_subparsers(title="actions", metavar="ACTION")
    for action, (_, summary) in _ACTIONS.items():
        command = actions.add_parser(action, help=summary, description=summary[0].upper() + summary[1:] + ".")
        command.set_defaults(action=action)
        if action != "list":
            command.add_argument(
                "worker", metavar="URL", help="its URL" if action == "add" else "its URL or numeric id"
            )
        if action == "add":
            command.add_argument("--device", metavar="NAME", help="cuda, cpu, xpu ... (default cuda)")
            command.add_argument("--weight", metavar="N", type=float, help="relative capacity (default 1)")
            command.add_argument("--pool", metavar="NAME", help="its pool (default: default)")
            command.add_argument("--max-inflight", metavar="N", type=int, help="requests at once (default: the pool's)")
        _admin_arguments(command, again=True)


def _load(args: argparse.Namespace, path: str | None) -> Config:
    warnings: list[str] = []
    flags = {setting.key: getattr(args, setting.key, None) for setting in SETTINGS}
    config = load_config(
        path,
        environ=os.environ,
        flags={key: value for key, value in flags.items() if value is not None},
        encoder_urls=getattr(args, "encoder_url", ()),
        dynamo_frontends=getattr(args, "dynamo_frontend", ()),
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
    from fullhit.admin_client import AdminError, workers_table

    facts = {name: value for name in _WORKER_FACTS if (value := getattr(args, name, None)) is not None}
    try:
        client = _client(args)
        if args.action == "list":
            listing = client.get("/workers")
            print(client.pretty(listing) if args.json else workers_table(listing))
            return 0
        result = client.change_worker(args.action, args.worker, facts)
    except AdminError as error:
        return _fail(str(error), 1)
    print(client.pretty(result) if args.json else f"{_ACTIONS[args.action][0]}: {args.worker}")
    return 0


def _explain(args: argparse.Namespace) -> int:
    from fullhit.admin_client import AdminError, explain_text

    try:
        client = _client(args)
        record = client.decision(args.id)
    except AdminError as error:
        return _fail(str(error), 1)
    print(client.pretty(record) if args.json else explain_text(record))
    return 0


def _client(args: argparse.Namespace) -> AdminClient:
    """Raises AdminError for a malformed address or a key file that cannot be read."""
    from fullhit.admin_client import AdminClient, AdminError

    key = os.environ.get(ADMIN_KEY_ENV, "")
    path = os.environ.get(ADMIN_KEY_FILE_ENV, "")
    if path:
        try:
            key = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise AdminError(f"{ADMIN_KEY_FILE_ENV}: cannot read {path}: {error}") from None
    return AdminClient(args.admin, key)


def _fail(message: str, code: int = USER_ERROR) -> int:
    print(f"fullhit: {message}", file=sys.stderr)
    return code
