"""Text without torch: which base models there are, their chat templates, their tokenizers."""
