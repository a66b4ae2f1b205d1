"""A reference behind a service or of another backend: an exact KL is refused at construction, any other is scored."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from torchrl_llm_kl import LogProbScorer, PolicyLoss, RetrieveKL, RetrieveLogProb, make_algorithm
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.service import RemoteModel
from torchrl_llm_kl.service.control._spec import ServiceSpec
from toy_models import tiny_model

REFUSED = "an exact KL needs whole distributions, and {}, {}, returns log-probs only: pass the transformers model"


class Engine:
    """A TorchRL wrapper whose weights are elsewhere."""

    model = SimpleNamespace()

    def get_new_version(self, **_):
        return self


class Served(RemoteModel):
    """A service whose scores are computed here; nothing else of a service is used."""

    def make_scorer(self, **settings):
        remote = super().make_scorer(**settings)
        return LogProbScorer(tiny_model(seed=1), temperature=remote.temperature)


class ServedAlike(Served):
    """With the interface of a bare model."""

    interface = ModelInterface()


def service(kind=RemoteModel):
    return kind(ServiceSpec("name", tiny_model, "source", {"max_tokens": 64}))


REMOTE = {
    "service": (service, REFUSED.format("RemoteModel", "behind a service")),
    "backend": (Engine, REFUSED.format("Engine", "of another backend")),
    "scorer of a backend": (lambda: LogProbScorer(Engine()), REFUSED.format("Engine", "of another backend")),
}


@pytest.mark.parametrize("kind", REMOTE)
def test_an_exact_kl_in_the_loss_is_refused_at_construction(kind):
    make, message = REMOTE[kind]
    actor = tiny_model(seed=0)
    with pytest.raises(ValueError, match=message):
        PolicyLoss(actor, terms=[KLToReference(0.1, "exact")], reference=make())
    with pytest.raises(ValueError, match=message):
        make_algorithm("grpo", actor, reference=make(), group_size=2, kl_loss="exact")
    with pytest.raises(ValueError, match=message):
        make_algorithm("gkd", actor, reference=make())


@pytest.mark.filterwarnings("ignore::torchrl_llm_kl.estimators.KLPlacementWarning")
@pytest.mark.parametrize("kind", ["service", "backend"])
def test_an_exact_kl_in_the_reward_is_refused_at_construction(kind):
    make, message = REMOTE[kind]
    model = tiny_model(seed=0)
    with pytest.raises(ValueError, match=message):
        make_algorithm("grpo", model, reference=make(), group_size=2, kl_loss="none", kl_reward="exact")
    for policy, reference in ((model, make()), (make(), model), ("from_collector", make())):
        with pytest.raises(ValueError, match=message):
            RetrieveKL(policy, reference, estimator="exact")
        with pytest.raises(ValueError, match=message):
            RetrieveLogProb(policy, reference=reference, log_probs_full_key=("log_probs", "full"))


def test_an_exact_kl_that_is_requested_later():
    model = tiny_model(seed=0)
    transform = RetrieveLogProb(model)
    with pytest.raises(ValueError, match=REFUSED.format("Engine", "of another backend")):
        transform.reference = Engine()
    assert transform.reference is None
    kl = RetrieveKL(model, Engine())
    with pytest.raises(ValueError, match=REFUSED.format("Engine", "of another backend")):
        kl.estimator = "exact"
    assert kl.estimator != "exact"
    loss = PolicyLoss(model, terms=[KLToReference(0.1, "k2")], reference=service())
    loss.kl_to_ref_estimator = "exact"
    with pytest.raises(ValueError, match=REFUSED.format("RemoteModel", "behind a service")):
        loss(batch())


def test_what_needs_the_model_here_is_refused_at_construction():
    remote = service().make_scorer()
    with pytest.raises(ValueError, match="the entropy needs whole distributions, and Engine, of another backend"):
        RetrieveLogProb(Engine(), entropy_key="entropy")
    with pytest.raises(ValueError, match="RemoteModel returns log-probs only"):
        LogProbScorer(tiny_model()).evaluate([[3, 4]], reference=remote)
    with pytest.raises(TypeError, match="got RemoteScorer"):
        PolicyLoss(tiny_model(), terms=[KLToReference(0.1)], reference=remote)
    with pytest.raises(TypeError, match=r"got RemoteModel: train the model in this process"):
        PolicyLoss(service())


def batch():
    full = torch.tensor([[3, 4, 5], [3, 4, 6]])
    tokens = TensorDict(full=full, prompt=full[:, :2], batch_size=[2])
    log_probs = TensorDict(full=torch.full((2, 3), -2.0), batch_size=[2])
    advantage = torch.tensor([[1.0], [-1.0]])
    return TensorDict(tokens=tokens, log_probs=log_probs, advantage=advantage, batch_size=[2])


def test_a_service_scores_the_reference_log_probs_that_the_data_lacks():
    """As a local reference does, whatever the actor's ``tokens_per_batch``."""
    actor = tiny_model(seed=0)
    settings = {"terms": [KLToReference(0.5, "k2")], "temperature": 0.7, "tokens_per_batch": 32}
    want = PolicyLoss(actor, reference=tiny_model(seed=1), **settings)(batch())
    got = PolicyLoss(actor, reference=service(Served), **settings)(batch())
    assert want["loss_kl_to_ref"] > 0.01
    assert_close(got["loss_kl_to_ref"], want["loss_kl_to_ref"])


@pytest.mark.filterwarnings("ignore:the top k below")
@pytest.mark.parametrize(("name", "beta"), [("gkd", 0.3), ("gkd", 1.0), ("on_policy_distill", 0.0)])
def test_a_served_teacher_trains_as_a_local_one(name, beta):
    student = tiny_model(seed=0)
    losses, gradients = [], []
    for teacher in (tiny_model(seed=1), service(ServedAlike)):
        parts = make_algorithm(name, student, reference=teacher, top_k=6, beta=beta, temperature=0.8)
        data = parts.prepare(batch().exclude("log_probs", "advantage"))
        assert data["top_k", "ids"].shape == (2, 3, 6)
        loss = parts.loss(data).total_loss
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, tuple(student.parameters())))
    assert losses[0] > 0.01
    assert_close(losses[1], losses[0])
    assert_close(gradients[1], gradients[0])
