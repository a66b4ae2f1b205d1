"""The control actor's table and rules, with a clock of the test and without Ray."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from remote_models import model
from torchrl_llm_kl.service import ServiceClosedError, ServiceConfigError
from torchrl_llm_kl.service.control import _actor, _membership, _table
from torchrl_llm_kl.service.control._actor import ControlActor
from torchrl_llm_kl.service.control._membership import Member, Memberships, client_name
from torchrl_llm_kl.service.control._spec import HeldModel
from torchrl_llm_kl.service.control._table import HUNG, MISSING, READY, Control, Plan, Scaling

ray = pytest.importorskip("ray")
CONFIG = {"name": "service:0", "model": "A", "max_wait": 0.1}
OTHER = {**CONFIG, "model": "B"}
HERE = {"job": "01", "worker": "ff", "driver": True}


class Lab:
    """A control table with replicas that do what a test says."""

    def __init__(self, **plan):
        self.now, self.lives = 1000.0, 0
        scaling = Scaling(wait=3, hold=10, idle=300)
        self.control = Control(Plan("service", **plan), clock=lambda: self.now, scaling=scaling)

    @classmethod
    def running(cls, **plan):
        """With a client and its first replica."""
        lab = cls(**plan)
        lab.join()
        lab.up()
        return lab

    def join(self, client="client", **options):
        return self.control.join(client, HERE, **{"config": CONFIG, **options})

    def start(self, replica=0):
        """A new process of a replica asks for leave."""
        self.lives += 1
        return self.control.starting(replica, f"life {self.lives}")

    def ready(self, replica=0, **facts):
        return self.control.ready(replica, f"life {self.lives}", {"fingerprint": "f", "version": 0, **facts})

    def up(self, replica=0, **facts):
        self.start(replica)
        assert self.ready(replica, **facts) == ""

    def state(self, replica=0):
        return self.control.slots[replica].state

    def wait(self, seconds, *, beat=True, gone=(), **pulses):
        """Let time pass; replicas named ``r0``, ``r1``, ... answer each second with these facts, clients too if they beat."""
        done = []
        for _ in range(int(seconds)):
            self.now += 1
            for replica, slot in self.control.slots.items():
                if slot.state != MISSING and slot.asked is None:
                    self.control.asked(replica)
            for name, facts in pulses.items():
                slot = self.control.slots[int(name[1:])]
                if slot.state != MISSING:
                    self.control.pulse(int(name[1:]), {"life": slot.life, "fingerprint": "f", **facts})
            for client in self.control.clients if beat else ():
                self.control.hold(client, HERE, 0)
            for what, replica in self.control.tick(gone):
                done.append((what, replica))
                if what == "retire":
                    self.control.retired(replica)
        return done


def test_the_first_client_sets_the_configuration_and_others_must_share_it():
    lab = Lab()
    assert lab.join()["incarnation"] == 1
    lab.up()
    lab.join("other", new=True)
    message = r"'service:0' is in use with another configuration: model: it has 'A', req"
    with pytest.raises(ServiceConfigError, match=message):
        lab.join("third", config=OTHER, new=True)
    assert set(lab.control.clients) == {"client", "other"}


def test_a_configuration_is_replaced_once_nothing_runs_and_nobody_uses_it():
    lab = Lab()
    lab.join(new=True)
    lab.start()
    lab.control.failed(0, "life 1", "OSError: no checkpoint")
    with pytest.raises(ServiceConfigError):
        lab.join("other", config=OTHER, new=True)
    assert lab.join(config=OTHER, new=True)["incarnation"] == 2
    with pytest.raises(ServiceClosedError, match="incarnation 2, not 1"):
        lab.join("other", incarnation=1)


@pytest.mark.parametrize("detached", [False, True])
def test_the_last_client_ends_the_service_unless_it_is_detached(detached):
    lab = Lab(detached=detached)
    lab.join("a")
    lab.join("b")
    lab.up()
    lab.control.release("a", 0)
    assert lab.control.tick() == []
    lab.control.release("b", 0)
    assert lab.control.tick() == ([] if detached else [("end", 0)])
    assert bool(lab.join("c")["ended"]) is not detached


JOIN, RELEASE, BEAT = "join", "release", "beat"


@pytest.mark.parametrize(
    ("messages", "ends"),
    [
        ([(JOIN, "a", 1), (RELEASE, "a", 1), (BEAT, "a", 1)], True),  # a heartbeat before the release renews nothing
        ([(JOIN, "a", 1), (JOIN, "a", 2), (RELEASE, "a", 1)], False),  # the newer lease stays
        ([(RELEASE, "a", 1), (JOIN, "a", 1), (JOIN, "b", 1), (RELEASE, "b", 1)], True),  # a join after its release
    ],
    ids=["heartbeat", "newer lease", "join"],
)
def test_messages_that_overtake_each_other(messages, ends):
    lab = Lab()
    for what, client, lease in messages:
        if what == JOIN:
            lab.join(client, lease=lease)
        elif what == RELEASE:
            lab.control.release(client, lease)
        else:
            lab.control.hold(client, HERE, 0, lease)
    assert lab.control.tick() == ([("end", 0)] if ends else [])


def test_a_client_of_an_ended_incarnation_does_not_join_the_next():
    lab = Lab()
    lab.join("new", incarnation=2)
    before = lab.control.version
    told = lab.control.hold("idle", HERE, before, 5, 1)
    assert (told["ended"], told["incarnation"]) == ("it was shut down; the name has another one, incarnation 2", 2)
    assert set(lab.control.clients) == {"new"}
    lab.control.release("new", 9, 1)
    assert lab.control.tick() == [], "an earlier lease of the same process"
    assert lab.control.hold("new", HERE, before, 0, 2) is None
    lab.control.release("new", 9, 2)
    assert lab.control.tick() == [("end", 0)]
    lost = Lab()  # an actor that lost its table learns the incarnation from clients
    assert lost.control.hold("client", HERE, lost.control.version, 1, 4) is None
    assert (lost.control.incarnation, set(lost.control.clients)) == (4, {"client"})


def test_heartbeats_end_with_the_incarnation(monkeypatch):
    """A client that is idle while its service is shut down and another takes the name."""
    lab, beats = Lab(), list[tuple[Any, ...]]()
    lab.join("new", incarnation=2)

    def hold(*args):
        beats.append(args)
        return lab.control.hold(*args)

    monkeypatch.setattr(ray, "get", lambda value, timeout=None: value)
    monkeypatch.setattr(_membership, "cluster", lambda: "cluster")
    monkeypatch.setattr(_membership, "whereabouts", lambda: HERE)
    remote = SimpleNamespace(hold=SimpleNamespace(remote=hold), deposit=None)  # of the incarnation that ended
    idle, busy = (
        Member(Plan("service"), "cluster", i, table={"version": 0}, lease=i, control=remote, session="session")
        for i in (1, 2)
    )
    idle.held = HeldModel(model())
    members = Memberships()
    members._members.update(idle=idle, busy=busy)
    for _ in range(3):
        members._beat("session")
    assert [args[3:] for args in beats] == [(1, 1), (2, 2), (2, 2), (2, 2)]
    assert "it was shut down" in idle.table["ended"]
    assert busy.table == lab.control.table()
    assert lab.control.clients[client_name()].lease == 2


def test_a_model_by_value_of_an_ended_incarnation_is_not_kept(monkeypatch):
    monkeypatch.setattr(ray, "put", lambda value: value)
    lab = Lab()
    lab.join(incarnation=2, new=True)
    actor = object.__new__(ControlActor)
    actor._control, actor._lock, actor._model = lab.control, threading.RLock(), None
    actor.deposit(b"old", 1)
    assert (actor.model(), lab.control.has_model) == ([], False)
    actor.deposit(b"new", 2)
    actor.deposit(b"old", 1)
    assert (actor.model(), lab.control.has_model) == ([b"new"], True)
    replaced = lab.join(config=OTHER, new=True)
    assert (replaced["incarnation"], replaced["has_model"], actor.model()) == (3, False, []), "another configuration"


def test_a_silent_client_keeps_its_lease_until_ray_reports_its_end():
    lab = Lab(lease=600.0)
    lab.join()
    assert lab.wait(_table.GRACE - 1, beat=False, gone=("client",)) == [], "it may be about to connect again"
    assert lab.wait(300, beat=False) == [], "stopped, not gone: without any word from Ray its lease ends after 600 s"
    assert lab.control.silent_clients() == {"client": HERE}
    lab.control.hold("client", HERE, 0)
    assert not lab.control.silent_clients()
    assert lab.wait(_table.GRACE + 1, beat=False, gone=("client",))[0] == ("end", 0)
    for joins in (True, False):  # a lease that nobody renews, and a service that nobody ever joins
        lab = Lab(lease=100.0)
        if joins:
            lab.join()
        assert lab.wait(99, beat=False) == []
        assert lab.wait(3, beat=False)[0] == ("end", 0)


def test_time_in_which_the_control_actor_itself_is_stopped_does_not_count():
    lab = Lab.running(lease=100.0, hang_after=60.0)
    lab.now += 500
    assert lab.control.tick(gone=["client"]) == []
    assert lab.state() == READY


def test_a_factory_that_ends_its_process_is_called_three_times_with_growing_pauses():
    lab = Lab()
    lab.join(new=True)
    pauses = []
    for _ in range(3):
        start = lab.start()
        assert not start.refusal
        pauses.append(start.pause)
        lab.now += start.pause + 1
    assert pauses == [0.0, 1.0, 2.0]
    refused = lab.start().refusal
    assert "service:0 failed to start 3 times within 5 s: its process ended before the model was made" in refused
    assert lab.state() == _table.FAILED
    assert lab.start().refusal == refused, "until someone constructs the service again"
    lab.join(new=True)
    for _ in range(3):
        assert lab.start().refusal == ""
        lab.control.failed(0, f"life {lab.lives}", "OSError: no such checkpoint")
    assert "its factory raised OSError: no such checkpoint" in lab.start().refusal


def test_what_forgives_failed_starts():
    """A success, and time; a process that dies with its model is none."""
    lab = Lab()
    lab.join(new=True)
    for _ in range(5):
        for _ in range(2):
            lab.start()
            lab.now += 10
        lab.up()
    for _ in range(10):
        assert lab.start().refusal == ""
        lab.now += 301  # seldom: two within a window at most
    assert lab.control.slots[0].starts == lab.lives
    for _ in range(10):
        lab.up()
        lab.control.lost(0)
        assert lab.state() == MISSING
    assert lab.start().pause == 0


def test_a_restarted_replica_must_have_the_weights_of_the_first():
    lab = Lab(slots=2, least=2)
    lab.join()
    lab.up(0, fingerprint="one")
    assert lab.join()["fingerprint"] == "one"
    lab.start(1)
    refused = lab.ready(1, fingerprint="two")
    assert "loaded other weights (fingerprint two) than the first replica of the service (one)" in refused
    assert lab.state(1) == _table.FAILED
    for facts, fine in (
        ({"fingerprint": "two", "version": 3}, False),  # some of them were pushed
        ({"fingerprint": "two", "version": 3, "replaced": True}, True),  # pushed weights replaced them all
        ({"fingerprint": "one"}, True),
    ):
        lab.start(1)
        assert (lab.ready(1, **facts) == "") == fine, facts


def test_expected_weights():
    _table.check_expected("a", "a", "service")
    _table.check_expected(None, "a", "service")
    for found in ("b", None):
        with pytest.raises(ServiceConfigError, match="expected a: pass the checkpoint's fingerprint_of"):
            _table.check_expected("a", found, "service")


def test_a_silent_replica_is_avoided_then_started_again():
    lab = Lab.running(slots=2, least=2, hang_after=60.0)
    lab.up(1)
    before = lab.control.version
    assert lab.wait(12, r1={}) == []
    assert (lab.state(0), lab.state(1)) == (HUNG, READY)
    assert lab.control.version > before, "clients get the new table"
    assert lab.wait(50, r1={}) == [("restart", 0)]
    assert lab.wait(50, r1={}) == [], "once"
    lab.up(0)
    assert lab.state(0) == READY
    assert lab.wait(20, r1={}) == []
    assert (lab.state(0), lab.wait(1, r0={}, r1={}), lab.state(0)) == (HUNG, [], READY), "it answers again"
    assert lab.wait(3, r0={"hung": True}, r1={}) == [("restart", 0)], "its model hangs: at once"


@pytest.mark.parametrize("hang_after", [0.5, 60.0])
def test_answers_that_are_collected_late_are_no_silence(hang_after):
    """The control actor sends a pulse, looks once a second for the answer, and sends the next one a second after that."""
    lab = Lab.running(hang_after=hang_after)
    for _ in range(100):
        lab.control.asked(0)
        for _ in range(2):
            lab.now += 1.1
            assert (lab.control.tick(), lab.state()) == ([], READY)
        lab.control.pulse(0, {"life": "life 1", "fingerprint": "f"})
        lab.control.hold("client", HERE, 0)
        lab.now += 1.1
        assert lab.control.tick() == []
        assert lab.state() == READY
    lab.now += 8.0
    lab.control.tick()
    assert lab.state() == READY, "nobody asked"


def test_a_pulse_that_was_sent_before_a_replica_was_ready_is_still_awaited():
    lab = Lab(hang_after=1.0)
    lab.join()
    lab.start()
    lab.control.asked(0)
    assert lab.wait(30) == []
    assert lab.ready() == ""
    assert lab.wait(3) == []
    assert lab.wait(5) == [("restart", 0)], "three seconds after its last sign of life"


def test_a_lost_table_is_rebuilt_from_the_replicas():
    lab = Lab(slots=3, least=1)
    lab.join()
    facts = {"config": CONFIG, "fingerprint": "f", "incarnation": 4, "version": 7, "starts": 3}
    for replica in (0, 2):
        lab.control.found(replica)
        assert lab.state(replica) == _table.PENDING
        lab.control.pulse(replica, {**facts, "life": f"old {replica}"})
    table = lab.join("another", incarnation=4)
    assert table["states"] == {0: READY, 1: MISSING, 2: READY}
    assert (table["incarnation"], table["fingerprint"], table["newest"], table["scale"]) == (4, "f", 7, 3)
    assert lab.start(0).starts == 4
    with pytest.raises(ServiceConfigError):
        lab.join("third", config=OTHER, new=True)


def test_a_replica_that_stood_still_before_the_table_was_lost():
    """It never answers: only Ray knows that it is not starting."""
    lab = Lab(hang_after=30.0)
    lab.join()
    lab.control.found(0)
    assert lab.control.unheard() == []
    assert lab.wait(9) == []
    assert lab.control.unheard() == []
    lab.wait(2)
    assert (lab.control.unheard(), lab.state()) == ([0], _table.PENDING)
    assert lab.wait(100) == [], "it may be starting"
    lab.control.stopped(0)
    assert lab.wait(1) == [("restart", 0)]
    lab.control.lost(0)
    lab.up()
    lab.control.stopped(0)
    assert lab.state() == READY


def test_clients_get_the_table_of_an_actor_that_was_started_again(monkeypatch):
    """Its version must not be the one that they have, or nobody would give it the model again."""
    monkeypatch.setattr(_actor, "_kept", lambda *name: {})
    monkeypatch.setattr(_actor, "ended", lambda *name: 0)
    monkeypatch.setattr(_actor, "_put", lambda *entry: None)
    monkeypatch.setattr(ControlActor, "_rebuild", lambda self: None)
    monkeypatch.setattr(ControlActor, "_run", lambda self: None)
    version = ControlActor(Plan("service")).join("client", HERE, config=CONFIG)["version"]
    assert ControlActor(Plan("service")).hold("client", HERE, version, 1, 1)["version"] != version


def test_quarantined_requests_are_bounded():
    control = Lab().control
    control.quarantine(str(i) for i in range(3000))
    assert list(control.quarantined) == [str(i) for i in range(3000 - 1024, 3000)]
    before = control.version
    control.quarantine(["2999"])
    assert control.version == before


BUSY = {"queue_tokens": 40_000, "tokens_per_second": 10_000.0, "busy_share": 1.0}
IDLE = {"queue_tokens": 0, "tokens_per_second": 10_000.0, "busy_share": 0.1}


SCALED = {"slots": 3, "least": 1, "detached": True}


def test_a_long_queue_adds_a_replica_and_idle_minutes_remove_it():
    lab = Lab.running(**SCALED)
    for seconds, scale, told in (
        (9, 1, False),
        (3, 2, True),
        (60, 2, False),
    ):  # not at once; then one, until it is there
        before = lab.control.version
        lab.wait(seconds, r0=BUSY)
        assert (lab.control.scale, lab.control.version > before) == (scale, told)
    lab.up(1)
    lab.wait(200, r0=IDLE, r1=IDLE)
    assert lab.control.scale == 2
    assert lab.wait(120, r0=IDLE, r1=IDLE) == [("retire", 1)]
    assert (lab.control.scale, lab.state(1)) == (1, MISSING)
    lab.wait(12, r0=BUSY)
    lab.up(1)
    lab.wait(301, r0=IDLE, r1=IDLE)
    assert lab.state(1) == _table.DRAINING, "it finishes its requests"
    assert lab.wait(100, r0=IDLE, r1={**IDLE, "queue_tokens": 5}) == []
    assert lab.wait(1, r0=IDLE, r1=IDLE) == [("retire", 1)]


def test_the_number_does_not_swing():
    lab = Lab.running(**SCALED)
    for _ in range(20):
        lab.wait(8, r0=BUSY)
        lab.wait(8, r0=IDLE)
    assert lab.control.scale == 1
    lab.wait(12, r0=BUSY)
    lab.up(1)
    half = {**IDLE, "busy_share": 0.4}
    lab.wait(2000, r0=half, r1=half)
    assert lab.control.scale == 2, "one alone would be busy for 80% of the time"


EVENTS = {
    "start": Lab.start,
    "ready": lambda lab, i: lab.ready(i, fingerprint=None),
    "answer": lambda lab, i: lab.wait(1, **{f"r{i}": {}}),
    "refuse": lambda lab, i: lab.control.quarantine(["digest"]),
    "fail": lambda lab, i: lab.control.failed(i, lab.control.slots[i].life, "error"),
    "lose": lambda lab, i: lab.control.lost(i),
    "find": lambda lab, i: lab.control.found(i),
    "stop": lambda lab, i: lab.control.stopped(i),
    "free": lambda lab, i: lab.control.freed(i),
    "busy": lambda lab, i: lab.wait(15, **{f"r{i}": BUSY}),
    "idle": lambda lab, i: lab.wait(310, **{f"r{i}": IDLE}),
    "silent": lambda lab, i: lab.wait(100),
}
STATES = {MISSING, _table.PENDING, _table.STARTING, READY, HUNG, _table.BACKING_OFF, _table.FAILED, _table.DRAINING}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(sorted(EVENTS))), max_size=40))
@example([(0, "start"), (0, "ready"), (0, "answer")])
def test_any_order_of_events_keeps_the_table_sound(events):
    """No event changes what clients see without a new version of the table."""
    lab = Lab(**SCALED)
    lab.join()
    for replica, event in events:
        before = lab.control.table()
        EVENTS[event](lab, replica)
        after = lab.control.table()
        changed = {key for key in after if after[key] != before[key]} - {"version", "newest"}
        assert not changed or after["version"] > before["version"], (event, changed)
        assert after["version"] >= before["version"]
        assert 1 <= lab.control.scale <= 3
        assert set(after["states"].values()) <= STATES
        assert not after["ended"], "it is detached"
