"""A logit_bias id beyond the vocabulary is written to: mlx_lm.server crashes, process and all."""
import http.client, json, pathlib, socket, subprocess, sys, tempfile, time
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
config = dict(model_type="llama", hidden_size=8, intermediate_size=8, num_hidden_layers=1,
              num_attention_heads=1, rms_norm_eps=1e-5, vocab_size=8, tie_word_embeddings=False)
weights = dict(tree_flatten(Model(ModelArgs(**config)).parameters()))
weights["model.embed_tokens.weight"] = 99 * mx.eye(8)
weights["lm_head.weight"] = mx.eye(8, k=-1)  # whatever came before, b follows a, c follows b, ...
def ask(port, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", "/v1/completions", json.dumps({"max_tokens": 1, **body}))
        answer = json.load(connection.getresponse())
    except (http.client.HTTPException, OSError) as error:
        return type(error).__name__
    return answer.get("error") or answer["choices"][0]["text"]
with tempfile.TemporaryDirectory() as folder:
    mx.save_safetensors(f"{folder}/model.safetensors", weights)
    pathlib.Path(folder, "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE(vocab=dict(zip("abcdefg$", range(8))), merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="$").save_pretrained(folder)
    port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", folder, "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)): time.sleep(0.1)
        print("expected:", ask(port, {"prompt": "b"}))
        ask(port, {"prompt": "a", "logit_bias": {10**9: 1.0}})  # of 8 ids
        print("actual:  ", ask(port, {"prompt": "b"}))
    finally:
        server.kill()
