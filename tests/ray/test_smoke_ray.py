"""The service in short: transforms get the local numbers, a bad request fails alone, a killed replica comes back."""

import os
import signal
from pathlib import Path

import pytest
import ray
import torch
from tensordict import TensorDict

from closeness import assert_near
from load import all_up, callers, sequences
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


def log_lines(text):
    """Lines of this package in the logs of Ray's workers."""
    folder = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    logs = "\n".join(path.read_text() for path in folder.glob("worker-*.err"))
    return [line for line in logs.splitlines() if "torchrl_llm_kl.service" in line and text in line]


def test_a_bad_request_fails_alone_and_a_killed_replica_comes_back(shared, local):
    all_up(shared)
    before = shared.stats()[0]
    with callers(shared.model, calls=6) as load:
        with pytest.raises(ValueError, match="token id 500 at sequence 0, position 1 is outside the vocabulary"):
            shared.model.make_scorer().score([[1, 500]])
        until(lambda: len(load.answers) >= 4)
        os.kill(before["pid"], signal.SIGKILL)
    load.assert_all_right(local)
    assert load.asked == 24
    until(lambda: shared.stats()[0].get("restarts") == before["restarts"] + 1)
    after = shared.stats()[0]["pid"]
    assert after != before["pid"]
    assert log_lines(f"replica shared:0 started, pid {before['pid']}") or before["restarts"]
    assert log_lines(f"replica shared:0 restarted, pid {after}")
    assert shared.model.make_scorer().score(sequences()).values.shape == sequences().values.shape
