"""The Ray service compared with torchrl's, and the number of replicas that collectors need."""
