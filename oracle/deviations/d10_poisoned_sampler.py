"""After a refused top_k every unseeded sampled token fails, until something seeds the generator."""
import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

logprobs = mx.log(mx.ones((1, 8)) / 8)


def draw(**options):
    try:
        make_sampler(temp=1.0, **options)(logprobs).item()
        return "a token is drawn"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


print("expected:", draw())
draw(top_k=8)  # refused: it must be smaller than the vocabulary
print("actual:  ", draw())
