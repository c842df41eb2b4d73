"""Base models by name, their chat templates and tokenizers, without torch."""
