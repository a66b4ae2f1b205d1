"""Transforms and losses with remote models, without Ray."""

from types import SimpleNamespace

import pytest
import torch
import torchrl
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.envs.llm.transforms import kl as torchrl_kl

from remote_models import model
from torchrl_llm_kl import (
    Entropy,
    ExactKL,
    KLComputation,
    KLRewardTransform,
    LogProbScorer,
    PolicyLoss,
    RetrieveKL,
    RetrieveLogProb,
    make_algorithm,
)
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import Sampling, ScoreOptions
from torchrl_llm_kl.service import RayKLRewardTransform, RayRetrieveKL, RayRetrieveLogProb, RemoteModel, _transforms
from torchrl_llm_kl.service._remote import RemoteScorer
from toy_models import tiny_model


def test_the_reference_is_scored_while_the_policy_is(loop, monkeypatch):
    events, policy = [], model()

    def begun(scorer, request, options=None, begin=RemoteScorer.begin):
        events.append("request sent")
        pending = begin(scorer, request, options)
        return lambda: (events.append("reply awaited"), pending())[1]

    monkeypatch.setattr(RemoteScorer, "begin", begun)
    transform = RetrieveKL(policy, loop.serve(model(seed=1)), coeff=0.5)
    for module in (policy, policy.model):
        module.register_forward_pre_hook(lambda *_: events.append("policy scored"))
    data = batch().exclude("log_probs", "advantage")
    data["masks"] = TensorDict(all_attention_mask=torch.ones(2, 3, dtype=torch.bool), batch_size=[2])
    data["next"] = TensorDict(reward=torch.zeros(2, 1), batch_size=[2])
    found = transform(data.clone())
    assert (events[0], events[-1]) == ("request sent", "reply awaited")
    assert set(events[1:-1]) == {"policy scored"}
    expected = RetrieveKL(model(), model(seed=1), coeff=0.5)(data)
    for key in (("next", "kl_penalty"), ("next", "reward")):
        assert torch.allclose(found[key], expected[key], atol=1e-6)


def service():
    return RemoteModel("name")


def test_service_arguments_without_a_service_are_refused():
    with pytest.raises(ValueError, match="actor_name, num_replicas would have no effect"):
        RayRetrieveLogProb(service(), num_replicas=7, actor_name="x")
    for here in ({"use_ray_service": False}, {"service_backend": "direct"}):
        with pytest.raises(ValueError, match="Use the local class"):
            RayRetrieveLogProb(model(), **here)


EXACT = "an exact KL needs whole distributions, and {} returns log-probs only: pass the transformers model"
THERE, ELSEWHERE = EXACT.format("RemoteModel"), EXACT.format("Engine")


class Engine:
    """A TorchRL wrapper whose weights are elsewhere."""

    model = SimpleNamespace()

    def get_new_version(self, **_):
        return self


def batch():
    full = torch.tensor([[3, 4, 5], [3, 4, 6]])
    tokens = {"full": full, "prompt": full[:, :2].clone()}
    log_probs, advantage = {"full": torch.full((2, 3), -2.0)}, torch.tensor([[1.0], [-1.0]])
    return TensorDict({"tokens": tokens, "log_probs": log_probs, "advantage": advantage}, [2])


def refused(message, *calls):
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.filterwarnings("ignore::torchrl_llm_kl.estimators.KLPlacementWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [(service, THERE), (Engine, ELSEWHERE), (lambda: LogProbScorer(Engine()), ELSEWHERE)],
    ids=["service", "backend", "scorer of a backend"],
)
def test_an_exact_kl_is_refused_at_construction(make, message):
    actor, grpo = tiny_model(seed=0), {"group_size": 2}
    refused(
        message,
        lambda: PolicyLoss(actor, terms=[KLToReference(0.1, "exact")], reference=make()),
        lambda: make_algorithm("grpo", actor, reference=make(), kl_loss="exact", **grpo),
        lambda: make_algorithm("gkd", actor, reference=make()),
    )
    if isinstance(make(), LogProbScorer):
        return
    refused(message, lambda: make_algorithm("grpo", actor, reference=make(), kl_loss="none", kl_reward="exact", **grpo))
    for policy, reference in ((actor, make()), (make(), actor), ("from_collector", make())):
        refused(
            message,
            lambda pair=(policy, reference): RetrieveKL(*pair, estimator="exact"),
            lambda policy=policy, reference=reference: RetrieveLogProb(
                policy, log_probs_full_key=("log_probs", "full"), extras=[ExactKL(reference)]
            ),
        )


def test_features_that_need_a_local_model_are_refused():
    remote = service().make_scorer()
    refused(
        "entropy=True cannot be had from Engine, whose backend returns log-probs, not logits: score the transformers model",
        lambda: RetrieveLogProb(Engine(), extras=[Entropy()]),
    )
    refused(
        "an exact KL needs whole distributions, not a service: it sends scores of single tokens. Score",
        lambda: LogProbScorer(tiny_model()).evaluate([[3, 4]], reference=remote),
    )
    with pytest.raises(TypeError, match="got RemoteScorer"):
        PolicyLoss(tiny_model(), terms=[KLToReference(0.1)], reference=remote)
    with pytest.raises(TypeError, match=r"got RemoteModel: train the model in this process"):
        PolicyLoss(service())


@pytest.mark.filterwarnings("ignore:the top k below")
@pytest.mark.parametrize(
    ("name", "given"),
    [("gkd", {"objective_args": {"beta": 0.3}}), ("gkd", {"objective_args": {"beta": 1.0}}), ("on_policy_distill", {})],
)
def test_a_served_teacher_trains_as_a_local_one(loop, name, given):
    student, found = tiny_model(seed=0), []
    for teacher in (tiny_model(seed=1), loop.serve(tiny_model(seed=1))):
        options = {"top_k": 6, "options": ScoreOptions(Sampling(0.8)), **given}
        parts = make_algorithm(name, student, reference=teacher, **options)
        data = parts.prepare(batch().exclude("log_probs", "advantage"))
        assert data["top_k", "ids"].shape == (2, 3, 6)
        loss = parts.loss(data).total_loss
        found.append((loss, *torch.autograd.grad(loss, tuple(student.parameters()))))
    assert found[0][0] > 0.01
    assert_close(found[1], found[0])


VARIANTS = {RetrieveLogProb: RayRetrieveLogProb, RetrieveKL: RayRetrieveKL, KLRewardTransform: RayKLRewardTransform}


@pytest.fixture
def started(monkeypatch):
    """Records the arguments of each service in place of starting it."""
    arguments = []

    def start(served, *, factory, **options):
        arguments.append({name: value for name, value in options.items() if value is not None})
        made = service()
        made._interface = ModelInterface(log_probs_key=f"log_probs_{len(arguments)}"), True
        return SimpleNamespace(model=made, close=lambda: None)

    monkeypatch.setattr(_transforms, "ScoringService", start)
    return arguments


def made(cls, **kwargs):
    return cls(*(model(seed=seed) for seed in range(2 if issubclass(cls, RetrieveKL) else 1)), **kwargs)


@pytest.mark.parametrize("cls", VARIANTS)
def test_the_backend_of_torchrl_builds_the_variant(cls, started):
    assert type(made(cls)) is type(made(cls, service_backend="direct")) is cls
    assert started == []
    with torchrl.service_backend("ray"):
        found = made(cls, num_cpus=2)
        local = made(cls, service_backend="direct")
        again = made(VARIANTS[cls], num_cpus=2)
    assert type(found) is type(made(cls, service_backend="ray", num_cpus=2)) is type(again) is VARIANTS[cls]
    with pytest.warns(FutureWarning, match="use_ray_service is deprecated .* Use service_backend='ray'") as warned:
        assert type(made(cls, use_ray_service=True, num_cpus=2)) is VARIANTS[cls]
    assert warned[0].filename == __file__
    names = ["mine-gen", "mine"] if cls is RetrieveKL else ["mine"]
    assert [options["num_cpus"] for options in started] == [2] * (4 * len(names))
    assert type(local) is cls
    if cls is RetrieveKL:  # its parts follow no scope: what they score is served already
        for transform in (found, local):
            assert [type(part) for part in transform] == [RetrieveLogProb, RetrieveLogProb, KLComputation]
    started.clear()
    expected = {"num_gpus": 0.5, "resources": {"gold": 1}}  # options of the backend are arguments of the service
    options = {**expected, "name": "mine"}
    given = {"actor_options": options} if cls is RetrieveKL else options
    made(cls, service_backend="ray", service_backend_options=given, timeout=7)
    assert started == [{**expected, "timeout": 7, "name": name} for name in names]


def test_an_option_that_no_actor_has_is_refused(started):
    for option in ("memory", "num_replicas", "num_cpu"):
        with pytest.raises(ValueError, match=f"options has '{option}', expected options of Ray's actors"):
            made(RetrieveLogProb, service_backend="ray", service_backend_options={option: 1})
    with pytest.raises(ValueError, match=r"has 'num_cpus', expected .*, each given only once"):
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


def test_classes_and_algorithms_without_a_variant(started):
    """A user's subclass has no variant. A copy of an algorithm's policy behind a service would keep its first weights."""

    class Mine(RetrieveLogProb): ...

    class MyVariant(RayRetrieveLogProb): ...

    with pytest.raises(TypeError, match="Mine has no variant for Ray: pass it the model of a ScoringService"):
        Mine(model(), service_backend="ray")
    assert type(Mine(model())) is Mine
    with torchrl.service_backend("ray"):
        parts = make_algorithm("grpo", model(), reference=model(seed=1), group_size=2, kl_reward="k1")
    assert type(parts.kl_transform) is RetrieveKL
    assert started == []
    assert type(MyVariant(model(), service_backend="ray")) is MyVariant
    assert len(started) == 1
