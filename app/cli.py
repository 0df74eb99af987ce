"""The command ``baton``: ``up``, ``status``, ``drain``, ``restart``, ``build-kernels``, ``version``.

Each setting is an option too, named as ``vllm serve`` names it where that has one. Options win over the environment.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn, TextIO

from app.errors import BatonError, SettingsError, StartupError
from app.log_lane import LogLane
from app.schemas import Health
from app.settings import Settings, closest, load_settings

_VLLM_NAMES = {"max_model_len_tokens": "--max-model-len", "block_size_tokens": "--block-size"}
"""vLLM leaves the unit out of these."""
_NO_OPTION = frozenset({"incarnation", "failpoints"})
_STATUS_OPTIONS = ("host", "port")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: the usage of ``baton up`` alone fills a screen. Takes no shortened options."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        _say(f"baton: {message.removeprefix('argument ')}; see `{self.prog} --help`", sys.stderr)
        raise SystemExit(2)

    def unknown(self, options: Sequence[str]) -> NoReturn:
        """Refuse what ``parse_known_args`` left over."""
        option = options[0].split("=")[0]
        close = closest(option.lstrip("-"), [name.lstrip("-") for name in self._option_string_actions])
        self.error(f"{option} is no option of `{self.prog}`" + (f": did you mean --{close}?" if close else ""))


def option_of(setting: str) -> str:
    """The command line option of a setting: ``max_num_seqs`` → ``--max-num-seqs``."""
    return _VLLM_NAMES.get(setting, "--" + setting.replace("_", "-"))


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; the parsed arguments hold the command's own parser as ``parser``."""
    parser = _Parser(prog="baton", description="LLM serving with prefill and decode disaggregated.")
    parser.add_argument("--version", action="version", version=f"baton {importlib.metadata.version('baton')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="run a whole cluster on this machine until Ctrl-C")
    up.add_argument("--prefill", type=_count, default=1, metavar="N", help="Prefill workers. (1)")
    up.add_argument("--decode", type=_count, default=1, metavar="N", help="Decode workers. (1)")
    up.add_argument(
        "--start-timeout-s",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="Give up when it is not ready so long after the model is there: the ledger may have much to load. (300)",
    )
    _add_settings(up, [name for name in Settings.model_fields if name not in _NO_OPTION])
    status = commands.add_parser("status", help="say whether the cluster serves; exit status 0 only if it does")
    status.add_argument("--json", action="store_true", help="Print JSON.")
    _add_settings(status, _STATUS_OPTIONS)
    drain = commands.add_parser("drain", help="have one prefill or decode node take nothing more; its process goes on")
    drain.add_argument("node", metavar="NODE", help="Name as `baton status` shows it, or an incarnation.")
    drain.add_argument("--wait", action="store_true", help="Wait until it holds nothing; exit status 0 only then.")
    drain.add_argument(
        "--wait-timeout-s", type=_seconds, default=60.0, metavar="S", help="How long to wait at most. (60)"
    )
    _add_settings(drain, _STATUS_OPTIONS)
    restart = commands.add_parser("restart", help="have `baton up` restart its processes, one by one, while they serve")
    _add_settings(restart, ["home"])
    build = commands.add_parser(
        "build-kernels", help="compile the kernels for CPUs now; `up` and workers do it by need"
    )
    _add_settings(build, ["home"])
    commands.add_parser("version", help="print the version")
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 0 well, 1 failed or not ready, 2 wrong options or settings."""
    try:
        arguments, unknown = build_parser().parse_known_args(argv)
        if unknown:
            arguments.parser.unknown(unknown)
        return _run(arguments)
    except KeyboardInterrupt:
        return 130
    except SettingsError as error:
        _say(f"baton: {_with_options(str(error), arguments)}", sys.stderr)
        return 2
    except BatonError as error:
        _say(f"baton: {error}", sys.stderr)
        return 1
    finally:
        _say("", end="")  # argparse's help waits in the buffer


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "version":
        _say(f"baton {importlib.metadata.version('baton')}")
        return 0
    settings = load_settings(**_overrides(arguments))
    match arguments.command:
        case "status":
            return _status(settings, as_json=arguments.json)
        case "drain":
            return _drain(settings, arguments.node, arguments.wait_timeout_s if arguments.wait else 0.0)
        case "restart":
            return _restart(settings)
        case "build-kernels":
            return _build_kernels(settings)
        case _:
            return _up(settings, arguments)


def _up(settings: Settings, arguments: argparse.Namespace) -> int:
    from app.launcher.plan import Nodes
    from app.launcher.up import Options, up  # here: `baton status` need not import Celery

    if not sys.platform.startswith("linux"):
        raise StartupError("`baton up` needs Linux; on other systems start each process by its own command")
    options = Options(Nodes(arguments.prefill, arguments.decode), arguments.start_timeout_s)
    lines = LogLane(_Terminal())
    try:
        return up(settings, options, lambda line: lines.emit(logging.makeLogRecord({"msg": line})))
    finally:
        if not lines.written():  # its thread holds the terminal: what Python does at its end would wait for it
            os._exit(1)


class _Terminal(logging.Handler):
    """Says lines to whoever started us. A paused terminal takes none: the thread that says them waits, nobody else."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a terminal that has gone
            _say(record.getMessage())


def _say(line: str, file: TextIO | None = None, end: str = "\n") -> None:
    file = file or sys.stdout
    try:
        print(line, file=file, end=end, flush=True)
    except BrokenPipeError:  # whoever read our output is gone (`baton up | head`): go on serving
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def _status(settings: Settings, *, as_json: bool) -> int:
    from app.launcher.status import fetch_status, render_status

    status = fetch_status(settings)
    _say(json.dumps(status, indent=2) if as_json else render_status(status))
    return 0 if status["ready"] else 1


def _drain(settings: Settings, name: str, wait_s: float) -> int:
    from app.launcher.drain import GONE, drain

    node = drain(settings, name, wait_s)
    sequences = node["sequences"]
    _say(f"{node['name']}: {node['health']}, {sequences['running']} running, {sequences['waiting']} waiting")
    return 0 if wait_s == 0 or node["health"] in (Health.DRAINED, GONE) else 1


def _restart(settings: Settings) -> int:
    from app.launcher.progress import restart

    restart(settings, _say)
    return 0


def _build_kernels(settings: Settings) -> int:
    from app.launcher.kernels import build_kernels

    wanted = settings.model_copy(update={"kernels": "compiled", "device": "cpu"})
    _say("kernels: " + build_kernels(wanted, lambda line: _say("kernels: " + line)))
    return 0


def _add_settings(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    group = parser.add_argument_group("settings (each is also an environment variable, BATON_<NAME>)")
    for name in names:
        field = Settings.model_fields[name]
        text = f"{field.description} ({field.default})".replace("%", "%%")
        group.add_argument(option_of(name), dest=name, metavar=name.rsplit("_", 1)[-1].upper(), help=text)


def _overrides(arguments: argparse.Namespace) -> dict[str, object]:
    given = vars(arguments)
    return {name: given[name] for name in Settings.model_fields if given.get(name) is not None}


def _with_options(message: str, arguments: argparse.Namespace) -> str:
    """Name the option too, where the wrong value came from one."""
    given = _overrides(arguments)
    return re.sub(
        r"BATON_([A-Z_]+)(?=:)",
        lambda match: f"{option_of(name)} ({match[0]})" if (name := match[1].lower()) in given else match[0],
        message,
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 64")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
