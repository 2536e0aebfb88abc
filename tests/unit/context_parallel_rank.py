"""A rank of two that share a sequence: the stand-in's attention against that over all of it."""

from megatron.zero_bubble.patches import cpu

PLACES = ((0, 1, 6, 7), (2, 3, 4, 5))
"""Megatron's order: of four chunks of two tokens, a rank has an early one and a late one."""


def main() -> None:
    """Raises AssertionError at the first difference."""
    cpu.install()
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    places = torch.tensor(PLACES[parallel_state.get_context_parallel_rank()])

    def attention(size: int) -> torch.nn.Module:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=4,
            num_query_groups=2,
            attention_dropout=0.0,
            context_parallel_size=size,
            masked_softmax_fusion=False,
        )
        return DotProductAttention(config, 1, AttnMaskType.causal, "self")

    torch.manual_seed(2)
    whole = [torch.randn(8, 3, heads, 4, requires_grad=True) for heads in (4, 2, 2)]
    gradient = torch.randn(8, 3, 16)
    parts = [one.detach()[places].requires_grad_() for one in whole]
    expected, actual = attention(1)(*whole, None), attention(2)(*parts, None)
    expected.backward(gradient)
    actual.backward(gradient[places])
    pairs = [("output", expected[places], actual)]
    for name, one, part in zip(("query", "key", "value"), whole, parts, strict=True):
        pairs.append((f"gradient of {name}", one.grad[places], part.grad))
    for name, left, right in pairs:
        assert torch.allclose(left, right, rtol=1e-5, atol=1e-6), name
        print(f"same: {name}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
