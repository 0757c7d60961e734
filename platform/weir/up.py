"""`weir up`: the whole product on one machine, under one supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from django.core.management import call_command

from engine_worker.broker import BrokerUnavailable, GatewayBroker
from weir import demo, embedded
from weir.children import ChildrenFile
from weir.errors import StartError
from weir.process import Command
from weir.servers import server_arguments
from weir.supervisor import Supervisor

_FREE_BYTES_MIN: Final = 256 << 20
_SERVERS_S: Final = 60.0
_READY_S: Final = 180.0
"""Without the time that the engine's _STAGES take, and _READY_AT_MOST_S with it."""
_READY_AT_MOST_S: Final = 1200.0
_READY_ADVICE: Final = (
    "see the lines above. On a busy machine try again when it is calmer; `python -m engine_worker.compiled` "
    "compiles the kernels beforehand, and WEIR_KERNELS=torch does without them"
)
_STAGES: Final = {
    "kernels_compiling": "compiling kernels, once per machine",
    "kernels_compiled_by_another": "waiting for another process that compiles the kernels",
    "kernels_ready": "",
}
_DRAIN_S: Final = "8"
"""Seconds that open answers get to end: on one machine somebody waits at the terminal."""
_NAMES: Final = ("postgres", "valkey", "model", "gateway", "celery", "beat", "engine")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start and how to reach it."""

    base_dir: Path
    var_dir: Path
    host: str
    port: int
    base_url: str
    model: str
    model_name: str
    database_is_embedded: bool
    redis_is_embedded: bool
    redis_url: str
    log_level: str
    server: str
    """Of the gateway, one of servers.SERVERS."""
    with_demo: bool = True

    def python(self, name: str, *arguments: str, stop_grace_s: float = 15.0) -> Command:
        """One of our own processes: this Python, with the packages of this tree."""
        paths = [str(self.base_dir / "platform"), str(self.base_dir), os.environ.get("PYTHONPATH", "")]
        env = dict(os.environ) | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "DJANGO_SETTINGS_MODULE": "weir.settings",
            "WEIR_VAR_DIR": str(self.var_dir),
            "REDIS_URL": self.redis_url,
        }
        env.pop("REDIS_URL_FILE", None)  # read already
        return Command(
            name, (sys.executable, *arguments), env=env, cwd=self.base_dir, stop_grace_s=stop_grace_s
        )


def run(plan: Plan) -> None:
    """Runs until SIGINT or SIGTERM. Raises StartError with what to do when it can't start."""
    try:
        with _exclusive(plan.var_dir / "run" / "up.lock"):
            asyncio.run(_run(plan))
    except embedded.EmbeddedServerError as error:
        raise StartError(str(error)) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StartError(
                f"the disk of {plan.var_dir} is full: free some space, or move WEIR_VAR_DIR"
            ) from error
        if error.filename is not None:
            raise StartError(f"can't use {error.filename}: {error.strerror}") from error
        raise


async def _run(plan: Plan) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    children = ChildrenFile(plan.var_dir / "run" / "children.json")
    supervisor = Supervisor(children, names=_NAMES)
    if left := await asyncio.to_thread(children.end_leftovers):
        supervisor.write("weir", f"ended what a crash had left running: {', '.join(left)}")
    _check_disk(plan.var_dir)
    _check_port(plan.host, plan.port)
    starting = asyncio.create_task(_start(plan, supervisor), name="start")
    stopped = asyncio.create_task(stop.wait(), name="stop-asked")
    try:
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            print(starting.result(), flush=True)
            await stopped
    finally:
        supervisor.write("weir", "stopping")
        starting.cancel()
        await asyncio.wait([starting])
        await supervisor.stop()
        supervisor.write("weir", "stopped")


async def _start(plan: Plan, supervisor: Supervisor) -> str:
    """Starts everything, in the order of need, and returns what to tell when it answers."""
    model = asyncio.create_task(_ensure_model(plan), name="ensure-model")
    files = asyncio.create_task(asyncio.to_thread(_collect_static_files), name="collect-static-files")
    try:
        await _start_servers(plan, supervisor)
        # Loading the model takes longest, and needs no database.
        preparing = asyncio.create_task(
            asyncio.to_thread(demo.prepare_database, plan.var_dir, plan.base_url, with_demo=plan.with_demo),
            name="prepare-database",
        )
        try:
            supervisor.start(_engine(plan, await model))
        finally:
            login = await asyncio.shield(preparing)  # a migration is not left half way
        await files
    finally:
        model.cancel()
        await asyncio.wait([model, files])
    supervisor.start(*_web_and_background(plan), outlives_last=True)
    broker = GatewayBroker(plan.redis_url)
    try:

        async def answers() -> bool:
            return await _engine_beats(broker, plan.model_name) and await _http_answers(plan.host, plan.port)

        await supervisor.until(
            answers, what="Weir", timeout_s=_READY_S, at_most_s=_READY_AT_MOST_S, advice=_READY_ADVICE
        )
    finally:
        await broker.aclose()
    if isinstance(login, demo.Login):
        login.publish()
    return demo.welcome(plan.base_url, plan.model_name, plan.var_dir, login)


def _engine(plan: Plan, model_dir: str) -> Command:
    arguments = ["-m", "engine_worker", "--model", f"{plan.model_name}={model_dir}"]
    if "WEIR_DRAIN_GRACE_S" not in os.environ:
        arguments += ["--drain-grace-s", _DRAIN_S]
    return replace(plan.python("engine", *arguments, stop_grace_s=40.0), stages=_STAGES)


def _web_and_background(plan: Plan) -> tuple[Command, ...]:
    # -W: as root Celery warns about pickled messages, which it is told not to accept.
    celery = ("-W", "ignore:You're running the worker", "-m", "celery", "-q", "-A", "weir.celery")
    schedule = str(plan.var_dir / "run" / "celerybeat-schedule")
    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat")
    gateway = plan.python("gateway", *server_arguments(plan.server, host=plan.host, port=plan.port))
    others = os.environ.get("WEIR_EXPECTED_MODELS", "")
    expected = {"WEIR_EXPECTED_MODELS": ",".join(filter(None, (plan.model_name, others)))}
    # What an engine that is being stopped could finish has ended before the gateway is told to.
    drain = {"WEIR_GATEWAY_DRAIN_S": os.environ.get("WEIR_GATEWAY_DRAIN_S") or "1"}
    return (
        replace(gateway, env=dict(gateway.env or {}) | expected | drain),
        plan.python("celery", *celery, "worker", "--loglevel", plan.log_level, *quiet, stop_grace_s=30.0),
        plan.python(
            "beat", *celery, "beat", "--loglevel", "WARNING", "--schedule", schedule, "--pidfile", ""
        ),
    )


async def _start_servers(plan: Plan, supervisor: Supervisor) -> None:
    servers: list[embedded.Server] = []
    if plan.database_is_embedded:
        servers.append(await asyncio.to_thread(embedded.prepare_postgres, plan.var_dir))
    if plan.redis_is_embedded:
        servers.append(await asyncio.to_thread(embedded.prepare_valkey, plan.var_dir))
    if not servers:
        return
    supervisor.start(*(server.command for server in servers))

    for server in servers:

        async def answers(server: embedded.Server = server) -> bool:
            return await asyncio.to_thread(server.is_ready)

        await supervisor.until(answers, what=server.command.name, timeout_s=_SERVERS_S)


def _collect_static_files() -> None:
    """So that browsers get them compressed, and keep them. Each time: they may be another version's."""
    if "WEIR_STATIC_ROOT" not in os.environ:  # else somebody sees to that place
        call_command("collectstatic", interactive=False, verbosity=0)


async def _ensure_model(plan: Plan) -> str:
    """The model's directory. In a process of its own: converting takes memory that the supervisor would keep."""
    command = plan.python(
        "model", "-m", "engine_worker.model_store", plan.model, str(plan.var_dir / "models")
    )
    process = await asyncio.create_subprocess_exec(
        *command.wrapped(), env=command.environ(), stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode != 0:
        raise StartError(f"the model {plan.model} can't be made ready, see above")
    return output.decode().strip()


async def _http_answers(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection(_connectable(host), port)
            try:
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                status = await reader.readline()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
    return status.startswith(b"HTTP/1.1 ") and not status.startswith(b"HTTP/1.1 5")


async def _engine_beats(broker: GatewayBroker, model_name: str) -> bool:
    try:
        return any(worker.model == model_name for worker in await broker.workers())
    except BrokerUnavailable:
        return False


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # The kernel drops the lock with the process, however it ends: a lock file that is left means nothing.
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise StartError(
                f"Weir is running already in {path.parent.parent} (process {file.read().strip() or 'unknown'}): "
                "stop it first, or give this one another WEIR_VAR_DIR and WEIR_PORT"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _check_disk(var_dir: Path) -> None:
    if shutil.disk_usage(var_dir).free < _FREE_BYTES_MIN:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(var_dir))


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartError(
                    f"port {port} on {host} is taken by another program: set WEIR_PORT"
                ) from error
            if error.errno == errno.EACCES:
                raise StartError(f"port {port} needs privileges: set WEIR_PORT to 1024 or more") from error
            raise StartError(
                f"WEIR_HOST is {host!r}, which is no address of this machine: {error}"
            ) from error


def _connectable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 - compared only
