"""Everything this project changes in Megatron: one file for each reason."""
