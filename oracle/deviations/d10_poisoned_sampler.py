"""After a refused top_k every unseeded sampled token fails, until something seeds the generator."""
import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

logprobs = mx.log(mx.ones((1, 8)) / 8)
try:
    make_sampler(temp=1.0, top_k=8)(logprobs)  # refused: top_k must be below the vocabulary's 8
except ValueError:
    pass
print("expected: a token is drawn")
try:
    make_sampler(temp=1.0)(logprobs).item()
    print("actual:   a token is drawn")
except Exception as error:
    print(f"actual:   {type(error).__name__}: {str(error).splitlines()[0]}")
