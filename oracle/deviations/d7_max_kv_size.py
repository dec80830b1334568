"""max_kv_size is ignored by models with their own make_cache, and batches lose the kept tokens."""
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import llama, qwen3
from mlx_lm.models.cache import make_prompt_cache

SHARP = {"o_proj": 8, "down_proj": 8, "q_proj": 4, "k_proj": 4}  # so that context decides
args = dict(
    hidden_size=64, num_hidden_layers=4, intermediate_size=128, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, vocab_size=320, rope_theta=10000.0,
    max_position_embeddings=4096, tie_word_embeddings=True,
)
mx.random.seed(0)
model = qwen3.Model(qwen3.ModelArgs(model_type="qwen3", **args))
model.load_weights([
    (name, weight * next((sharp for part, sharp in SHARP.items() if part in name), 1))
    for name, weight in tree_flatten(model.parameters())
])
LIMIT, prompt = 16, [(7 * i * i + 3) % 300 + 10 for i in range(10)]
single = [t for t, _ in generate_step(mx.array(prompt), model, max_tokens=16, max_kv_size=LIMIT)]
batch = BatchGenerator(model, max_kv_size=LIMIT)
batch.insert([prompt], [16])
batched = []
while len(batched) < 16:
    batched += [response.token for response in batch.next()[1]]
own = llama.Model(llama.ModelArgs(model_type="llama", **args))
cache = make_prompt_cache(own, max_kv_size=LIMIT)
own(mx.zeros((1, 20), mx.int32), cache=cache)
print(f"expected: llama keeps {LIMIT} keys, qwen3 says", single)
print(f"actual:   llama keeps {cache[0].size()} keys, qwen3 says", batched)
