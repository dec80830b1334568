"""Prompt cache files: loaded caches follow the file, metadata changes, batch caches lose parts."""
import os, tempfile
import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, load_prompt_cache, save_prompt_cache


def filled(cache, value, rows=1):
    keys = mx.full((rows, 1, 4, 8), value)
    cache.update_and_fetch(keys, keys)
    return cache


with tempfile.TemporaryDirectory() as folder:
    file = os.path.join(folder, "cache.safetensors")
    metadata = {"model.name": "llama"}
    save_prompt_cache(file, [filled(KVCache(), 1.0)], metadata)
    (loaded,), told = load_prompt_cache(file, return_metadata=True)
    save_prompt_cache(file, [filled(KVCache(), 2.0)], metadata)  # another, in its place
    value = loaded.keys[0, 0, 0, 0].item()

    save_prompt_cache(file, [filled(BatchKVCache([0, 2]), 1.0, rows=2)])
    (batch,) = load_prompt_cache(file)
    try:
        batch.finalize()  # the end of every batched prefill
        state = "batch is whole"
    except AttributeError as error:
        state = str(error)
print(f"expected: keys are 1.0, {metadata}, batch is whole")
print(f"actual:   keys are {value}, {told}, {state}")
