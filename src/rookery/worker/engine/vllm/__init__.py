"""vLLM as an engine: in this process's children, or a running server that this worker fronts."""
