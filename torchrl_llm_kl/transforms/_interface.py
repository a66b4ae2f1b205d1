from torchrl_llm_kl.rollouts import TOKENS_FULL, ModelInterface, sub_key

__all__ = ["TOKENS_FULL", "ModelInterface", "sub_key"]
