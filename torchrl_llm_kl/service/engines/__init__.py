"""What scores behind a replica's batcher: a model in its process, a gang of ranks, or a server over HTTP."""
