"""With top_logprobs mlx_lm.server reports other ids than the ones it emitted."""
import http.client, json, os, pathlib, socket, sys, tempfile, threading, time
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import server
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

config = dict(
    model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=128, vocab_size=128,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5,
)


def ids(**options):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"prompt": "Hello", "max_tokens": 8, "logprobs": True, **options})
    try:
        connection.request("POST", "/v1/completions", body)
    except ConnectionRefusedError:  # the server is starting
        time.sleep(0.1)
        return ids(**options)
    answer = json.load(connection.getresponse())
    return [token["id"] for token in answer["choices"][0]["logprobs"]["content"]]


with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
    mx.random.seed(0)
    weights = tree_flatten(Model(ModelArgs.from_dict(config)).parameters())
    mx.save_safetensors(f"{folder}/model.safetensors", {name: 3 * value for name, value in weights})
    pathlib.Path(folder, "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE(vocab={chr(i): i for i in range(128)}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="\0").save_pretrained(folder)
    port = probe.getsockname()[1]
    probe.close()
    sys.argv = ["mlx_lm.server", "--model", folder, "--port", str(port)]
    threading.Thread(target=server.main, daemon=True).start()
    print(f"expected: {ids()}\nactual:   {ids(top_logprobs=3)}", flush=True)
os._exit(0)  # the server's worker thread would keep the process
