"""Zero-bubble pipeline parallelism for Megatron: `import megatron.zero_bubble.adaptor`."""
