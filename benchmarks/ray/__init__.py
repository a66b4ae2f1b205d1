"""The Ray service beside torchrl's, and how many replicas it takes."""
