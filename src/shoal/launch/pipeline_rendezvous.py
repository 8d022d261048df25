"""Machines that hold the stages of one model: they meet at a coordinator, get a place each, and begin again together when one is lost.

The coordinator's machine has the first stage, or the one that a scheduler places there, and keeps the run's folder. `PipelineRendezvous`
assigns the ranks, without waiting or sending; `PipelineHost` runs it on the coordinator's machine, and `PipelineMember` is one that joins.
Both start one process for their stage. Ranks are assigned over the run's transport, with its token and keys. The processes of the stages
connect through tunnels, for which each machine has a key pair: the coordinator gives the public keys to the machines of a start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from shoal.config import Run
from shoal.config.load import Override
from shoal.config.plugins import needed_by
from shoal.config.ranks import RankPlace, rank_environment
from shoal.config.received import Permissions, Redactor
from shoal.config.schema.engine import Pipeline
from shoal.errors import ShoalError
from shoal.files import make_folder, open_file
from shoal.launch import forkserver
from shoal.launch.engine_processes import ENDED, GLOO, LOST, NOT_FOUND, on_loopback
from shoal.launch.local import MOST_FAILURES
from shoal.process_exit import DECLINED
from shoal.protocol.messages import LONGEST_REASON, PROTOCOL
from shoal.protocol.worker_names import is_worker_name, with_ending
from shoal.runs import stage_placement
from shoal.runs.connections import TransportConnection
from shoal.runs.folder.run_directory import settings_text
from shoal.runs.invitation import Invitation, listen
from shoal.runs.live_objects import refuse_unknown_functions
from shoal.runs.welcome import configuration
from shoal.transports import Message, Request
from shoal.transports.addresses import Address, free_port, own_address_towards, parse, resolve
from shoal.transports.keys import is_key, new_keys
from shoal.transports.zeromq.tunnel import Tunnel, TunnelEnds
from shoal.worker.sender import ConnectionLostError

ASK, FAILED = "stage", "stage-failed"
"""Messages of a machine: asks for a rank; reports that it cannot run its stage."""
STAGES = "stages"
"""Reason for which a joining worker is refused: this coordinator assigns stages of a pipeline. The worker then asks for one."""
_ASK_S, _SILENT_S = 1.0, 6.0
"""How often a waiting machine asks, and the silence after which it counts as gone."""
_GRACE_S = 30.0
"""How long the others wait for a lost machine before they continue without it."""
_POLL_INTERVAL_S = 0.2
_GOODBYE_S = 5.0
_LONGEST_WORD = 64
_LARGEST = 8 << 20
_MOST_WAITING = 1000
"""The most machines that are remembered. Further ones wait until others have fallen silent."""


class WaitingMachine(NamedTuple):
    """A machine that asks for a rank."""

    name: str
    instance: str
    seen_at: float
    key: str = ""
    """Its public key, for the tunnel."""

    def is_there(self, now: float) -> bool:
        return now - self.seen_at < _SILENT_S


Choose = Callable[[Sequence[WaitingMachine]], Mapping[str, int]]
"""Assigns stages to machines, by instance; the coordinator's own is HERE. Raises ShoalError where no machine fits a stage."""
HERE = ""


class PipelineRendezvous:
    """The machines that wait, and the ranks and stages of those that take part. It does no I/O; time is passed in."""

    def __init__(self, expected: int, listed: Sequence[str], choose: Choose | None = None) -> None:
        """`expected`: machines besides the coordinator's; `listed`: their names, as far as known, in the order of the stages."""
        self.expected, self.listed, self.choose = expected, list(listed), choose
        self.members: dict[str, WaitingMachine] = {}
        self.places: dict[str, int] = {}
        """By instance: the ranks of the machines that take part."""
        self.keys: list[str] = []
        """The public keys of the machines that take part, by rank from 1."""
        self.stages: dict[str, int] = {}
        """By instance: the stages of the machines that take part."""
        self.missing = ""
        """Why the machines cannot begin: a stage that fits none of them."""
        self.start = 0
        """How often they have begun."""
        self.running = False
        self._lost_at = 0.0

    @property
    def size(self) -> int:
        return 1 + len(self.places)

    def ask(self, name: str, instance: str, last: int, now: float, key: str = "") -> int | None:
        """A machine asks, which last took part in start number `last`. Return its rank, or None: it must wait."""
        if len(self.members) >= _MOST_WAITING and instance not in self.members:
            self.members = {one.instance: one for one in self.members.values() if one.is_there(now)}
        if len(self.members) < _MOST_WAITING or instance in self.members:
            self.members[instance] = WaitingMachine(name, instance, now, key)
        return self.places.get(instance) if self.running and last < self.start else None

    def present(self, now: float) -> list[WaitingMachine]:
        """The waiting machines: those that the settings list, in that order, then the others in the order of arrival."""
        waiting = [one for one in self.members.values() if one.is_there(now)]
        return sorted(waiting, key=lambda one: self.listed.index(one.name) if one.name in self.listed else len(self.listed))

    def begin(self, now: float) -> bool:
        """Assign ranks, if all machines are present, or if a lost one has not returned in time. Return whether they begin."""
        present = self.present(now)
        late = self.start > 0 and present and now - self._lost_at > _GRACE_S
        if self.running or (len(present) < self.expected and not late):
            return False
        stages = self._chosen(present)
        if not stages:
            return False
        self.places = {instance: rank for rank, instance in enumerate((one for one in stages if one != HERE), 1)}
        self.keys = [self.members[instance].key for instance in self.places]
        self.stages, self.missing = dict(stages), ""
        self.start, self.running = self.start + 1, True
        return True

    def _chosen(self, present: Sequence[WaitingMachine]) -> Mapping[str, int]:
        """By instance: the stages. Empty where a stage fits no machine; one that joins later may fit."""
        if self.choose is None:
            return {HERE: 0} | {one.instance: number for number, one in enumerate(present[: self.expected], 1)}
        try:
            return self.choose(present)
        except ShoalError as problem:
            self.missing = str(problem)
            return {}

    def lost(self, now: float) -> None:
        """The processes ended early: the machines that are still present will ask again."""
        self.running, self._lost_at = False, now
        self.members.clear()


class StagePlacer:
    """A scheduler places the stages that the run's tasks are."""

    def __init__(self, run: Run) -> None:
        """Raises ShoalError where there are fewer machines than stages, or none fits this one, which keeps the run's folder."""
        self.run, self.stages = run, stage_placement.stages_of(run, *stage_placement.layers_and_vocabulary(run))
        self.here = run.cluster.server or "this machine"
        stage_placement.place_stages(run, [min(self.stages, key=lambda stage: stage.memory.gb)], {self.here: self.here})
        others, given = len(self.stages) - 1, run.cluster.num_workers
        if given is not None and given < others:
            raise ShoalError(f"the tasks are {others + 1} stages, each for a machine of its own, and {given} machines are to join this one")
        self.expected = given or others

    def choose(self, present: Sequence[WaitingMachine]) -> Mapping[str, int]:
        """The stage of each machine that has one. Those that have none are spares."""
        machines = {self.here: (HERE, self.here)}
        for machine in present:
            alike = sum(name == machine.name for _, name in machines.values())
            machines[machine.name if not alike else f"{machine.name} ({alike + 1})"] = (machine.instance, machine.name)
        names = {shown: name for shown, (_, name) in machines.items()}
        found = stage_placement.place_stages(self.run, self.stages, names, must_have=self.here)
        return {machines[found[stage.id]][0]: number for number, stage in enumerate(self.stages)}


class PipelineHost:
    """The coordinator's machine: answers the others, and runs one stage in a process."""

    def __init__(self, run: Run, hosts: tuple[str, ...], arguments: Sequence[str], tell: Callable[[str], None]) -> None:
        """`arguments`: those of `shoal train` for the process of the first stage."""
        self.run, self.hosts, self.arguments, self.tell = run, tuple(map(resolve, hosts)), list(arguments), tell
        placing = StagePlacer(run) if run.placed else None
        self._at_end = contextlib.ExitStack()
        state_path = run.coordinator.state_path or self._at_end.enter_context(tempfile.TemporaryDirectory(prefix="shoal-gathering-"))
        folder = Path(state_path)
        make_folder(folder)
        expected = placing.expected if placing else run.cluster.num_workers or 1
        self.server, self.invitation = listen(run, run.transport, hosts, folder, _LARGEST, expected)
        self.gathering = PipelineRendezvous(expected, run.cluster.workers, placing.choose if placing else None)
        self.text = settings_text(run)
        self.process: forkserver.ChildProcess | None = None
        self.port, self.public = 0, list[str]()
        """The port of this machine's tunnel, and the public keys of all machines by rank."""
        self.over, self.failed = False, ""
        self._not_found = 0
        """Starts in a row in which the machines did not reach each other."""
        self._shown_names: list[str] = []
        self._reported_missing = set[str]()

    def work(self) -> int:
        """Until the run is over; the exit code of the first stage. Raises ShoalError."""
        try:
            while (code := self._poll()) is None:
                pass
            self._answer_end()
        finally:
            self._end()
            self.server.close()
            self._at_end.close()
        if self.failed:
            raise ShoalError(self.failed)
        return code

    def stop(self) -> None:
        """Ask the first stage to stop: all stop after the same step. Before it has begun there is nothing to save."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        else:
            self.over = True

    def _poll(self) -> int | None:
        """Answer the machines, begin as soon as possible, and watch the process. Returns its exit code when the run is over."""
        for request in self.server.poll(_POLL_INTERVAL_S):
            self.server.reply(request, Message(self._answer(request)))
        if self.over or self.failed:
            return 130
        if self.process is None:
            self._show_who_waits()
            if self.gathering.begin(time.monotonic()):
                self._start()
            elif (missing := self.gathering.missing) and missing not in self._reported_missing:
                self._reported_missing.add(missing)
                self.tell(f"{missing}; waiting for a machine that can have it")
            return None
        if (code := self.process.poll()) is None:
            return None
        self._end()
        if code in ENDED:
            return code
        self._not_found = self._not_found + 1 if code == NOT_FOUND else 0
        if self._not_found >= MOST_FAILURES:
            self.failed = (
                f"the machines do not reach each other, {MOST_FAILURES} times in a row: each must reach those before it in the list"
            )
            return None
        self.gathering.lost(time.monotonic())
        self.tell(f"warning: a machine was lost: waiting {_GRACE_S:.0f} s for all to come back, then going on from the last checkpoint")
        return None

    def _start(self) -> None:
        gathering = self.gathering
        names = {HERE: "this machine"} | {one.instance: one.name for one in gathering.members.values()}
        order = sorted(gathering.stages, key=lambda instance: gathering.stages[instance])
        self.tell(f"{gathering.size} stages begin: {', '.join(names[instance] for instance in order)}")
        own, stage = new_keys(), gathering.stages[HERE]
        self.port, self.public = free_port(self.hosts[0]) or 0, [own.public, *gathering.keys]
        here = RankPlace(0, gathering.size, 0, 1, apart=True, stage=stage)
        environ = dict(os.environ) | rank_environment(here) | on_loopback(GLOO) | {"TORCHELASTIC_RESTART_COUNT": str(gathering.start - 1)}
        self.process = forkserver.start(["-m", "shoal", "train", *self.arguments], env=environ, start_new_session=True)
        address = str(Address("tcp", "127.0.0.1", self.port))
        _send_ends(self.process, TunnelEnds(own.secret, tuple(self.public), address), self.hosts)

    def _show_who_waits(self) -> None:
        names = [one.name for one in self.gathering.present(time.monotonic())]
        if names != self._shown_names and len(names) < self.gathering.expected:
            self.tell(f"{len(names)} of {self.gathering.expected} machines are here{': ' if names else ''}{', '.join(names)}")
        self._shown_names = names

    def _answer(self, request: Request) -> dict[str, Any]:
        header = request.message.header
        kind = header.get("kind")
        name, instance, last, key = (header.get(field) for field in ("name", "instance", "last", "key"))
        if kind == "join":
            return {"kind": "refused", "reason": STAGES, "detail": "this run gives out places in a pipeline"}
        if kind not in (ASK, FAILED) or not (_is_word(name) and is_worker_name(name) and _is_word(instance) and isinstance(last, int)):
            return {"kind": "refused", "reason": "malformed", "detail": "that is nothing that a machine of this run says"}
        if header.get("protocol") != PROTOCOL:
            detail = f"another version: this coordinator's shoal speaks version {PROTOCOL}; install the same version on both"
            return {"kind": "refused", "reason": "protocol", "detail": detail}
        if kind == FAILED:
            if instance in self.gathering.places:  # reports of machines without a stage are ignored
                self.failed = f"{name} cannot take part: {str(header.get('reason', ''))[:LONGEST_REASON]}"
            return {"kind": "noted"}
        if self.over or self.failed:
            return {"kind": "over", "reason": self.failed}
        if not (isinstance(key, str) and is_key(key)):
            return {"kind": "refused", "reason": "malformed", "detail": "a machine says the public key of its tunnel"}
        rank = self.gathering.ask(name, instance, last, time.monotonic(), key)
        if rank is None:
            return {"kind": "wait"}
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        place = {"rank": rank, "size": self.gathering.size, "port": self.port, "keys": self.public, "start": self.gathering.start}
        place["stage"] = self.gathering.stages[instance]
        return {"kind": "place", "config": self.text, "digest": digest, "plugins": needed_by(self.run)} | place

    def _answer_end(self) -> None:
        """Answer that the run is over, until all machines have asked or the time is up."""
        self.over, until = True, time.monotonic() + _GOODBYE_S
        asked: set[str] = set()
        while time.monotonic() < until and not asked >= set(self.gathering.places):
            for request in self.server.poll(_POLL_INTERVAL_S):
                asked.add(str(request.message.header.get("instance")))
                self.server.reply(request, Message(self._answer(request)))

    def _end(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.kill()
            self.process.wait()
            self.process = None


def _is_word(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_WORD and value.isprintable()


# --- the tunnel of a stage --------------------------------------------------------------------------------------


def _send_ends(process: forkserver.ChildProcess, ends: TunnelEnds, hosts: Sequence[str]) -> None:
    """Send the process of a stage what it needs for its tunnel. It has a secret, so it is in no argument, file or environment."""
    with contextlib.suppress(OSError):  # the process has ended already
        forkserver.write_line(process, json.dumps([*ends, list(hosts)]))


def tunnel_for(run: Run, here: RankPlace, line: str, on_lost: Callable[[int], None]) -> Tunnel:
    """The tunnel of a stage's process, which was sent this line. Raises ShoalError."""
    assert isinstance(run.engine, Pipeline)
    try:
        secret, public, address, hosts = json.loads(line)
    except ValueError:
        raise ShoalError("a stage of a pipeline over machines is started by `shoal coordinate` or `shoal join`") from None
    return Tunnel(here.rank, TunnelEnds(secret, tuple(public), address), hosts, run.engine.timeout_s, on_lost)


# --- a machine that joins ------------------------------------------------------------------------------------


class OwnSettings(NamedTuple):
    """What the user of a machine that joins has set and allowed."""

    overrides: Sequence[Override] = ()
    permissions: Permissions = Permissions()
    functions: Sequence[str] = ()
    """Functions that the run may call here."""
    agree: Callable[[Run], bool] = lambda run: True
    """Shows the user what the run asks of this machine; whether the user agrees."""


class PipelineMember:
    """A machine that joins: asks for a rank, and runs its stage in a process."""

    def __init__(self, invitation: Invitation, name: str, own: OwnSettings, patience_s: float) -> None:
        self.invitation, self.name, self.own = invitation, with_ending(name, ""), own
        self.line = TransportConnection(invitation.address, invitation.token, invitation.key)
        self.instance, self.patience_s = secrets.token_hex(8), patience_s
        self.keys = new_keys()
        self.last = 0
        """The start in which this machine last took part."""
        self.process: forkserver.ChildProcess | None = None
        self.stopping = self.agreed = False

    def stop(self) -> None:
        """Leave. The other machines notice, and continue without this one after a while."""
        self.stopping = True
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def work(self, tell: Callable[[str], None]) -> int:
        """Until the run is over; the exit code. Raises ShoalError."""
        tell(f"joined as {self.name}: waiting for a place in the pipeline")
        try:
            while not self.stopping:
                place = self._place()
                if place is None:
                    return 0
                if (code := self._computed(place, tell)) == DECLINED:
                    return code
                if code in (0, 130):
                    tell("the run is over" if code == 0 else "the run was interrupted: the coordinator's machine has its last checkpoint")
                    return code
                if not self.stopping:
                    tell("a machine was lost: waiting for the next start")
            return 130
        finally:
            self.line.close()

    def _place(self) -> Mapping[str, Any] | None:
        """A place, as soon as there is one; None: the run is over. Raises ShoalError."""
        heard_at = time.monotonic()
        while not self.stopping:
            try:
                answer = self._call(ASK)
                heard_at = time.monotonic()
            except ConnectionLostError as problem:
                if time.monotonic() - heard_at > self.patience_s:
                    raise ShoalError(f"the coordinator has not answered for {self.patience_s:.0f} s: {problem}") from None
                answer = {"kind": "wait"}
            if answer["kind"] == "refused":
                raise ShoalError(f"the coordinator refused: {answer.get('detail')}")
            if answer["kind"] == "over" and answer.get("reason"):
                raise ShoalError(f"the run is over: {answer['reason']}")
            if answer["kind"] != "wait":
                return None if answer["kind"] == "over" else answer
            time.sleep(_ASK_S)
        return None

    def _call(self, kind: str, **more: Any) -> dict[str, Any]:
        header = {"kind": kind, "name": self.name, "instance": self.instance, "last": self.last, "protocol": PROTOCOL}
        header["key"] = self.keys.public
        return self.line.call(header | more, (), _SILENT_S).header

    def _computed(self, place: Mapping[str, Any], tell: Callable[[str], None]) -> int:
        """Have a process be the stage, and wait for its end; its exit code. Raises ShoalError where it could not do its part."""
        _check_place(place)
        self.last = place["start"]
        try:
            run = configuration(dict(place), self.own.overrides, self.own.permissions)
            refuse_unknown_functions(run, self.own.functions)
            self.agreed = self.agreed or self.own.agree(run)
            if not self.agreed:
                self.stopping = True
                return DECLINED
            tell(f"this machine is stage {place['stage'] + 1} of {place['size']}")
            with tempfile.TemporaryDirectory(prefix="shoal-stage-") as folder:
                (Path(folder) / "config.yaml").write_text(settings_text(run), encoding="utf-8")
                code, said = self._run(Path(folder), place, run)
            if code == 2:
                raise ShoalError(said)
        except ShoalError as problem:
            self._call(FAILED, reason=Redactor(str(place["config"]))(str(problem)))
            raise
        return code

    def _run(self, folder: Path, place: Mapping[str, Any], run: Run) -> tuple[int, str]:
        host = parse(self.invitation.address).host
        ends = TunnelEnds(self.keys.secret, tuple(place["keys"]), str(Address("tcp", host, place["port"])))
        here = RankPlace(place["rank"], place["size"], 0, 1, apart=True, stage=place["stage"])
        environ = dict(os.environ) | rank_environment(here) | on_loopback(GLOO)
        environ["HF_TOKEN"] = run.hub.token.reveal() if run.hub.token else ""  # only for names that this machine's user allowed
        with open_file(folder / "log", "wb", private=True) as log:
            command = ["-m", "shoal", "train", "--resume", "--run-dir", str(folder)]
            self.process = forkserver.start(command, env=environ, stdout=log, stderr=log, start_new_session=True)
            _send_ends(self.process, ends, [own_address_towards(host) or "127.0.0.1"])
            code = self.process.wait()
            self.process.stdin.close()
        said = (folder / "log").read_text(encoding="utf-8", errors="replace").strip()
        return (LOST if code not in ENDED else code), said.rpartition("\n")[2].removeprefix("error: ")


def _check_place(place: Mapping[str, Any]) -> None:
    """Raises ShoalError where the coordinator sent something that is no place in a pipeline."""
    rank, size, stage, port, start = (place.get(name, -1) for name in ("rank", "size", "stage", "port", "start"))
    keys = place.get("keys")
    if not (
        all(type(number) is int for number in (rank, size, stage, port, start))
        and isinstance(keys, list)
        and 0 < rank < size == len(keys)
        and stage in range(size)
        and port in range(1, 1 << 16)
        and all(isinstance(key, str) and is_key(key) for key in keys)
    ):
        raise ShoalError("the coordinator sent no place in a pipeline: a rank, a stage, a port and the public key of each machine")
