"""A smoke test of the service: local numbers, a bad request, a killed replica."""

import os
import signal

import pytest
import torch
from tensordict import TensorDict

from closeness import assert_near
from load import all_up, callers, pids, sequences
from remote_models import model
from torchrl_llm_kl import RetrieveKL
from torchrl_llm_kl.service import RayRetrieveLogProb
from waits import until

pytestmark = pytest.mark.smoke


def data():
    full = torch.randint(97, (3, 9), generator=torch.Generator().manual_seed(0))
    tokens = {"full": full, "prompt": full[:, :4].clone()}
    return TensorDict({"tokens": tokens, "next": {"reward": torch.zeros(3, 1)}}, [3])


def test_a_served_reference_gives_the_numbers_of_a_local_one(shared):
    found = RetrieveKL(model(1), shared.model, coeff=0.3)(data())["next"]
    want = RetrieveKL(model(1), model(), coeff=0.3)(data())["next"]
    for key in (("ref_log_probs", "full"), "kl_penalty", "reward"):
        assert torch.count_nonzero(want[key]) == 15
        assert_near(found[key], want[key], size=16, dtype=torch.float32)
    alone = RayRetrieveLogProb(shared.model)(data())["next", "log_probs", "full"]
    assert_near(alone, want["ref_log_probs", "full"], size=16, dtype=torch.float32)


def test_a_bad_request_fails_by_itself_and_a_killed_replica_comes_back(shared, local):
    all_up(shared)
    before = pids(shared)
    with callers(shared.model, calls=6) as load:
        with pytest.raises(ValueError, match="token id 500 at sequence 0, position 1 is outside the vocabulary"):
            shared.model.make_scorer().score([[1, 500]])
        until(lambda: len(load.answers) >= 4)
        os.kill(before[0], signal.SIGKILL)
    load.assert_all_right(local)
    assert load.asked == 24
    until(lambda: len(pids(shared)) == 2 and before[0] not in pids(shared), seconds=240.0)
    assert before[1] in pids(shared)
    assert shared.model.make_scorer().score(sequences()).values.shape == sequences().values.shape
