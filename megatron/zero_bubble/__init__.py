"""Zero-bubble pipeline parallelism for Megatron. Import `megatron.zero_bubble.adaptor` to install it."""
