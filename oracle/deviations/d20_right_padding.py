"""Batched prefill pads on the right: some hybrid models take the padding into a row's state."""
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import bailing_moe_linear, nemotron_h, olmo_hybrid

SHARP = {"o_proj": 8, "dense": 8, "out_proj": 8, "A_log": -4}  # so that context decides
args = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=320, max_position_embeddings=4096)
bailing = dict(moe_intermediate_size=32, num_experts=4, num_shared_experts=1, layer_group_size=4,
               num_experts_per_tok=2, first_k_dense_replace=4, group_norm_size=2,
               norm_topk_prob=True, rope_theta=10000.0)
nemotron = dict(mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=32, conv_kernel=4, n_groups=2,
                layer_norm_epsilon=1e-5, hybrid_override_pattern=["M", "*", "M", "-"],
                mamba_proj_bias=False, mlp_bias=False, use_bias=False, use_conv_bias=True,
                attention_bias=False)
olmo = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32,
            linear_value_head_dim=32, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True,
            tie_word_embeddings=True, attention_bias=False)
short, long = [[(7 * i * i + 3) % 300 + 10 for i in range(n)] for n in (9, 20)]
alone, batched = [], []
for family, own in (bailing_moe_linear, bailing), (nemotron_h, nemotron), (olmo_hybrid, olmo):
    mx.random.seed(0)
    model = family.Model(family.ModelArgs.from_dict(dict(model_type="", **args, **own)))
    model.load_weights([
        (name, weight * next((sharp for part, sharp in SHARP.items() if part in name), 1))
        for name, weight in tree_flatten(model.parameters())
    ])
    alone.append([token for token, _ in generate_step(mx.array(short), model, max_tokens=6)])
    batch = BatchGenerator(model)
    _, row = batch.insert([long, short], [6, 6])
    says = []
    while len(says) < 6:
        says += [response.token for response in batch.next()[1] if response.uid == row]
    batched.append(says)
print("expected:", *alone)
print("actual:  ", *batched)
