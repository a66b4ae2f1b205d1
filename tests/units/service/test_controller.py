"""The controller of a service, with actors of this process and a clock that jumps to what is awaited next."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from torchrl_llm_kl.service import ServiceClosedError, ServiceConfigError, _controller
from torchrl_llm_kl.service._controller import FAILED, GRACE, MAX_TRIALS, PENDING, READY, SILENT, STARTING, Controller
from torchrl_llm_kl.service._spec import ServiceSpec

ray = pytest.importorskip("ray")
DIES, GONE = ray.exceptions.RayActorError(), ray.exceptions.ActorDiedError()  # Ray starts it again, or does not
NUMBERS = itertools.count()
LEFT, DIED = ray.exceptions.TaskCancelledError(), ray.exceptions.OwnerDiedError("", None, "")  # ends of a client


class Loop(asyncio.SelectorEventLoop):
    """The loop of these tests: its time passes at once while all wait for it."""

    def __init__(self):
        super().__init__()
        self.now, select = 0.0, self._selector.select

        def jump(timeout=None):
            assert timeout is not None, "nothing can happen any more"
            self.now += timeout
            return select(0)

        self._selector.select = jump

    def time(self):
        return self.now


def now():
    return asyncio.get_running_loop().time()


@pytest.fixture(autouse=True)
def cluster(monkeypatch):
    """What is asked of Ray."""

    async def to_thread(call, *args):
        return call(*args)

    found = SimpleNamespace(ran=[], keeper=Actor())
    run = SimpleNamespace(options=lambda **given: SimpleNamespace(remote=lambda: found.ran.append(given)))
    me = SimpleNamespace(run=run, end=found.ran.append)
    monkeypatch.setattr(ray, "put", lambda value: f"reference of {value}")
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: actor.end(no_restart))
    context = SimpleNamespace(current_actor=me, was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(_controller, "time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr(_controller, "actor_of", lambda spec, suffix: {"weights": found.keeper}[suffix])
    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    return found


class Actor:
    """A replica. Each of ``lives`` is how the start of a process ends: with these facts, or an error, after ``seconds``."""

    def __init__(self, *lives):
        self.lives, self.ends = list(lives), []
        self.news, self.given = {}, []
        self.stopped = self.closed = False
        self.error = None  # of the next call
        calls = (self._pulse, self._start, self._close)
        self.pulse, self.start, self.close = (SimpleNamespace(remote=call) for call in calls)
        self.begin()

    def begin(self):
        self.stopped = False
        self.facts = {"life": f"life {next(NUMBERS)}", "ready": False, "starts": 0, "failure": None}
        self.facts |= {"fingerprint": None, "replaced": False}

    def end(self, no_restart):
        """As ``ray.kill`` does."""
        self.ends.append("for good" if no_restart else "to start again")
        self.begin()

    async def _pulse(self, news):
        life = self.facts["life"]
        while self.stopped:
            await asyncio.sleep(0.1)
        if self.facts["life"] != life:  # it was ended before it answered
            raise DIES
        self.news |= news
        if self.error is not None:
            error, self.error = self.error, None
            self.begin()
            raise error
        return dict(self.facts)

    async def _start(self, model, starts):
        self.given.append(model)
        life, mark = {"fingerprint": "f", **(self.lives.pop(0) if self.lives else {})}, self.facts["life"]
        await asyncio.sleep(life.pop("seconds", 0.0))
        while self.stopped:
            await asyncio.sleep(0.1)
        if self.facts["life"] != mark:
            raise DIES
        self.error = life.pop("error", None)
        self.facts |= {"ready": True, "starts": starts, **life}
        return await self._pulse({})

    async def _close(self):
        while self.stopped:
            await asyncio.sleep(0.1)
        self.closed = True


class Lab:
    """A controller and its replicas, whose processes end as listed."""

    def __init__(self, *lives, actors=(), model=False, hang_after=300.0, **spec):
        self.actors = list(actors) or [Actor(*each) for each in lives or [()]]
        given = {"num_replicas": len(self.actors), "factory": None if model else b"factory", "id": "mine", **spec}
        self.spec = ServiceSpec("s", "source", {"hang_after": hang_after}, **given)
        self.made = []
        self.it = Controller(self.spec, create=self.create, alive=False)
        self.running = asyncio.ensure_future(self.it.run())

    def create(self, spec, replica):
        self.made.append(replica)
        return self.actors[replica]

    async def client(self, name="client"):
        """A future that ends the client with an error."""
        self.held = asyncio.ensure_future(self.it.hold(name))
        end = asyncio.get_running_loop().create_future()
        self.watching = asyncio.ensure_future(self.it.watch(name, [end]))
        await asyncio.sleep(0)
        return end

    async def construct(self, **config):
        return await self.it.join({**self.spec.config, **config}, "", new=True)

    def states(self):
        return [slot.state for slot in self.it.slots]

    async def later(self, seconds):
        """The states after so many seconds."""
        await asyncio.sleep(seconds)
        return self.states()

    async def ended(self, seconds):
        """Why the service has ended after so many seconds."""
        await asyncio.sleep(seconds)
        return self.it.ended

    def error(self, replica=0):
        assert self.states()[replica] == FAILED
        assert self.actors[replica].ends == ["for good"]
        return self.it.slots[replica].error


async def begun(*lives, after=0.0, **spec):
    """A lab that has had a client for so many seconds."""
    lab = Lab(*lives, **spec)
    await lab.client()
    await asyncio.sleep(after)
    return lab


async def test_replicas_are_started_and_told_the_news():
    lab = await begun((), ({"seconds": 400.0},))
    assert await lab.later(0.1) == [READY, STARTING], "a model may take long to load"
    await asyncio.sleep(401)
    expected = {"id": "mine", "replicas": lab.actors, "ended": "", "states": [READY] * 2, "errors": [None] * 2}
    expected |= {"starts": [1, 1], "fingerprint": "f", "has_model": False, "clients": 1}
    assert await lab.it.join(lab.spec.config, "mine") == await lab.construct() == expected
    assert [(each.given, each.news) for each in lab.actors] == [([[]], {"clients": 1, "refused": []})] * 2


async def test_errors_of_a_client_that_joins_are_values():
    lab = Lab()
    other = await lab.it.join(lab.spec.config, "an earlier one", new=True)
    assert isinstance(other, ServiceClosedError)
    assert "'s' was shut down; the one of that name now is another" in str(other)
    differs = await lab.construct(model="other")
    assert isinstance(differs, ServiceConfigError)
    assert "model: it has 'source', requested 'other'" in str(differs)


FAILURES = {
    "no such checkpoint": {"failure": OSError("no such checkpoint")},
    "a fault": {"error": RuntimeError("a fault")},
    "loaded other weights (fingerprint two) than the first replica of the service (f)": {"fingerprint": "two"},
}


@pytest.mark.parametrize("message", FAILURES)
async def test_a_replica_that_fails_is_started_again_by_a_constructor_only(message):
    lab = await begun((), ({"seconds": 1.0, **FAILURES[message]},), after=2)
    assert message in str(lab.error(1))
    await asyncio.sleep(100)
    await lab.it.join(lab.spec.config, "mine")
    assert (await lab.later(100), lab.made) == ([READY, FAILED], [0, 1])
    table = await lab.construct()
    assert (table["states"], table["errors"]) == ([READY, PENDING], [None, None])
    assert (await lab.later(1), lab.made) == ([READY, READY], [0, 1, 1])


async def test_a_replica_whose_pushed_weights_replaced_all_loaded_ones_may_differ():
    lab = Lab((), ({"fingerprint": "two", "replaced": True},), ({"fingerprint": None},))
    assert (await lab.later(1), lab.it.fingerprint) == ([READY] * 3, "f")


@pytest.mark.parametrize("error", [DIES, GONE], ids=["Ray restarts it", "Ray does not"])
async def test_a_process_that_dies_while_it_starts_is_started_three_times(error):
    lab = await begun(({"error": error},) * 3)
    for seconds, starts in ((1.0, 1), (2.3, 2), (0.2, 3)):  # pauses of 1 and 2 seconds, and 0.2 before each start
        assert lab.states() != [FAILED]
        await asyncio.sleep(seconds)
        assert lab.it.slots[0].starts == starts
    assert "replica s:0 failed to start 3 times within 3 s: its process ended before the model" in str(lab.error())
    assert len(lab.made) == (3 if error is GONE else 1)


@pytest.mark.parametrize(
    ("lives", "state"),
    [
        ([{"error": DIES}] * 2, READY),
        ([{"error": DIES}] * 2 + [{"seconds": 700.0, "error": DIES}, {"error": DIES}], READY),
        ([{"seconds": 301.0, "error": DIES}] * 9, READY),  # two within ten minutes
        ([{"seconds": 290.0, "error": DIES}] * 3, FAILED),
    ],
)
async def test_deaths_of_ten_minutes_ago_are_forgiven(lives, state):
    lab = await begun(lives)
    assert await lab.later(3600) == [state]


@pytest.mark.parametrize("error", [DIES, GONE], ids=["Ray restarts it", "Ray does not"])
async def test_a_process_that_dies_with_its_model_is_always_replaced(error):
    """A start that succeeds forgives earlier deaths, too."""
    lab = await begun([{"error": DIES}, {"error": DIES}, {}] * 5)
    for number in range(1, 6):
        assert (await lab.later(5), lab.it.slots[0].life) == ([READY], lab.actors[0].facts["life"])
        assert lab.it.slots[0].starts == 3 * number
        lab.actors[0].error = error
    assert len(lab.made) == (5 if error is GONE else 1)


async def test_a_process_that_dies_between_two_pulses_is_replaced():
    """Ray gives a call that is made before the next process exists to that one: no call fails."""
    lab = await begun([{}, {}, {}], ())
    for number in range(1, 4):
        assert await lab.later(5) == [READY, READY]
        assert (lab.it.slots[0].starts, len(lab.actors[0].given)) == (number, number)
        assert lab.actors[0].facts["ready"]
        lab.actors[0].begin()


class NotMade(ray.exceptions.ActorDiedError):
    """Its constructor failed."""

    actor_init_failed = True


async def test_an_actor_that_cannot_be_created():
    actor, dying = Actor(), Actor()
    actor.error, dying.error = NotMade(), GONE
    lab = Lab(actors=[actor, dying])
    await asyncio.sleep(3)
    assert str(lab.error()).startswith("replica s:0 cannot start: The actor died")
    assert (lab.states()[1], lab.made) == (READY, [0, 1, 1]), "the last one of that name had not ended yet"


async def test_a_process_that_stood_still_before_the_controller_was_started_again():
    """One that waits for resources does not answer either: only an actor that had a process before looks at the time."""
    for again, replaced in ((True, True), (False, False)):
        lab = Lab((), (), hang_after=20.0)
        lab.it._again, lab.actors[1].stopped = again, True
        await lab.client()
        assert await lab.later(15) == [READY, SILENT if again else PENDING]
        assert (await lab.later(10) == [READY, READY], lab.actors[1].ends == ["to start again"]) == (replaced, replaced)


@pytest.mark.parametrize(
    ("hang_after", "silent", "replaced"), [(600.0, 10.0, 60.0), (20.0, 10.0, 20.0), (0.5, 3.0, 3.0)]
)
async def test_a_process_that_does_not_answer_is_avoided_then_replaced(hang_after, silent, replaced):
    lab = await begun((), (), hang_after=hang_after, after=30.5)
    lab.actors[0].stopped = True
    await asyncio.sleep(silent + 0.4)  # half a second until the next pulse
    assert lab.states() == [READY, READY]
    if silent < replaced:
        assert await lab.later(0.2) == [SILENT, READY]
        lab.actors[0].stopped = False
        assert await lab.later(0.2) == [READY, READY], "it answers again"
        await asyncio.sleep(0.3)
        lab.actors[0].stopped = True
        assert (await lab.later(replaced + 0.4), lab.actors[0].ends) == ([SILENT, READY], [])
    assert (await lab.later(2.0), lab.actors[0].ends) == ([READY, READY], ["to start again"])
    assert ([slot.starts for slot in lab.it.slots], lab.actors[1].ends) == ([2, 1], [])


async def test_a_process_that_stands_still_while_it_starts_is_replaced():
    """Its factory may take long, but its event loop answers meanwhile."""
    lab = await begun(({"seconds": 400.0}, {"seconds": 90.0}), hang_after=5.0, after=100.0)
    lab.actors[0].stopped = True
    assert (await lab.later(60.0), lab.actors[0].ends) == ([STARTING], [])
    assert (await lab.later(3.0), lab.actors[0].ends) == ([STARTING], ["to start again"])
    assert (await lab.later(400.0), lab.it.slots[0].starts) == ([READY], 2)


async def test_a_client_that_joins_keeps_the_service_until_it_holds_it():
    """The last other client may leave between the two calls."""
    lab = Lab(())
    end = await lab.client("one")
    await lab.it.join(lab.spec.config, "mine", client="two")
    end.set_exception(LEFT)
    assert (await lab.ended(GRACE - 1), lab.it.clients) == ("", {"two"})
    end = await lab.client("two")
    assert await lab.ended(GRACE + 1) == ""
    await lab.it.join(lab.spec.config, "mine", client="three")  # and never calls hold()
    end.set_exception(LEFT)
    assert await lab.ended(GRACE - 1) == ""
    assert await lab.ended(2) == "its last client left"


@pytest.mark.parametrize("detached", [False, True])
async def test_a_service_ends_with_its_last_client_unless_it_is_detached(detached, cluster):
    lab = Lab((), (), detached=detached)
    one, two = await lab.client("one"), await lab.client("two")
    await asyncio.sleep(100)
    one.set_exception(LEFT)
    await asyncio.sleep(100)
    assert (await lab.it.table())["clients"] == 1
    lab.actors[1].stopped = True
    two.set_exception(LEFT)
    await asyncio.sleep(15)  # a replica that does not answer has ten seconds to close
    assert (await lab.it.table())["ended"] == ("" if detached else "its last client left")
    assert lab.running.done() == lab.held.done() == lab.actors[0].closed == (not detached)
    killed = [] if detached else ["for good"]
    assert [each.ends for each in (*lab.actors, cluster.keeper)] == [killed] * 3
    assert cluster.ran == ([] if detached else [True]), "the controller ends last"


async def test_a_client_that_lost_its_connection_may_come_back():
    lab = Lab()
    end = await lab.client("one")
    end.set_exception(DIED)
    assert not await lab.ended(GRACE - 1), "it may have called ray.shutdown(), and connect again"
    again = await lab.client("again")
    await asyncio.sleep(100)
    assert (lab.it.clients, lab.it.ended) == ({"again"}, "")
    again.set_exception(DIED)
    assert await lab.ended(GRACE + 1) == "its last client left"


async def test_a_service_without_any_client_ends():
    lab, kept = Lab(), Lab(detached=True)
    assert not await lab.ended(59)
    assert (await lab.ended(3), kept.it.ended) == ("no client used it", "")
    await asyncio.wait_for(kept.it.end(), 1.0)
    assert (kept.it.ended, kept.actors[0].closed) == ("it was shut down", True)
    kept.it._end("its last client left")
    assert (await kept.construct())["ended"] == "it was shut down"


async def test_a_controller_that_was_started_again_finds_what_runs(cluster):
    """Ray sends it the calls of the clients again; replicas are not started twice, and keep the weights of the first."""
    lab = Lab((), ())
    end = await lab.client()
    await asyncio.sleep(1)
    lab.actors[0].error = DIES
    await asyncio.sleep(3)
    lab.running.cancel()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0.1)
    again = Lab(actors=lab.actors)
    end = await again.client()
    await again.it.run()  # a second call returns at once
    await asyncio.sleep(0.1)
    table = await again.construct()
    assert (table["states"], table["starts"], table["fingerprint"]) == ([READY] * 2, [2, 1], "f")
    assert (table["clients"], [len(each.given) for each in again.actors]) == (1, [2, 1])
    end.set_exception(LEFT)
    assert await again.ended(1)
    Controller(again.spec, create=again.create)
    assert cluster.ran == [True, {"max_task_retries": 0}], "as an actor it supervises by itself"


async def test_a_model_by_value_is_handed_in_by_a_client_and_is_lost_with_the_controller():
    lab = await begun((), (), model=True)
    assert await lab.later(29) == [STARTING, STARTING]
    await lab.it.deposit("model")
    assert (await lab.later(1), (await lab.it.table())["has_model"]) == ([READY] * 2, True)
    assert [each.given for each in lab.actors] == [[["reference of model"]]] * 2
    again = Lab(model=True)  # nobody has it any more
    await again.client()
    await asyncio.sleep(31)
    assert "the model of 's' was given by value, and is lost: the controller that kept it ended" in str(again.error())
    await again.construct()
    await again.it.deposit("it again")
    assert (await again.later(1), again.actors[0].given) == ([READY], [["reference of it again"]])


async def test_a_request_is_refused_after_three_processes_died_of_it():
    lab = await begun((), (), after=1)

    async def trial(replica, digest="bad", *, dies=True):
        may = await lab.it.begin_trial(digest, replica, lab.it.slots[replica].life)
        if may and dies:
            lab.actors[replica].error = DIES
        await asyncio.sleep(3)
        return may

    assert [await trial(replica) for replica in (0, 1)] == [True, True]
    assert await trial(1, "other")
    for _ in range(3):  # a large request is scored in several batches
        assert await trial(0, dies=False), "two deaths never refuse"
    await lab.it.end_trial("bad")  # it survived: the count starts over
    assert [await trial(replica) for replica in (0, 0, 1, 0, 1)] == [True] * MAX_TRIALS + [False] * 2
    assert lab.actors[0].news["refused"] == lab.actors[1].news["refused"] == ["bad"]
    await lab.it.end_trial("bad")  # of a process that was thought dead
    assert [await trial(0, digest) for digest in ("bad", "other")] == [False, True]


async def test_a_process_that_dropped_a_request_did_not_die_of_it():
    lab = await begun(())
    for _ in range(MAX_TRIALS + 2):
        await asyncio.sleep(3)
        life = lab.it.slots[0].life
        assert await lab.it.begin_trial("late", 0, life)
        await lab.it.end_trial("late", life)  # its deadline was over
        lab.actors[0].error = DIES


async def test_only_processes_that_ended_count_as_dead():
    """A client may send a request again that still runs."""
    lab = await begun((), (), after=1)
    lives = [slot.life for slot in lab.it.slots]
    for replica in (0, 1, 0, 1, 0, 1):
        assert await lab.it.begin_trial("slow", replica, lives[replica])
    for _ in range(MAX_TRIALS):
        await asyncio.sleep(3)
        assert await lab.it.begin_trial("bad", 0, lab.it.slots[0].life)
        lab.actors[0].error = DIES
    assert await lab.it.begin_trial("bad", 1, lives[1]), "the controller has not heard of the third death"
    await asyncio.sleep(3)
    assert not await lab.it.begin_trial("bad", 1, lives[1])


async def test_what_is_kept_of_requests_is_bounded():
    lab = Lab(detached=True)
    await asyncio.sleep(1)
    for i in range(1500):
        for life in "abcd"[: 4 if i < 1200 else 1]:
            await lab.it.begin_trial(str(i), 0, life)
    await asyncio.sleep(1)
    assert lab.actors[0].news["refused"] == [str(i) for i in range(1200 - 1024, 1200)]
    assert list(lab.it._trials) == [str(i) for i in range(1500 - 1024, 1500)]
