from torchrl_llm_kl.rollouts import Located, Scope, assistant_mask as counted_mask, locate

__all__ = ["Located", "Scope", "counted_mask", "locate"]
