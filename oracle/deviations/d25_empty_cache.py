"""A concatenating cache that is still empty can be saved but not loaded; a plain one can."""
import os, tempfile
from mlx_lm.models.cache import (
    ConcatenateKVCache, KVCache, load_prompt_cache, save_prompt_cache,
)


def saved_and_loaded(cache):
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "cache.safetensors")
        save_prompt_cache(file, [cache])
        try:
            (loaded,) = load_prompt_cache(file)
        except AttributeError as error:
            return str(error)
    return f"a cache of {loaded.offset} tokens"


print("expected:", saved_and_loaded(KVCache()))
print("actual:  ", saved_and_loaded(ConcatenateKVCache()))
