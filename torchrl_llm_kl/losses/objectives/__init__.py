"""Objectives, by family: pure functions of equal-shaped tensors. :mod:`torchrl_llm_kl.losses` imports all of them."""
