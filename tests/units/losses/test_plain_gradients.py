"""The objectives that neither clip nor gate: opmd, gpg, importance_sampling."""

from __future__ import annotations

import math

import pytest

from by_hand import assert_result, evaluate
from torchrl_llm_kl.losses import gpg, importance_sampling, opmd

TOKENS = {"ratio": [[2.0, 0.25]], "advantage": [[3.0, -5.0]], "log_prob": [[-1.0, -2.0]]}


def test_gpg_by_hand() -> None:
    assert_result(evaluate(gpg, **TOKENS), value=[[3.0, -10.0]], gradient=[[-3.0, 5.0]])


def test_opmd_by_hand() -> None:
    assert_result(evaluate(opmd, **TOKENS, tau=0.25), value=[[2.4, -8.0]], gradient=[[-2.4, 4.0]])
    assert_result(evaluate(opmd, **TOKENS), value=[[1.5, -5.0]], gradient=[[-1.5, 2.5]])
    with pytest.raises(ValueError, match=r"tau must be at least 0, got -0.5"):
        evaluate(opmd, **TOKENS, tau=-0.5)


def test_importance_sampling_by_hand() -> None:
    result = evaluate(importance_sampling, **TOKENS)
    assert_result(result, value=[[-6.0, 1.25]], gradient=[[-6.0, 1.25]], ratio_mean=1.125)


def test_importance_sampling_is_not_clamped_at_20_nats() -> None:
    far = {"ratio": [[math.exp(30.0), math.exp(-30.0)]], "advantage": [[1.0, 1.0]], "log_prob": [[-1.0, -40.0]]}
    weight = 1.0686474581524463e13
    assert_result(
        evaluate(importance_sampling, **far), value=[[-weight, -1 / weight]], gradient=[[-weight, -1 / weight]]
    )


def test_importance_sampling_ends_at_80_nats_without_gradient() -> None:
    result = evaluate(importance_sampling, ratio=[[math.exp(100.0)]], advantage=[[1.0]])
    assert_result(result, value=[[-math.exp(80.0)]], gradient=[[0.0]])
