"""The transforms with remote models, without Ray."""

from types import SimpleNamespace

import pytest
import torch
import torchrl
from tensordict import TensorDict
from torchrl.envs.llm.transforms import kl as torchrl_kl

from remote_models import model
from torchrl_llm_kl import KLComputation, KLRewardTransform, LogProbScorer, RetrieveKL, RetrieveLogProb, make_algorithm
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.service import RayKLRewardTransform, RayRetrieveKL, RayRetrieveLogProb, RemoteModel, _transforms
from torchrl_llm_kl.service.control._spec import ServiceSpec


class RemoteStub:
    """A model in another process, as transforms see it."""

    interface = ModelInterface()

    def __init__(self, events):
        self.events, self.scorer = events, LogProbScorer(model(seed=1))

    def make_scorer(self, **settings):
        return self

    def begin(self, tokens, mask, **settings):
        self.events.append("request sent")

        def finish():
            self.events.append("reply awaited")
            return self.scorer.evaluate(tokens, mask)

        return finish


def test_the_reference_is_scored_while_the_policy_is():
    events = []
    policy = model()
    transform = RetrieveKL(policy, RemoteStub(events), coeff=0.5)
    policy.register_forward_pre_hook(lambda *_: events.append("policy scored"))
    policy.model.register_forward_pre_hook(lambda *_: events.append("policy scored"))
    full = torch.randint(97, (2, 6), generator=torch.Generator().manual_seed(0))

    def data():
        return TensorDict(
            {
                "tokens": {"full": full, "prompt": full[:, :2].clone()},
                "masks": {"all_attention_mask": torch.ones_like(full, dtype=torch.bool)},
                "next": TensorDict({"reward": torch.zeros(2, 1)}, [2]),
            },
            [2],
        )

    found = transform(data())
    assert events[0] == "request sent"
    assert events[-1] == "reply awaited"
    assert events[1:-1]
    assert set(events[1:-1]) == {"policy scored"}
    expected = RetrieveKL(model(), model(seed=1), coeff=0.5)(data())
    for key in (("next", "kl_penalty"), ("next", "reward")):
        assert torch.allclose(found[key], expected[key], atol=1e-6)


def test_service_arguments_without_a_service_are_refused():
    there = RemoteModel(ServiceSpec("name", model, "source", {"max_tokens": 1}))
    with pytest.raises(ValueError, match="actor_name, num_replicas would be ignored"):
        RayRetrieveLogProb(there, num_replicas=7, actor_name="x")
    with pytest.raises(ValueError, match="there is nothing to serve, use the local class"):
        RetrieveKL("from_collector", "base", service_backend="ray")
    for here in ({"use_ray_service": False}, {"service_backend": "direct"}):
        with pytest.raises(ValueError, match="use the local class"):
            RayRetrieveLogProb(model(), **here)


# ------------------------------------------------------------------ torchrl's backends

VARIANTS = {RetrieveLogProb: RayRetrieveLogProb, RetrieveKL: RayRetrieveKL, KLRewardTransform: RayKLRewardTransform}
MODELS = {RetrieveLogProb: 1, RetrieveKL: 2, KLRewardTransform: 1}


@pytest.fixture
def started(monkeypatch):
    """The arguments of each service that was started; none is."""
    arguments = []

    def start(served, *, factory, **options):
        arguments.append({name: value for name, value in options.items() if value is not None})
        model = RemoteStub([])
        model.interface = ModelInterface(log_probs_key=f"log_probs_{len(arguments)}")
        return SimpleNamespace(model=model, close=lambda: None)

    monkeypatch.setattr(_transforms, "ScoringService", start)
    return arguments


def made(cls, **kwargs):
    return cls(*(model(seed=seed) for seed in range(MODELS[cls])), **kwargs)


@pytest.mark.parametrize("cls", VARIANTS)
def test_the_backend_of_torchrl_builds_the_variant(cls, started):
    assert type(made(cls)) is type(made(cls, service_backend="direct")) is cls
    assert started == []
    with torchrl.service_backend("ray"):
        found = made(cls, num_cpus=2)
        local = made(cls, service_backend="direct")
        again = VARIANTS[cls](*(model(seed=seed) for seed in range(MODELS[cls])), num_cpus=2)
    assert type(found) is type(made(cls, service_backend="ray", num_cpus=2)) is type(again) is VARIANTS[cls]
    with pytest.warns(FutureWarning, match="use_ray_service is deprecated .* Use service_backend='ray'") as warned:
        assert type(made(cls, use_ray_service=True, num_cpus=2)) is VARIANTS[cls]
    assert warned[0].filename == __file__
    assert [options["num_cpus"] for options in started] == [2] * (4 * MODELS[cls])
    assert type(local) is cls
    if cls is RetrieveKL:  # its parts follow no scope: what they score is served already
        for transform in (found, local):
            assert [type(part) for part in transform] == [RetrieveLogProb, RetrieveLogProb, KLComputation]


@pytest.mark.parametrize("cls", VARIANTS)
def test_options_of_the_backend_are_arguments_of_the_service(cls, started):
    options = {"num_gpus": 0.5, "resources": {"gold": 1}, "name": "mine"}
    given = {"actor_options": options} if cls is RetrieveKL else options
    made(cls, service_backend="ray", service_backend_options=given, timeout=7)
    names = ["mine-gen", "mine"] if cls is RetrieveKL else ["mine"]
    expected = {"num_gpus": 0.5, "resources": {"gold": 1}, "timeout": 7}
    assert started == [{**expected, "name": name} for name in names]


def test_an_option_that_no_actor_has_is_refused(started):
    for option in ("memory", "num_replicas", "num_cpu"):
        with pytest.raises(ValueError, match=f"options has '{option}', expected options of Ray's actors"):
            made(RetrieveLogProb, service_backend="ray", service_backend_options={option: 1})
    with pytest.raises(ValueError, match=r"num_cpus= and service_backend_options\['num_cpus'\] are both given"):
        made(RetrieveLogProb, service_backend="ray", service_backend_options={"num_cpus": 1}, num_cpus=1)
    assert started == []


WRONG = [
    {"service_backend": "thread"},
    {"service_backend": "rya"},
    {"service_backend": "thread", "use_ray_service": True},
    {"service_backend_options": {"num_cpus": 1}},
    {"service_backend": "direct", "service_backend_options": {"num_cpus": 1}},
]


@pytest.mark.parametrize("cls", [RetrieveKL, KLRewardTransform])
def test_errors_of_a_backend_are_those_of_torchrl(cls):
    for wrong in WRONG:
        texts = []
        for each in (cls, getattr(torchrl_kl, cls.__name__)):
            with pytest.raises(ValueError) as error:
                each(**wrong)
            texts.append(str(error.value))
        assert texts[0] == texts[1]
    with torchrl.service_backend("process"), pytest.raises(ValueError, match=r"'process'.*selected by an enclosing"):
        cls()


def test_a_subclass_has_no_variant():
    class Mine(RetrieveLogProb):
        """A user's subclass of a local class."""

    with pytest.raises(TypeError, match=r"Mine does not support service_backend='ray'.*RayRetrieveLogProb"):
        Mine(model(), service_backend="ray")
    assert type(Mine(model())) is Mine


def test_a_scope_leaves_the_policy_of_an_algorithm_here(started):
    """A copy behind a service would keep the first weights."""
    with torchrl.service_backend("ray"):
        parts = make_algorithm("grpo", model(), reference=model(seed=1), group_size=2, kl_reward="k1")
    assert type(parts.kl_transform) is RetrieveKL
    assert started == []
